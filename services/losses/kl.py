"""KL to a reference policy, from the log-probabilities of the sampled tokens alone: three estimators, and KL as reward.

With x = ref - logp on a token sampled from the policy, E[k1] = E[k3] = KL(policy || ref); k2 has the right gradient.
Source: J. Schulman, "Approximating KL divergence" (2020). Gradients flow into `logprobs` only.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from services.losses.reduction import at_least_float32

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLEstimator = "k3") -> Tensor:
    """Per-token estimate of KL(policy || ref), shape of `logprobs`, float32 or float64.

    k1 = logp - ref (unbiased, may be negative); k2 = (logp - ref)^2 / 2; k3 = exp(ref - logp) - (ref - logp) - 1
    (unbiased, never negative).
    """
    gap = at_least_float32(ref_logprobs).detach() - at_least_float32(logprobs)
    if kind == "k1":
        return -gap
    if kind == "k2":
        return 0.5 * gap.square()
    if kind == "k3":
        return torch.expm1(gap) - gap
    raise ValueError(f"unknown KL estimator {kind!r}: use k1, k2 or k3")


def check_kl_in_reward(beta: float, scaling: str) -> None:
    """ValueError that says what to set, unless KL in the reward is exact with these settings."""
    if not beta > 0:
        raise ValueError(f"kl_in_reward needs kl_beta > 0 (it is {beta}): set kl_beta, or kl_in_reward = false")
    if scaling != "none":
        raise ValueError(
            f"kl_in_reward is exact only for advantages that are not divided by a standard deviation (scaling is "
            f"{scaling!r}): set the advantage scaling to 'none', or kl_in_reward = false"
        )


def kl_in_reward(
    advantages: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    beta: float,
    scaling: str,
    estimator: Literal["k1", "k3"] = "k1",
    scorable: Tensor | None = None,
) -> Tensor:
    """Advantages as if every reward had been `reward - beta KL_seq` before its group's mean was taken off.

    `advantages` (B,), `logprobs`, `ref_logprobs`, `mask` (B, T), `group_ids` (B,) int64 -> (B,), detached:
    `A - beta (KL_seq - group mean of KL_seq)`, KL_seq = sum over the mask of the estimate. `scorable` (B,) bool:
    rollouts without a reward stay out of the group's mean and keep their advantage. A group must be whole in one call.
    Raises ValueError for beta <= 0, a scaling other than "none" (the identity then fails), or another estimator.
    """
    check_kl_in_reward(beta, scaling)
    if estimator not in ("k1", "k3"):
        raise ValueError(f"kl_in_reward sums k1 or k3, not {estimator!r}")
    mask = mask.bool()
    per_token = kl_estimate(logprobs.detach(), ref_logprobs, estimator)
    kl = torch.where(mask, per_token, torch.zeros_like(per_token)).sum(1)
    counted = torch.ones_like(kl) if scorable is None else scorable.to(kl)
    _, group = torch.unique(group_ids, return_inverse=True)
    groups = int(group.max()) + 1 if group.numel() else 0
    totals = kl.new_zeros(groups).index_add_(0, group, kl * counted)
    sizes = kl.new_zeros(groups).index_add_(0, group, counted)
    mean = (totals / sizes.clamp(min=1))[group]
    return at_least_float32(advantages).detach() - beta * (kl - mean) * counted
