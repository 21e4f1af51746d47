"""The actor in every proc of a trainer but its first: does what the leader (`actors.trainer`) does, when it does it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from monarch.actor import concurrent_endpoint

from actors.trainer_part import TrainerPart, TrainerSettings, answer_to
from mesh.actor import MeshActor
from mesh.messages import LogitsRef, ShardRef
from services.training.plan import StepPlan
from services.weights.plane import open_writer
from services.weights.shards import Writer


class TrainerPeerActor(MeshActor):
    """Endpoints of `mesh.roles.TrainerPeer`."""

    def __init__(self, name: str, settings: TrainerSettings, run_dir: str) -> None:
        super().__init__(name)
        self.settings = settings
        self.part = TrainerPart(settings)
        self.writer: Writer | None = None

    async def teardown(self) -> None:
        if self.writer is not None:
            await self.writer.close()
        self.part.close()

    @concurrent_endpoint
    async def load(self, size: int, port: int, checkpoint: str | None, own: bool) -> int:
        path = Path(checkpoint) if checkpoint else None
        return await asyncio.to_thread(self.part.load, self.rank, size, port, path, own)

    @concurrent_endpoint
    async def catch_up(self, rounds: int, limit_s: float) -> int:
        return await asyncio.to_thread(self.part.catch_up, rounds, limit_s)

    @concurrent_endpoint
    async def leave(self) -> None:
        await asyncio.to_thread(self.part.leave)

    @concurrent_endpoint
    async def step(self, share: StepPlan, ref: LogitsRef | None) -> str:
        hinted = answer_to(share, ref, self.settings)
        with self.busy:
            _, failure = await asyncio.to_thread(self.part.step, share, hinted)
        return failure

    @concurrent_endpoint
    async def save(self, path: str, step: int) -> None:
        await asyncio.to_thread(self.part.save, Path(path), step)

    # ---- its shards of the published weights ---------------------------------------------------------------------

    @concurrent_endpoint
    async def open_writer(self, store: Any | None) -> None:
        weights, computed = self.settings.weights, self.part.computed
        self.writer, _ = await open_writer(self.part.source, weights, rank=self.rank, dtype=computed, store=store)

    @concurrent_endpoint
    async def copy(self, slot: int, version: int) -> None:
        assert self.writer is not None
        await self.writer.copy(slot, version)

    @concurrent_endpoint
    async def seal(self, slot: int, base: int | None) -> ShardRef:
        assert self.writer is not None
        return await self.writer.seal(slot, base)
