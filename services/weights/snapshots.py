"""Versioned snapshots of the policy: the trainer publishes, readers pull when they are ready.

    trainer, every rank                           generator, teacher
    copy(v)  parameters ──▶ a free slot           lease(newer_than) ──▶ WeightsRef(v, lease id)
    the optimizer goes on; beside it:             pull(ref): read ─▶ verify ─▶ tensors
    seal()   checksums, delta; current = slot     release(lease id)

A slot is one place for a version in the memory of every rank. It is in one of four states: *copied* (not readable yet),
*current* (leases are given on it), *retired* (its readers finish), *free*. A copy goes only to a slot that is neither
current nor leased, and the slot becomes current only after all ranks have copied and sealed theirs, so a failed publish
leaves the old version in use. A reader that outlives its lease finds other checksums and learns that its version is
gone; it never gets a mixture.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mesh.messages import ShardRef, WeightsRef
from services.weights.config import WeightsConfig
from services.weights.layout import check_whole
from services.weights.shards import Writer

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class PublishError(RuntimeError):
    """A version did not become current. The message says which rank failed, and how."""


@dataclass(slots=True)
class _Slot:
    index: int
    version: int = -1
    base: int | None = None  # the version that its deltas apply to
    shards: list[ShardRef] = field(default_factory=list)
    leases: dict[str, float] = field(default_factory=dict)  # lease id -> the clock's time at which it expires


class SnapshotPublisher:
    """The leader's side: which version is in which slot of all ranks, and who reads it.

    Every method is called from one event loop.
    """

    def __init__(
        self, writers: Sequence[Writer], config: WeightsConfig | None = None, store: Any | None = None
    ) -> None:
        """`writers`: one per rank of the trainer, in order. `store`: where they put the tensors, if not in regions."""
        self.config = config or WeightsConfig()
        self._writers, self._store = list(writers), store
        self._slots = [_Slot(index) for index in range(self.config.slots)]
        self._copied: _Slot | None = None
        self._current: _Slot | None = None
        self._pulled_bytes = 0
        self._changing = asyncio.Lock()
        self._lease_ended = asyncio.Event()
        self._published = asyncio.Event()
        self._closed = False

    @property
    def version(self) -> int | None:
        """The current version; None before the first."""
        return self._current.version if self._current else None

    @property
    def copied(self) -> int | None:
        """The version that is copied and not current yet; None without one."""
        return self._copied.version if self._copied else None

    async def ready(self) -> None:
        """Wait for a `seal` under way and for readers of the slot that a `copy` needs, at most `max_lease_s`."""
        async with self._changing:
            while self._writable_slot() is None:
                await self._lease_end()

    async def copy(self, version: int) -> bool:
        """Take a snapshot of every rank's tensors, which may change again as soon as this returns.

        False, at once, where it would have to wait (see `ready`). Raises ValueError when the version does not increase
        or the tensors differ from the layout, PublishError when a rank fails or takes longer than `part_limit_s`,
        RuntimeError after `close`. A copy that was not sealed is given up.
        """
        if self._changing.locked():
            return False
        async with self._changing:
            if self._closed:
                raise RuntimeError("this publisher is closed: make a new one to publish again")
            if self._current and version <= self._current.version:
                raise ValueError(f"version {version} does not follow {self._current.version}: versions must increase")
            self._copied = None
            slot = self._writable_slot()
            if slot is None:
                return False
            await self._of_all("copy", version, lambda writer: writer.copy(slot.index, version))
            slot.version = version
            self._copied = slot
            return True

    async def seal(self) -> None:
        """Make what was copied last the current version. Raises PublishError; the old version then stays current."""
        async with self._changing:
            slot, base = self._copied, self._current
            if slot is None:
                raise PublishError("there is nothing to seal: copy a version first")
            at = base.index if base else None
            try:
                shards = await self._of_all("seal", slot.version, lambda writer: writer.seal(slot.index, at))
                check_whole([shard.specs for shard in shards])
            finally:
                self._copied = None
            # Only now, with every byte and checksum in place, does the version advance.
            slot.shards, slot.base = shards, base.version if base else None
            self._current = slot
            self._published.set()
            self._published = asyncio.Event()

    async def publish(self, version: int) -> None:
        """A `copy` once that is possible, and its `seal`."""
        while not await self.copy(version):
            await self.ready()
        await self.seal()

    def lease(self, newer_than: int) -> WeightsRef | None:
        """The current version with a read lease if it is newer, else None. Give the lease back with `release`.

        Who says to have the version before this one also learns what changed since.
        """
        slot = self._current
        if slot is None or slot.version <= newer_than or self._closed:
            return None
        lease_id = secrets.token_hex(8)
        slot.leases[lease_id] = time.monotonic() + self.config.max_lease_s
        shards = slot.shards if newer_than == slot.base else [replace(shard, delta=None) for shard in slot.shards]
        return WeightsRef(slot.version, shards, lease_id, self._store)

    async def lease_newer(self, newer_than: int, wait_s: float) -> WeightsRef | None:
        """As `lease`, but waits up to `wait_s` for a newer version."""
        deadline = time.monotonic() + wait_s
        while (ref := self.lease(newer_than)) is None and (left := deadline - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._published.wait(), left)
            except TimeoutError:
                return None
        return ref

    def release(self, lease_id: str, pulled_bytes: int = 0) -> None:
        """End a lease, saying how much was read. Unknown and expired ids are ignored."""
        self._pulled_bytes += pulled_bytes
        for slot in self._slots:
            slot.leases.pop(lease_id, None)
        self._lease_ended.set()

    def readers(self) -> int:
        """Leases that are neither released nor expired."""
        now = time.monotonic()
        return sum(expires > now for slot in self._slots for expires in slot.leases.values())

    def metrics(self) -> dict[str, float]:
        """The current version's size, what of it a reader of the version before has to fetch, the share of words that
        changed, and the bytes that readers fetched since the last call."""
        pulled, self._pulled_bytes = self._pulled_bytes, 0
        shards = self._current.shards if self._current else []
        metrics = {
            "weights/bytes": float(sum(shard.nbytes for shard in shards)),
            "weights/bytes_published": float(sum(fetched_bytes(shard) for shard in shards)),
            "weights/bytes_pulled": float(pulled),
        }
        compared = [(shard.density, shard.nbytes) for shard in shards if shard.density is not None]
        if compared:
            whole = max(1, sum(nbytes for _, nbytes in compared))
            metrics["weights/delta_density"] = sum(density * nbytes for density, nbytes in compared) / whole
        return metrics

    async def close(self) -> None:
        """Free the memory of all ranks; reads that are under way fail or end well. Idempotent."""
        self._closed = True
        async with self._changing:
            self._current = self._copied = None
            await asyncio.gather(*[writer.close() for writer in self._writers])

    async def _of_all(self, what: str, version: int, call: Callable[[Writer], Awaitable[T]]) -> list[T]:
        """The results of all ranks, each bounded. The first failure is raised after the last rank is done."""
        limit = self.config.part_limit_s

        async def of(writer: Writer) -> T:
            return await asyncio.wait_for(call(writer), limit)

        results = await asyncio.gather(*[of(writer) for writer in self._writers], return_exceptions=True)
        for rank, result in enumerate(results):
            if isinstance(result, (ValueError, asyncio.CancelledError)):
                raise result
            if isinstance(result, Exception):
                why = f"no answer within {limit:g} s" if isinstance(result, TimeoutError) else result
                raise PublishError(f"rank {rank} did not {what} its part of version {version}: {why}") from result
        return [result for result in results if not isinstance(result, BaseException)]

    def _writable_slot(self) -> _Slot | None:
        """A slot that is not current and has no live lease."""
        now = time.monotonic()
        for slot in self._slots:
            slot.leases = {lease_id: expires for lease_id, expires in slot.leases.items() if expires > now}
        return next((slot for slot in self._slots if slot is not self._current and not slot.leases), None)

    async def _lease_end(self) -> None:
        """Wait for the next end of a lease on a slot that is not current. No new ones are given on those."""
        retired = [slot for slot in self._slots if slot is not self._current]
        next_expiry = min(expires for slot in retired for expires in slot.leases.values())
        self._lease_ended.clear()
        try:
            await asyncio.wait_for(self._lease_ended.wait(), next_expiry - time.monotonic())
        except TimeoutError:
            _logger.warning("a reader kept its lease for %g s: its version is overwritten", self.config.max_lease_s)


def fetched_bytes(shard: ShardRef) -> int:
    """What a reader of the version before has to fetch of a shard."""
    if shard.delta is None or shard.region is None:
        return shard.nbytes
    total, word = 0, shard.delta.word_bytes
    for start, segment in zip(range(0, shard.region.nbytes, shard.block_bytes), shard.delta.segments, strict=True):
        whole = min(shard.block_bytes, shard.region.nbytes - start)
        total += whole if segment is None else segment.gap_bytes + segment.words * word
    return total
