"""The other replicas, as a trainer that starts sees them: whose checkpoint to begin from, and who is further.

    newest checkpoint of all replicas, by syncs ─▶ a peer that trains is further? ─▶ wait for its next sync, heal there

What a replica learned since its last sync is its own: it finds it again in its own checkpoint, not in another's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.following import number_in
from mesh import roles
from mesh.binding import Binding, BindingError
from services.runs.checkpoints import Checkpoint, Checkpoints
from services.runs.folder import of_replica
from services.training.state import rounds_of

STATUS_LIMIT_S = 2.0


def checkpoints_of(run_dir: Path, replica: int, keep: int) -> Checkpoints:
    return Checkpoints(of_replica(run_dir / "checkpoints", replica), keep=keep)


def newest_checkpoint(run_dir: Path, replica: int, replicas: int) -> tuple[Checkpoint | None, bool]:
    """Where replica `replica` of `replicas` goes on: a whole checkpoint, and whether it is its own.

    Its own newest one, unless another replica's has more syncs behind it. Blocks: it reads every byte.
    """
    found = {number: checkpoints_of(run_dir, number, 1).latest() for number in range(replicas)}
    rounds = {number: rounds_of(checkpoint.path) for number, checkpoint in found.items() if checkpoint is not None}
    if not rounds:
        return None, True
    best = max(rounds, key=lambda number: (rounds[number], number == replica))
    return found[best], best == replica


class OtherReplicas:
    """`trainers` is a trainer's binding to all trainers, `name` its own name."""

    def __init__(self, trainers: Binding[Any], name: str, replicas: int) -> None:
        self._trainers = trainers
        self._others = [f"trainer-{number}" for number in range(replicas) if number != number_in(name)]

    async def rounds(self) -> int | None:
        """Syncs of the furthest of those that train now; None when nobody else does, or nobody answers."""
        figures = await self._figures()
        return max((each.get("rounds", 0) for each in figures if not each.get("done")), default=None)

    async def all_done(self) -> bool:
        """Whether the others live, and none of them will come to a sync again."""
        figures = await self._figures()
        return bool(figures) and all(each.get("done") for each in figures)

    async def _figures(self) -> Sequence[dict[str, Any]]:
        asked = [self._trainers.only(name, patience_s=0.0) for name in self._others if name in self._trainers.names]
        answers = await asyncio.gather(
            *[one.call_within(STATUS_LIMIT_S, roles.Trainer.status) for one in asked], return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, BindingError):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]
