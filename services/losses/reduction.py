"""How every loss here is reduced: a sum over tokens, sequences or pairs, divided by a normalizer that can be given.

A step of training is cut into micro-batches and spread over replicas. Its loss is one quotient all the same: so every
loss takes the denominator of the *whole* step as `normalizer`, and the micro-batches' losses add up to the step's loss.
Without `normalizer` the tensors at hand are taken to be the whole step. Where gradients are averaged over R replicas
instead of summed, pass the global denominator divided by R.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class LossResult:
    """One channel's loss over the tensors at hand.

    `loss` is a scalar with a live graph, already divided by the normalizer. `count` is a detached scalar: the tokens
    (pairs, for preferences) that entered it. `metrics` are detached scalars, means over `count` unless their name says
    otherwise; average them over micro-batches with `count` as weight.
    """

    loss: Tensor
    count: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def at_least_float32(x: Tensor) -> Tensor:
    """bfloat16 and float16 become float32; float32 and float64 (gradient checks) stay what they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def normalized(total: Tensor, normalizer: Tensor | float) -> Tensor:
    """`total / normalizer`; a normalizer of 0 means that nothing was counted, so `total` (0, graph alive) is returned.

    Raises ValueError for a negative or non-finite number (a tensor, which may live on a device, is not looked at).
    """
    if isinstance(normalizer, Tensor):
        return total / torch.where(normalizer == 0, torch.ones_like(normalizer), normalizer)
    if not 0 <= normalizer < float("inf"):
        raise ValueError(f"normalizer is {normalizer}: give the step's count of tokens, sequences or pairs (>= 0)")
    return total / normalizer if normalizer else total


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` where `mask`, detached; 0 for an empty mask."""
    return normalized(torch.where(mask, values.detach(), torch.zeros_like(values)).sum(), mask.sum())
