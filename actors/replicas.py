"""The other replicas, as a trainer that starts sees them: whose checkpoint to begin from, and who is further.

    newest checkpoint of all replicas, by syncs ─▶ a peer that trains is further? ─▶ wait for its next sync, heal there

What a replica learned since its last sync is its own: it finds it again in its own checkpoint, not in another's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.following import number_in, trainer_name
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

    Its own newest one, unless another replica's has more syncs behind it. Blocks: it reads every byte of its own, and
    of the others' that claim to be further.
    """
    best = checkpoints_of(run_dir, replica, 1).latest()
    rounds, own = rounds_of(best.path) if best else -1, True
    for other in (checkpoints_of(run_dir, number, 1) for number in range(replicas) if number != replica):
        if not any(rounds_of(checkpoint.path) > rounds for checkpoint in other.list()):
            continue
        latest = other.latest()
        if latest is not None and rounds_of(latest.path) > rounds:
            best, rounds, own = latest, rounds_of(latest.path), False
    return best, own


@dataclass(frozen=True, slots=True)
class Look:
    """What the other replicas say at one moment.

    `rounds`: syncs of the furthest of those that train; None when nobody does, or nobody answers. `all_done`: they
    live, and none of them will come to a sync again.
    """

    rounds: int | None
    all_done: bool


class OtherReplicas:
    """`trainers` is a trainer's binding to all trainers, `name` its own name."""

    def __init__(self, trainers: Binding[Any], name: str, replicas: int) -> None:
        self._trainers = trainers
        self._others = [trainer_name(number) for number in range(replicas) if number != number_in(name)]

    async def look(self) -> Look:
        asked = [self._trainers.only(name, patience_s=0.0) for name in self._others if name in self._trainers.names]
        answers = await asyncio.gather(
            *[one.call_within(STATUS_LIMIT_S, roles.Trainer.status) for one in asked], return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, BindingError):
                raise answer
        figures = [answer for answer in answers if not isinstance(answer, BaseException)]
        training = [each.get("rounds", 0) for each in figures if not each.get("done")]
        return Look(max(training, default=None), bool(figures) and not training)
