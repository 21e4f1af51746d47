"""Group-relative advantages in plain Python (GRPO, arXiv 2402.03300; mean only: Dr. GRPO, arXiv 2503.20783).

A reward of None (or one that is not finite) could not be scored: it is excluded from the baseline and gets advantage 0,
because a failing reward function says nothing about the policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Literal

Scaling = Literal["none", "group_std", "batch_std"]


def scorable(rewards: Iterable[float | None]) -> list[float]:
    """The rewards that count."""
    return [reward for reward in rewards if reward is not None and math.isfinite(reward)]


def is_dead(rewards: Sequence[float | None]) -> bool:
    """Whether a group teaches nothing: every scorable reward equal, or fewer than two of them."""
    return len(set(scorable(rewards))) < 2


def dead_fraction(groups: Sequence[Sequence[float | None]]) -> float:
    """Share of dead groups; 0.0 for no group at all."""
    return sum(is_dead(rewards) for rewards in groups) / len(groups) if groups else 0.0


def reward_std(rewards: Iterable[float | None]) -> float:
    """Sample standard deviation (Bessel) of the scorable rewards; 0.0 for fewer than two of them."""
    values = scorable(rewards)
    return stdev(values) if len(values) > 1 else 0.0


def group_advantages(
    rewards: Sequence[float | None],
    scaling: Scaling = "none",
    eps: float = 1e-4,
    *,
    batch_std: float | None = None,
    rollouts: int | None = None,
    function: str = "reward",
) -> list[float]:
    """`(reward - group mean) / (std + eps)`, one value per reward; without the division for `scaling="none"`.

    rewards: one per rollout of the group; None where it could not be scored (advantage exactly 0.0).
    scaling: "group_std" divides by this group's Bessel standard deviation, "batch_std" by `batch_std`, which is
        `reward_std` over the rewards of the whole batch.
    rollouts, function: how many rewards were due, and the reward function they came from, for the error.

    A group of one and a group of equal rewards give exactly 0.0 everywhere. ValueError for a wrong number of rewards,
    for an unknown scaling and for a missing `batch_std`.
    """
    if rollouts is not None and rollouts != len(rewards):
        raise ValueError(
            f"group_advantages: reward function {function!r} gave {len(rewards)} rewards for {rollouts} rollouts; "
            "it must return one per rollout, None where it cannot score"
        )
    if scaling not in ("none", "group_std", "batch_std"):
        raise ValueError(f"group_advantages: unknown scaling {scaling!r}; use 'none', 'group_std' or 'batch_std'")
    if scaling == "batch_std" and batch_std is None:
        raise ValueError("group_advantages: scaling 'batch_std' needs batch_std=reward_std(rewards of the whole batch)")
    if is_dead(rewards):
        return [0.0] * len(rewards)

    values = scorable(rewards)
    mean = fmean(values)
    divisor = 1.0
    if scaling == "group_std":
        divisor = stdev(values) + eps
    elif batch_std is not None and scaling == "batch_std":
        divisor = batch_std + eps
    return [(reward - mean) / divisor if reward is not None and math.isfinite(reward) else 0.0 for reward in rewards]
