"""Importance corrections between the generator, which sampled the tokens, and the trainer's policy at the step's start.

The two hold the same weights at best, and differ in kernels and precision always; the ratio `exp(old - generator)`
weighs the policy term (never a KL term). Truncation bounds its variance: TIS (truncated importance sampling) keeps the
token with weight C, MIS (masked importance sampling) gives it weight 0. Where `old` *is* the generator's logprob, the
policy ratio already corrects everything and the kind is "none".
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from services.losses.reduction import at_least_float32

CorrectionKind = Literal["none", "tis", "mis"]
CorrectionLevel = Literal["token", "sequence"]

DEFAULT_CAP: dict[str, float] = {"token": 2.0, "sequence": 3.0}


def importance_weights(
    old_logprobs: Tensor,
    generator_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: CorrectionKind,
    level: CorrectionLevel = "token",
    cap: float | None = None,
) -> Tensor:
    """Detached weights (B, T) for the policy term; 1 where `mask` is False, and everywhere for kind "none".

    `old_logprobs` (trainer, same weights as the ratio's denominator), `generator_logprobs`, `mask`: (B, T). At level
    "token" each token has its own ratio, at level "sequence" the product of the ratios over its mask. `cap` is C; None
    is 2.0 per token and 3.0 per sequence. `mask` must leave out non-finite logprobs (`finite_tokens`).
    """
    gap = at_least_float32(old_logprobs).detach() - at_least_float32(generator_logprobs).detach()
    gap = torch.where(mask, gap, torch.zeros_like(gap))
    if kind == "none":
        return torch.ones_like(gap)
    ratio = gap.exp() if level == "token" else gap.sum(1, keepdim=True).exp().expand_as(gap)
    limit = DEFAULT_CAP[level] if cap is None else cap
    if kind == "tis":
        weights = ratio.clamp(max=limit)
    elif kind == "mis":
        weights = torch.where(ratio <= limit, ratio, torch.zeros_like(ratio))
    else:
        raise ValueError(f"unknown correction {kind!r}: use none, tis or mis")
    return torch.where(mask, weights, torch.ones_like(weights))


def finite_tokens(mask: Tensor, *behaviour: Tensor | None) -> Tensor:
    """`mask` as bool without the tokens at which one of the given behaviour logprobs is NaN or infinite.

    An engine now and then reports such values; a token without a behaviour probability has no ratio.
    """
    kept = mask.bool()
    for logprobs in behaviour:
        if logprobs is not None:
            kept = kept & logprobs.isfinite()
    return kept


def check_sampling(*, top_p: float = 1.0, top_k: int | None = None, mask_replayed: bool = False) -> None:
    """ValueError when rollouts are sampled from a cut vocabulary although losses use importance ratios.

    The generator's logprobs are then those of the renormalised nucleus and the trainer's those of the whole
    vocabulary: the ratio equals the kept mass even for equal weights. `top_k` None, 0 or -1 means no cut.
    """
    if mask_replayed:
        return
    if top_p < 1.0 or (top_k is not None and top_k > 0):
        raise ValueError(
            f"sampling with top_p={top_p}, top_k={top_k} makes every importance ratio equal the kept mass: set "
            "top_p = 1 and no top_k, or replay the sampler's vocabulary mask in the trainer"
        )
