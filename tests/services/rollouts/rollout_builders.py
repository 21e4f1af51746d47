"""Small rollouts for tests of the buffer, and a clock that tests move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mesh.messages import (
    DelayedReward,
    ErrorSite,
    Lease,
    PreferencePair,
    Rollout,
    RolloutStatus,
    Sequence,
    Turn,
    VersionSpan,
)
from services.rollouts.buffer import BufferConfig, RolloutBuffer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def config(**settings: Any) -> BufferConfig:
    return BufferConfig(**{"group_size": 2, "groups_per_batch": 2, "lease_s": 10.0, **settings})


def opened(folder: Path, clock: Clock | None = None, **settings: Any) -> RolloutBuffer:
    return RolloutBuffer.open(folder, config(**settings), seed=7, time_fn=clock or Clock())


def rollout(
    lease: Lease,
    version: int = 0,
    reward: float | None = 1.0,
    *,
    newest: int | None = None,
    status: RolloutStatus = "finished",
    error: bool = False,
) -> Rollout:
    """Three prompt tokens, then two sampled ones: by `version`, and by `newest` if given."""
    last = version if newest is None else newest
    versions = [VersionSpan(version, 3, 4), VersionSpan(last, 4, 5)]
    site = (
        ErrorSite("tool_not_found", "no such tool", "use another", "template", cut=2, hint_ids=[9, 9])
        if error
        else None
    )
    return Rollout(
        id=lease.rollout_id,
        task=lease.task,
        member=lease.member,
        lease_id=lease.id,
        sequences=[Sequence([1, 2, 3, 4, 5], [0.0, 0.0, 0.0, -0.5, -0.25], [(3, 5)], versions)],
        turns=[Turn(0, 3, 5, "act", "seen", None, site)],
        messages=[{"role": "user", "content": "do it"}],
        status=status,
        reward=reward if status != "failed" else None,
        reason="the environment broke" if status == "failed" else "",
    )


def fill(buffer: RolloutBuffer, leases: list[Lease], version: int = 0, rewards: tuple[float, ...] = (1.0, 0.0)) -> None:
    """Put a rollout for each lease; members get the rewards in turn."""
    for lease in leases:
        assert buffer.put(rollout(lease, version, rewards[lease.member % len(rewards)]))


def train_step(buffer: RolloutBuffer, batch: int) -> list[str]:
    """Generate on-policy what batch `batch` needs, train it, and return its task ids."""
    fill(buffer, buffer.claim("g", batch, 100), batch)
    taken = buffer.take(batch)
    assert taken is not None
    buffer.trained(batch)
    return [group.task.id for group in taken.groups]


def pair(rollout_id: str, number: int = 0) -> PreferencePair:
    return PreferencePair(f"{rollout_id}#{number}", rollout_id, [], "better", "act", ["t1", "t2"], [1, 2, 3], [4, 5])


def heard(rollout_id: str, pairs: int = 1) -> DelayedReward:
    return DelayedReward(rollout_id, states=1, answered=2, pairs=[pair(rollout_id, n) for n in range(pairs)])


def balanced(accounts: dict[str, Any]) -> bool:
    fates = accounts["trained"] + sum(accounts["dropped"].values())
    return accounts["issued"] == fates + accounts["in_work"] + accounts["ready"] + accounts["taken"]
