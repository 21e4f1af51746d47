"""Which rollouts the buffer does not want, and the one word by which it counts each of them."""

from __future__ import annotations

from mesh.messages import Rollout
from services.rollouts.leases import Mark, parse_mark
from services.rollouts.state import BufferState, newest_version


def refusal_of(rollout: Rollout, state: BufferState, next_mark: Mark) -> str | None:
    """Why a well-formed rollout is not wanted; None when it is. `next_mark`: all leases given so far lie below it."""
    item, mark = state.find(rollout.task.id), parse_mark(rollout.lease_id)
    newest = newest_version(rollout) or 0
    if item is None:
        return "late" if rollout.task.index < state.issued else "unknown"
    if mark is None or mark >= next_mark or rollout.task != item.task:
        return "unknown"
    if not 0 <= rollout.member < len(item.members):
        return "unknown"
    member = item.members[rollout.member]
    if mark < item.since:
        return "late"
    if any(mark < before and newest > step for before, step in state.rewinds):
        return "rewound"
    if newest > state.next_batch:
        return "too_new"
    if member.delivered:
        return "duplicate"
    if member.given_up or item.task.id in state.settled:
        return "late"
    ended = member.ended.get(rollout.lease_id)
    if ended in ("failed", "malformed"):
        return "duplicate"
    # A lease that expired may still bring a good rollout, but its failure was counted already.
    return "late" if ended and (rollout.status == "failed" or rollout.sampled_tokens == 0) else None
