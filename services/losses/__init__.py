"""The three loss channels as pure functions on tensors; nothing here knows of actors, environments or models.

1. `policy`: seven policy objectives, with `corrections` (generator against trainer) and `kl` (to the reference).
2. `sdpo`: hint distillation by generalized JSD (`divergence` plain, `chunked` for large vocabularies, `topk`), `taid`,
   or the entropy-aware losses (`entropy`), over rows that `alignment` gathered.
3. `preference`: DPO and SimPO on pairs that teachers made.

`compose` adds them up. `logprobs` has the label shift and the temperature, `reduction` the rule that every loss is a
sum over a normalizer that can be the whole step's. Everything is computed in float32 whatever the model's dtype.
"""

from services.losses.alignment import AlignedRows, gather_aligned
from services.losses.chunked import chunked_jsd, chunked_rows
from services.losses.compose import (
    HintInputs,
    LossBatch,
    LossComponents,
    PairInputs,
    Tokens,
    attach_reference,
    build_batch,
    compose,
    compose_loss,
)
from services.losses.corrections import check_sampling, finite_tokens, importance_weights
from services.losses.divergence import generalized_jsd, jsd_rows
from services.losses.entropy import entropy_gated_rows, eopd_rows
from services.losses.kl import check_kl_in_reward, kl_estimate, kl_in_reward
from services.losses.logprobs import shift_mask, span_mask, token_entropy, token_logprobs
from services.losses.policy import ADVANTAGE_SCALING, PolicyConfig, policy_loss, policy_normalizer
from services.losses.preference import PreferenceConfig, Responses, preference_loss
from services.losses.reduction import LossResult
from services.losses.sdpo import SDPOLossConfig, sdpo_loss
from services.losses.taid import TAIDConfig, TAIDScheduler, taid_loss, taid_rows
from services.losses.topk import TopKRows, cat_rows, top_k_rows, topk_jsd_rows, topk_rows_jsd

__all__ = [
    "ADVANTAGE_SCALING",
    "AlignedRows",
    "HintInputs",
    "LossBatch",
    "LossComponents",
    "LossResult",
    "PairInputs",
    "PolicyConfig",
    "PreferenceConfig",
    "Responses",
    "SDPOLossConfig",
    "TAIDConfig",
    "TAIDScheduler",
    "Tokens",
    "TopKRows",
    "attach_reference",
    "build_batch",
    "cat_rows",
    "check_kl_in_reward",
    "check_sampling",
    "chunked_jsd",
    "chunked_rows",
    "compose",
    "compose_loss",
    "entropy_gated_rows",
    "eopd_rows",
    "finite_tokens",
    "gather_aligned",
    "generalized_jsd",
    "importance_weights",
    "jsd_rows",
    "kl_estimate",
    "kl_in_reward",
    "policy_loss",
    "policy_normalizer",
    "preference_loss",
    "sdpo_loss",
    "shift_mask",
    "span_mask",
    "taid_loss",
    "taid_rows",
    "token_entropy",
    "token_logprobs",
    "top_k_rows",
    "topk_jsd_rows",
    "topk_rows_jsd",
]
