"""The actor around one trainer's `services.rollouts.buffer.RolloutBuffer`: waiting, expiry, and readable samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from monarch.actor import concurrent_endpoint

from mesh.actor import MeshActor
from mesh.messages import DelayedReward, Lease, Rollout, TrainBatch
from services.rollouts.buffer import BufferConfig, RolloutBuffer
from services.telemetry.rollout_log import write_rollouts

T = TypeVar("T")


class RolloutBufferActor(MeshActor):
    """Endpoints of `mesh.roles.RolloutBuffer`. The buffer itself is synchronous and quick; here callers wait for it."""

    def __init__(self, name: str, config: BufferConfig, seed: int, run_dir: str, sample_every: int) -> None:
        super().__init__(name)
        self.config, self.seed, self.run_dir, self.sample_every = config, seed, Path(run_dir), sample_every
        self.buffer: RolloutBuffer
        self._changed = asyncio.Event()
        self._logged = -1

    async def setup(self) -> None:
        self.buffer = await asyncio.to_thread(RolloutBuffer.open, self.run_dir / "buffer", self.config, self.seed)

    async def run(self) -> None:
        while not self.finishing.is_set():
            if self.buffer.expire():
                self._wake()
            await asyncio.sleep(0.5)
        self._wake()

    async def teardown(self) -> None:
        self.buffer.close()

    def figures(self) -> dict[str, Any]:
        return {"accounts": self.buffer.accounts()} if hasattr(self, "buffer") else {}

    def _wake(self) -> None:
        """Let every waiting call look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, look: Callable[[], T], wait_s: float) -> T:
        """Look until something is found, the time is up, or the run ends."""
        until = time.monotonic() + wait_s
        while True:
            found = look()
            left = until - time.monotonic()
            if found or left <= 0 or self.finishing.is_set():
                return found
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                continue

    @concurrent_endpoint
    async def claim(self, generator: str, version: int, count: int, holding: list[str], wait_s: float) -> list[Lease]:
        return await self._wait(lambda: self.buffer.claim(generator, version, count, holding), wait_s)

    @concurrent_endpoint
    async def put(self, rollout: Rollout) -> bool:
        taken = self.buffer.put(rollout)
        self._wake()
        return taken

    @concurrent_endpoint
    async def abandon(self, lease_ids: list[str], reason: str) -> None:
        self.buffer.abandon(lease_ids, reason)
        self._wake()

    @concurrent_endpoint
    async def delayed(self, result: DelayedReward) -> bool:
        return self.buffer.delayed(result)

    @concurrent_endpoint
    async def to_replay(self, count: int, wait_s: float) -> list[Rollout]:
        return await self._wait(lambda: self.buffer.to_replay(count), wait_s)

    @concurrent_endpoint
    async def take(self, batch_id: int, wait_s: float) -> TrainBatch | None:
        batch = await self._wait(lambda: self.buffer.take(batch_id), wait_s)
        if batch is not None:
            self._wake()  # a batch taken makes room for new leases
            if batch_id > self._logged and batch_id % self.sample_every == 0:
                self._logged = batch_id
                await asyncio.to_thread(write_rollouts, self.run_dir, batch_id, batch.groups, 2)
        return batch

    @concurrent_endpoint
    async def trained(self, batch_id: int) -> None:
        self.buffer.trained(batch_id)
        self._wake()

    @concurrent_endpoint
    async def rewind(self, step: int) -> dict[str, Any]:
        rewound = self.buffer.rewind(step)
        self._wake()
        return rewound

    @concurrent_endpoint
    async def save(self, path: str, step: int) -> dict[str, Any]:
        return self.buffer.save(Path(path), step)

    @concurrent_endpoint
    async def accounts(self) -> dict[str, Any]:
        return self.buffer.accounts()
