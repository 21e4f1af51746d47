"""Actors that stand around a real trainer in its tests: an importable module, as spawned procs need."""

from __future__ import annotations

import random

from monarch.actor import concurrent_endpoint

from mesh.actor import MeshActor
from mesh.messages import ErrorSite, Group, Rollout, Sequence, Task, TrainBatch, Turn, VersionSpan


def rollout(task: Task, member: int, reward: float) -> Rollout:
    """A prompt of 3 tokens, then a failing turn of 4 with a hint of 2."""
    rng = random.Random(f"{task.id} {member}")
    ids = [rng.randrange(3, 20) for _ in range(8)]
    site = ErrorSite("tool_not_found", "no", "h", "template", cut=3, hint_ids=[5, 6])
    turn = Turn(0, 4, 8, "action", "seen", None, site)
    sequence = Sequence(ids, [-1.0] * 8, [(4, 8)], [VersionSpan(0, 4, 8)])
    return Rollout(f"{task.id}/{member}", task, member, "", [sequence], [turn], [], "finished", reward, reward)


def batch(number: int) -> TrainBatch:
    task = Task(f"t{number}", number, number)
    return TrainBatch(number, [Group(task, [rollout(task, 0, 1.0), rollout(task, 1, 0.0)], [1.0, -1.0], False, 0)], [])


class EndlessBuffer(MeshActor):
    """Plays the rollout buffer: has every batch at once."""

    @concurrent_endpoint
    async def take(self, batch_id: int, wait_s: float) -> TrainBatch:
        return batch(batch_id)

    @concurrent_endpoint
    async def trained(self, batch_id: int) -> None:
        pass

    @concurrent_endpoint
    async def move_to(self, step: int) -> None:
        pass

    @concurrent_endpoint
    async def save(self, path: str, step: int) -> None:
        pass
