"""Channel 3: preference pairs, the response that teachers agreed on against what the student did.

- DPO (2305.18290): -logsigmoid(beta [(logp_c - ref_c) - (logp_r - ref_r)]) with token *sums* over the response.
- SimPO (2405.14734): -logsigmoid(beta (mean_logp_c - mean_logp_r) - gamma) with token *means* and no reference.

Either may add the chosen response's negative log-likelihood (token mean): the pair alone is often satisfied by pushing
the rejected response down. The reference is the initial policy, run for real over both responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from torch.nn.functional import logsigmoid

from services.losses.reduction import LossResult, at_least_float32, masked_mean, normalized


class PreferenceConfig(BaseModel):
    """The preference objective."""

    model_config = ConfigDict(extra="forbid")

    objective: Literal["dpo", "simpo"] = Field(
        default="dpo", description="dpo (needs a reference) or simpo (does not)."
    )
    beta: float | None = Field(default=None, gt=0, description="Steepness. None: 0.1 for dpo, 2.0 for simpo.")
    gamma: float | None = Field(default=None, ge=0, description="simpo: target margin. None: 0.5.")
    nll_weight: float = Field(
        default=0.0, ge=0, description="Weight of the chosen response's mean negative log-likelihood."
    )

    @model_validator(mode="after")
    def _no_contradictions(self) -> PreferenceConfig:
        if self.objective == "dpo" and self.gamma is not None:
            raise ValueError("gamma is simpo's margin: drop it, or set objective = 'simpo'")
        return self

    @property
    def steepness(self) -> float:
        """`beta` with the objective's own default filled in."""
        return self.beta if self.beta is not None else {"dpo": 0.1, "simpo": 2.0}[self.objective]

    @property
    def margin(self) -> float:
        """`gamma` with its default filled in."""
        return 0.5 if self.gamma is None else self.gamma


@dataclass(slots=True)
class Responses:
    """One side of P pairs. `logprobs`, `mask`, `ref_logprobs`: (P, T); the mask is True on response tokens."""

    logprobs: Tensor
    mask: Tensor
    ref_logprobs: Tensor | None = None


def preference_loss(
    chosen: Responses,
    rejected: Responses,
    config: PreferenceConfig,
    *,
    normalizer: Tensor | float | None = None,
) -> LossResult:
    """Mean over pairs of the configured objective; the two sides may have different T.

    `normalizer` is the number of pairs of the whole step (None: of this call). A pair with an empty response leaves
    numerator and denominator; no pair gives 0 with a live graph. Raises ValueError when the sides have different
    numbers of pairs, or for dpo without reference logprobs.
    """
    if len(chosen.logprobs) != len(rejected.logprobs):
        raise ValueError(
            f"preference_loss: {len(chosen.logprobs)} chosen and {len(rejected.logprobs)} rejected responses; "
            "row i of both is pair i"
        )
    whole = chosen.mask.bool().any(1) & rejected.mask.bool().any(1)
    if config.objective == "dpo":
        margin = _sum_over_reference(chosen, "chosen") - _sum_over_reference(rejected, "rejected")
        logits = config.steepness * margin
    else:
        margin = _mean(chosen.logprobs, chosen.mask) - _mean(rejected.logprobs, rejected.mask)
        logits = config.steepness * margin - config.margin
    losses = -logsigmoid(logits)
    if config.nll_weight:
        losses = losses - config.nll_weight * _mean(chosen.logprobs, chosen.mask)
    total = torch.where(whole, losses, torch.zeros_like(losses)).sum()
    pairs = whole.sum()
    metrics = {
        "margin": masked_mean(margin, whole),
        "accuracy": masked_mean((margin > 0).float(), whole),
        "chosen_logprob": masked_mean(_mean(chosen.logprobs, chosen.mask), whole),
        "rejected_logprob": masked_mean(_mean(rejected.logprobs, rejected.mask), whole),
    }
    return LossResult(normalized(total, pairs if normalizer is None else normalizer), count=pairs, metrics=metrics)


def _sum_over_reference(side: Responses, name: str) -> Tensor:
    if side.ref_logprobs is None:
        raise ValueError(
            f"dpo needs the reference's logprobs of the {name} responses: run the initial policy over them and set "
            "ref_logprobs, or use objective = 'simpo'"
        )
    return _sum(side.logprobs, side.mask) - _sum(side.ref_logprobs, side.mask).detach()


def _sum(logprobs: Tensor, mask: Tensor) -> Tensor:
    wide = at_least_float32(logprobs)
    return torch.where(mask.bool(), wide, torch.zeros_like(wide)).sum(1)


def _mean(logprobs: Tensor, mask: Tensor) -> Tensor:
    return _sum(logprobs, mask) / mask.bool().sum(1).clamp(min=1)
