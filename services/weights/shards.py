"""One rank's part of the weights: where its tensors are copied to, and what readers need to find them.

    copy(slot, version)   parameters ──▶ the slot's snapshot         the optimizer waits for this, and only for this
    seal(slot, base)      checksums of its blocks; what changed       beside the next step
                          since slot `base` ──▶ the slot's delta

A writer has no opinion about versions: `services.weights.snapshots.SnapshotPublisher` tells the writers of all ranks
which slot to write, and makes a version current when all of them have sealed it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from mesh.messages import DeltaRef, DeltaSegment, ShardRef, TensorSpec
from services.weights import delta
from services.weights.checksum import checksum
from services.weights.config import WeightsConfig
from services.weights.layout import Laid, Source, check_same, flat_bytes, lay_out, views
from services.weights.region import BLOCK_BYTES, Region, RegionError

_DELTA_BLOCK_BYTES = 1 << 20  # a delta is small and its end is read with a whole block
_logger = logging.getLogger(__name__)


class Writer(Protocol):
    """What the publisher needs of each rank: a `ShardWriter`, or calls to the one of a peer."""

    async def copy(self, slot: int, version: int) -> None:
        """Copy this rank's tensors into the slot; they may change once this has returned."""
        ...

    async def seal(self, slot: int, base: int | None) -> ShardRef:
        """Make what was copied readable. `base` is the slot of the version that readers have, None without one."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Slot:
    region: Region
    version: int | None = None  # None: not whole
    checksums: list[int] = field(default_factory=list)
    delta: Region | None = None


class ShardWriter:
    """`config.slots` regions with this rank's tensors. Made inside a Monarch actor they are registered with RDMA.

    Every method is called from one event loop.
    """

    def __init__(
        self,
        source: Source,
        config: WeightsConfig | None = None,
        *,
        rank: int = 0,
        dtype: torch.dtype | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Lays the regions out for the tensors of `source`, whose values are not read yet. ValueError as in `lay_out`.

        `rank`: of this process in its trainer replica. `dtype`: what the trainer computes with, for
        `config.dtype = "auto"`; None publishes every tensor in its own type.
        """
        self.config = config or WeightsConfig()
        self._source, self._rank = source, rank
        self._dtype = published_dtype(self.config, dtype)
        self.specs: list[TensorSpec] = [laid.spec for laid in lay_out(source(), rank=rank, dtype=self._dtype)]
        self._block_bytes = block_bytes
        self._word_bytes = word_bytes(self.specs)
        nbytes = flat_bytes(self.specs)
        self._slots = [_Slot(Region(nbytes, block_bytes=block_bytes)) for _ in range(self.config.slots)]
        self._busy = threading.Lock()

    async def copy(self, slot: int, version: int) -> None:
        """Copy the source's tensors as they are now. ValueError when they differ from the layout."""
        laid = lay_out(self._source(), rank=self._rank, dtype=self._dtype)
        check_same(self.specs, [one.spec for one in laid])
        await asyncio.to_thread(self._copy, self._slots[slot], version, laid)

    async def seal(self, slot: int, base: int | None) -> ShardRef:
        sealed = self._slots[slot]
        older = self._slots[base] if base is not None and self.config.delta != "off" else None
        compared = await asyncio.to_thread(self._seal, sealed, older)
        shard = ShardRef(self.specs, sealed.region.ref(), self._block_bytes, sealed.checksums)
        if compared is not None and older is not None:
            shard.density = compared.density
            shard.delta = await self._write_delta(sealed, older, compared)
        return shard

    async def close(self) -> None:
        """Free the regions; reads that are under way fail or end well. Idempotent."""
        for slot in self._slots:
            await slot.region.close()
            if slot.delta is not None:
                await slot.delta.close()

    def _copy(self, slot: _Slot, version: int, laid: list[Laid]) -> None:
        # A call that was cancelled leaves its thread at work; the lock keeps the next one from writing beside it.
        with self._busy:
            slot.version = None
            for target, one in zip(views(slot.region.tensor, self.specs).values(), laid, strict=True):
                target.copy_(one.box.tensor)
            slot.version = version

    def _seal(self, slot: _Slot, older: _Slot | None) -> _Compared | None:
        with self._busy:
            if slot.version is None:
                raise RuntimeError("this slot holds half a version: copy it again before it is sealed")
            blocks = slot.region.tensor.split(self._block_bytes)
            slot.checksums = [checksum(block) for block in blocks]
            if older is None or older.version is None:
                return None
            return _Compared.of(older.region.tensor.split(self._block_bytes), blocks, self._word_bytes)

    async def _write_delta(self, slot: _Slot, older: _Slot, compared: _Compared) -> DeltaRef | None:
        """None when no block is worth a delta, or where there is no room for one: then all is read whole."""
        if all(segment is None for segment in compared.segments):
            return None
        if slot.delta is None or slot.delta.nbytes < len(compared.packed):
            stale, slot.delta = slot.delta, None
            try:
                if stale is not None:
                    await stale.close()
                # Twice what is needed: densities vary from step to step, and registered memory is not grown in place.
                slot.delta = Region(2 * max(len(compared.packed), 4096), block_bytes=_DELTA_BLOCK_BYTES)
            except RegionError as error:
                _logger.warning("no room for a delta, the version goes whole: %s", error)
                return None
        target = slot.delta.tensor[: len(compared.packed)]
        await asyncio.to_thread(target.copy_, torch.from_numpy(compared.packed))
        return DeltaRef(slot.delta.ref(), self._word_bytes, older.checksums, compared.segments)


@dataclass(slots=True)
class _Compared:
    """What differs between two versions of a shard."""

    density: float
    segments: list[DeltaSegment | None]
    packed: np.ndarray  # uint8: all segments, one after the other

    @classmethod
    def of(cls, old: tuple[torch.Tensor, ...], new: tuple[torch.Tensor, ...], word: int) -> _Compared:
        changed, length, pieces = 0, 0, []
        segments: list[DeltaSegment | None] = []
        for old_block, new_block in zip(old, new, strict=True):
            count, packed = delta.compare(words_of(old_block, word), words_of(new_block, word))
            changed += count
            if packed is None:
                segments.append(None)
                continue
            gaps, values = packed
            segments.append(DeltaSegment(length, count, len(gaps)))
            pieces += [gaps, values.view(np.uint8)]
            length += len(gaps) + values.nbytes
        words = sum(len(block) for block in new) // word
        return cls(changed / max(1, words), segments, np.concatenate([np.empty(0, np.uint8), *pieces]))


def published_dtype(config: WeightsConfig, computed: torch.dtype | None) -> torch.dtype | None:
    """The type that floating-point tensors are published as; None: their own."""
    return computed if config.dtype == "auto" else getattr(torch, config.dtype)


def word_bytes(specs: list[TensorSpec]) -> int:
    """The unit in which versions are compared: the smallest element of any tensor, 4 bytes at most."""
    return min([4, *(getattr(torch, spec.dtype).itemsize for spec in specs)])


def words_of(data: torch.Tensor, word: int) -> np.ndarray:
    """Unsigned words of `word` bytes over a flat uint8 tensor, without a copy; bytes after the last whole one are
    alignment."""
    whole = data.numel() // word * word
    return data[:whole].numpy().view(f"u{word}")
