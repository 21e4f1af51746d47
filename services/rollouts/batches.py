"""Forming a batch: which ready groups and pairs it holds, their advantages, and the figures that go with it."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

from services.rollouts import events as ev
from services.rollouts.advantages import dead_fraction, group_advantages, is_dead, reward_std
from services.rollouts.config import BufferConfig
from services.rollouts.late import choose_pairs, pair_age
from services.rollouts.staleness import staleness
from services.rollouts.state import BufferState


def form_batch(batch: int, state: BufferState, config: BufferConfig, leases_open: int) -> ev.Taken:
    """Batch `batch` of the oldest ready groups; there must be enough of them, and none stale."""
    pairs, too_old, too_many = choose_pairs(state.late.pairs, batch, config.max_pairs, config.pair_max_age)
    left_out = Counter(pair_too_old=too_old, pair_overflow=too_many)
    items = state.with_fate("ready")[: config.groups_per_batch]
    rewards = [[rollout.reward for rollout in item.rollouts] for item in items]
    batch_std = reward_std(reward for group in rewards for reward in group)
    groups = []
    for item, group in zip(items, rewards, strict=True):
        advantages = group_advantages(
            group, config.advantage_scaling, config.advantage_eps, batch_std=batch_std, rollouts=len(item.rollouts)
        )
        age = max(staleness(batch, rollout.oldest_version or 0) for rollout in item.rollouts)
        groups.append(ev.TakenGroup(item.task.id, advantages, is_dead(group), age))

    ages = [group.staleness for group in groups]
    waits = [batch - item.changed_at for item in items]
    pair_ages = [pair_age(late, batch) for late in pairs]
    scored = [len(group) for group in rewards]
    counts = {
        "issued": state.issued,
        "dead_fraction": dead_fraction(rewards),
        "unscorable": sum(reward is None for group in rewards for reward in group),
        "truncated": sum(rollout.status == "truncated" for item in items for rollout in item.rollouts),
        "flagged": sum(bool(rollout.flags) for item in items for rollout in item.rollouts),
        "missing_members": sum(len(item.members) for item in items) - sum(scored),
        "staleness_mean": fmean(ages),
        "staleness_max": max(ages),
        "wait_batches_mean": fmean(waits),
        "wait_batches_max": max(waits),
        "pairs": len(pairs),
        "pair_age_mean": fmean(pair_ages) if pair_ages else 0.0,
        "pair_age_max": max(pair_ages, default=0),
        "leases_open": leases_open,
        "groups_ready": len(state.with_fate("ready")) - len(items),
        "groups_in_work": len(state.with_fate("in_work")),
        **{f"dropped/{reason}": number for reason, number in state.dropped.items()},
        **{f"total/{what}": number for what, number in (state.counts + left_out).items()},
    }
    return ev.Taken(batch, groups, pairs, {name: float(number) for name, number in counts.items()}, dict(left_out))
