"""The actor around one trainer's `services.rollouts.buffer.RolloutBuffer`: waiting, expiry, and readable samples.

    endpoints, run ──jobs──▶ one thread, one job after the other ──▶ buffer

The buffer is synchronous and not thread-safe, and a rewind or a save of a long run takes it many seconds. All work on
it therefore happens in one thread, while the event loop goes on answering status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from monarch.actor import concurrent_endpoint

from mesh.actor import MeshActor
from mesh.messages import DelayedReward, Lease, Rollout, TrainBatch
from services.rollouts.buffer import BufferConfig, RolloutBuffer
from services.rollouts.journal import SEGMENTS
from services.runs.atomic import sweep_asides
from services.runs.checkpoints import Checkpoints
from services.runs.folder import of_replica
from services.telemetry.rollout_log import write_rollouts

T = TypeVar("T")


class Starved(Exception):
    """Task after task is dropped without one rollout; the message holds the most frequent reasons."""


class RolloutBufferActor(MeshActor):
    """Endpoints of `mesh.roles.RolloutBuffer`. What they look for may not be there yet; here callers wait for it."""

    def __init__(
        self,
        name: str,
        config: BufferConfig,
        seed: int,
        run_dir: str,
        sample_every: int,
        replica: int = 0,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """`replica`: of which trainer of this run. `share`: which part of the tasks, of how many parts."""
        super().__init__(name)
        self.replica, self.share = replica, share
        self.config, self.seed, self.run_dir, self.sample_every = config, seed, Path(run_dir), sample_every
        self.buffer: RolloutBuffer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._accounts: dict[str, Any] = {}  # the last ones: the buffer itself may be busy when status is asked for
        self._changed = asyncio.Event()
        self._claimed = False
        self._logged = -1

    async def setup(self) -> None:
        await self._work(self._open)

    def _open(self) -> None:
        """From its journal; where there is none although the run has checkpoints, from the newest of these."""
        folder, checkpoints = (of_replica(self.run_dir / name, self.replica) for name in ("buffer", "checkpoints"))
        sweep_asides(of_replica(self.run_dir / "rollouts", self.replica))  # of the buffer that was here before
        lost = not any(folder.glob(SEGMENTS))
        if lost and (latest := Checkpoints(checkpoints).latest()) is not None:
            self.buffer = RolloutBuffer.load(latest.path / "buffer", folder, self.config, replica=self.share)
        else:
            self.buffer = RolloutBuffer.open(folder, self.config, self.seed, replica=self.share)

    async def run(self) -> None:
        """Look after leases and accounts. Starved when generators work, and nothing that can be trained comes back."""
        while not self.finishing.is_set():
            expired, starved, self._accounts = await self._work(self._look_after)
            if expired:
                self._wake()
            # Only after a claim: in a resumed run the trainer's rewind comes first, and with it a new chance.
            if starved and self._claimed:
                raise Starved(starved)
            await asyncio.sleep(0.5)
        self._wake()

    def _look_after(self) -> tuple[int, str | None, dict[str, Any]]:
        return self.buffer.expire(), self.buffer.starved(), self.buffer.accounts()

    async def teardown(self) -> None:
        await self._work(self._close)

    def _close(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()

    def figures(self) -> dict[str, Any]:
        return {"accounts": self._accounts} if self._accounts else {}

    async def _work(self, job: Callable[[], T]) -> T:
        """Do a job with the buffer after those that were given before."""
        with self.busy:
            return await asyncio.get_running_loop().run_in_executor(self._thread, job)

    def _wake(self) -> None:
        """Let every waiting call look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, look: Callable[[], T], wait_s: float) -> T:
        """Look until something is found, the time is up, or the run ends."""
        until = time.monotonic() + wait_s
        while True:
            changed = self._changed  # before the look, so that no change after it is missed
            found = await self._work(look)
            left = until - time.monotonic()
            if found or left <= 0 or self.finishing.is_set():
                return found
            try:
                await asyncio.wait_for(changed.wait(), left)
            except TimeoutError:
                continue

    @concurrent_endpoint
    async def claim(self, generator: str, version: int, count: int, holding: list[str], wait_s: float) -> list[Lease]:
        self._claimed = True
        return await self._wait(lambda: self.buffer.claim(generator, version, count, holding), wait_s)

    @concurrent_endpoint
    async def put(self, rollout: Rollout) -> bool:
        taken = await self._work(lambda: self.buffer.put(rollout))
        self._wake()
        return taken

    @concurrent_endpoint
    async def abandon(self, lease_ids: list[str], reason: str) -> None:
        await self._work(lambda: self.buffer.abandon(lease_ids, reason))
        self._wake()

    @concurrent_endpoint
    async def delayed(self, result: DelayedReward) -> bool:
        return await self._work(lambda: self.buffer.delayed(result))

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
                with self.busy:
                    await asyncio.to_thread(write_rollouts, self.run_dir, batch_id, batch.groups, 2, self.replica)
        return batch

    @concurrent_endpoint
    async def trained(self, batch_id: int) -> None:
        await self._work(lambda: self.buffer.trained(batch_id))
        self._wake()

    @concurrent_endpoint
    async def move_to(self, step: int) -> None:
        await self._work(lambda: self._move_to(step))
        self._logged = min(self._logged, step - 1)  # the samples of the abandoned course are written anew
        self._wake()

    def _move_to(self, step: int) -> None:
        if step > self.buffer.frontier:
            self.buffer.advance(step)
        else:
            self.buffer.rewind(step)

    @concurrent_endpoint
    async def save(self, path: str, step: int) -> dict[str, Any]:
        return await self._work(lambda: self.buffer.save(Path(path), step))

    @concurrent_endpoint
    async def accounts(self) -> dict[str, Any]:
        self._accounts = await self._work(self.buffer.accounts)
        return self._accounts
