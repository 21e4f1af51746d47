"""All procs of a trainer, as their leader sees them: its own part, and calls to its peers at the same time.

What one proc does in a collective all others must do, so nothing here is tried again: with one proc's failure the whole
trainer fails, is placed again by its supervisor, and goes on from its newest checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from actors.trainer_part import TrainerPart, answer_to
from mesh.binding import Binding, MemberRef
from mesh.messages import LogitsRef, ShardRef
from mesh.roles import Member, TrainerPeer
from services.training.plan import StepPlan
from services.training.sharding import meeting_point
from services.weights.plane import open_writer
from services.weights.shards import Writer

T = TypeVar("T")


class Team:
    """`part` is the leader's own; `peers` are the actors in its other procs, by rank from 1 on."""

    def __init__(self, part: TrainerPart, peers: Sequence[MemberRef]) -> None:
        self.part = part
        self._peers = [Binding[TrainerPeer].to(peer) for peer in peers]

    @property
    def size(self) -> int:
        return 1 + len(self._peers)

    async def load(self, checkpoint: Path | None, own: bool = True) -> int:
        """Bring all parts to the checkpoint, or to the initial policy; returns the step they stand at.

        `own`: the checkpoint is this trainer's, and not another replica's.
        """
        meeting, port = None, 0
        if self._peers:
            meeting, port = meeting_point(self.size, self.part.settings.config.collective_s)
        step, *_ = await _together(
            asyncio.to_thread(self.part.load, 0, self.size, meeting, checkpoint, own),
            *[peer.call(TrainerPeer.load, self.size, port, str(checkpoint or "") or None, own) for peer in self._peers],
        )
        return int(step)

    async def catch_up(self, rounds: int, limit_s: float) -> int:
        """`TrainerPart.catch_up` of all parts; returns the step they stand at."""
        step, *_ = await _together(
            asyncio.to_thread(self.part.catch_up, rounds, limit_s),
            *[peer.call(TrainerPeer.catch_up, rounds, limit_s) for peer in self._peers],
        )
        return int(step)

    async def leave(self) -> None:
        """No part averages with other replicas any more."""
        await _together(asyncio.to_thread(self.part.leave), *[peer.call(TrainerPeer.leave) for peer in self._peers])

    async def step(self, shares: Sequence[StepPlan], refs: Sequence[LogitsRef | None]) -> tuple[dict[str, float], str]:
        """One step, each proc on its share with the teacher's answer to it.

        Returns the metrics, and why the teacher's rows could not be read on one of the procs ("": they were).
        """
        hinted = answer_to(shares[0], refs[0], self.part.settings)
        (metrics, failure), *others = await _together(
            asyncio.to_thread(self.part.step, shares[0], hinted),
            *[
                peer.call(TrainerPeer.step, share, ref)
                for peer, share, ref in zip(self._peers, shares[1:], refs[1:], strict=True)
            ],
        )
        return metrics, next((said for said in (failure, *others) if said), "")

    async def save(self, path: Path, step: int) -> None:
        """All parts of a checkpoint into the folder `path`."""
        await _together(
            asyncio.to_thread(self.part.save, path, step),
            *[peer.call(TrainerPeer.save, str(path), step) for peer in self._peers],
        )

    async def open_writers(self) -> tuple[list[Writer], Any | None]:
        """Who writes each proc's shards of a published version, by rank, and the store that they write to, if any."""
        part = self.part
        own, store = await open_writer(part.source, part.settings.weights, dtype=part.computed)
        await asyncio.gather(*[peer.call(TrainerPeer.open_writer, store) for peer in self._peers])
        return [own, *map(PeerWriter, self._peers)], store

    async def close(self) -> None:
        """Let the peers end. What does not end by itself is ended with the trainer's procs."""
        await asyncio.gather(*[peer.call(Member.finish) for peer in self._peers], return_exceptions=True)
        self.part.close()


class PeerWriter:
    """A peer's `services.weights.shards.Writer`, called from the leader. The peer closes it when it ends."""

    def __init__(self, peer: Binding[TrainerPeer]) -> None:
        self._peer = peer

    async def copy(self, slot: int, version: int) -> None:
        await self._peer.call(TrainerPeer.copy, slot, version)

    async def seal(self, slot: int, base: int | None) -> ShardRef:
        return await self._peer.call(TrainerPeer.seal, slot, base)

    async def close(self) -> None:
        pass


async def _together(own: Awaitable[T], *others: Awaitable[Any]) -> tuple[Any, ...]:
    """All results, or the first failure at once: who still waits in a collective then fails with its time limit."""
    return tuple(await asyncio.gather(own, *others))
