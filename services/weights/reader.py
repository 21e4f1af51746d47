"""The reader's side: pull a leased version into buffers of one's own, as deltas where that is possible.

Each rank's part of a version has a buffer here, whose blocks are known by the checksums of what they hold:

    held == wanted checksum            nothing to do (frozen parameters)
    held == the delta's base           read the changed words, apply, verify; if that fails, as below
    otherwise                          read the block, verify; if that fails, the version is gone

So it does not matter which versions a reader missed, or whose trainer wrote them: what does not fit is read whole.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from mesh.messages import DeltaRef, ShardRef, TensorSpec, WeightsRef
from services.weights import delta
from services.weights.checksum import checksum
from services.weights.config import WeightsConfig
from services.weights.layout import view
from services.weights.region import RegionError, read_region
from services.weights.shards import words_of

_logger = logging.getLogger(__name__)


class VersionGone(RuntimeError):
    """The version was overwritten while it was read."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull cost."""

    via: str = ""  # "shm" | "rdma" | "torchstore": the way it went; "" when nothing had to be read
    nbytes: int = 0  # fetched
    seconds: float = 0.0


class Reader(Protocol):
    """What `pull_newest` needs of a transport."""

    config: WeightsConfig
    last: Pulled

    async def pull(self, ref: WeightsRef, names: Collection[str] | None = None) -> dict[str, torch.Tensor]: ...


class SnapshotReader:
    """Pulls versions out of the regions of a trainer's ranks. One pull at a time."""

    def __init__(self, config: WeightsConfig | None = None) -> None:
        self.config = config or WeightsConfig()
        self.last = Pulled()
        self._held: list[_Shard] = []
        self._whole: dict[str, torch.Tensor] = {}  # tensors that are put together from several ranks' boxes

    async def pull(self, ref: WeightsRef, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """The tensors of one version, by name, or those of `names` only; whole ones, however they are sharded.

        They lie in this reader's buffers and the next pull overwrites them: load them into the model before it. Raises
        VersionGone when the version was overwritten during the read, RegionError when the bytes cannot be had, KeyError
        for a name that the version does not have; tensors of earlier pulls are then void.
        """
        began, self.last = time.monotonic(), Pulled()
        check_has(ref, names)
        # The buffers are given back only after success: a late RDMA block may still be written to one that failed.
        held, self._held = self._held, []
        if [shard.nbytes for shard in held] != [_nbytes(shard) for shard in ref.shards]:
            held = [_Shard(_nbytes(shard)) for shard in ref.shards]
        pulls = [mine.pull(shard, names, self.config) for mine, shard in zip(held, ref.shards, strict=True)]
        results = await asyncio.gather(*pulls, return_exceptions=True)
        for result in results:
            if isinstance(result, _Stale):
                raise VersionGone(
                    f"version {ref.version} was overwritten while it was read: its lease {ref.lease_id!r} ended first. "
                    "Take the newest version; if that happens often, raise weights.max_lease_s or weights.slots"
                )
            if isinstance(result, BaseException):
                raise result
        self._held = held
        tensors = await asyncio.to_thread(self._assemble, ref, names)
        via = next((shard.via for shard in held if shard.via), "")
        self.last = Pulled(via, sum(shard.read_bytes for shard in held), time.monotonic() - began)
        return tensors

    def _assemble(self, ref: WeightsRef, names: Collection[str] | None) -> dict[str, torch.Tensor]:
        boxes: dict[str, list[tuple[TensorSpec, torch.Tensor]]] = {}
        for held, shard in zip(self._held, ref.shards, strict=True):
            for spec in shard.specs:
                if names is None or spec.name in names:
                    boxes.setdefault(spec.name, []).append((spec, view(held.flat, spec)))
        return {name: self._tensor(name, found) for name, found in boxes.items()}

    def _tensor(self, name: str, boxes: list[tuple[TensorSpec, torch.Tensor]]) -> torch.Tensor:
        for spec, box in boxes:
            if spec.shape == spec.full_shape:  # one rank has all of it: no copy
                return box
        full = self._whole.get(name)
        if full is None or full.shape != boxes[0][0].full_shape or full.dtype != boxes[0][1].dtype:
            full = self._whole[name] = torch.empty(boxes[0][0].full_shape, dtype=boxes[0][1].dtype)
        for spec, box in boxes:
            at = tuple(slice(start, start + size) for start, size in zip(spec.start, spec.shape, strict=True))
            full[at].copy_(box)
        return full


class _Stale(Exception):
    """A block does not hold what the reference says."""


class _Shard:
    """The reader's copy of one rank's part."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.flat = torch.empty(nbytes, dtype=torch.uint8)
        self.checksums: dict[int, int] = {}  # by block: of what lies there now, where that is known
        self.read_bytes = 0
        self.via = ""

    async def pull(self, shard: ShardRef, names: Collection[str] | None, config: WeightsConfig) -> None:
        """Bring the blocks that hold `names` (None: all) to the state of `shard`. _Stale or RegionError."""
        self.read_bytes, self.via = 0, ""
        if config.delta == "off":
            self.checksums.clear()
        wanted = _blocks_with(shard, names)
        todo = [block for block in wanted if self.checksums.get(block) != shard.checksums[block]]
        if shard.delta is not None:
            todo = await self._apply_delta(shard, shard.delta, todo, config)
        for first, last in _runs(todo):
            await self._read(shard, first * shard.block_bytes, (last + 1) * shard.block_bytes, config)
        if await asyncio.to_thread(self._verify, shard, todo):
            raise _Stale

    async def _apply_delta(
        self, shard: ShardRef, changed: DeltaRef, todo: list[int], config: WeightsConfig
    ) -> list[int]:
        """Update what the delta fits; returns the blocks that are still to be read whole."""
        sparse = {
            block: segment
            for block in todo
            if (segment := changed.segments[block]) and self.checksums.get(block) == changed.base_checksums[block]
        }
        if not sparse:
            return todo
        ends = [segment.offset + segment.gap_bytes + segment.words * changed.word_bytes for segment in sparse.values()]
        start = min(segment.offset for segment in sparse.values())
        packed = torch.empty(max(ends) - start, dtype=torch.uint8)
        try:
            self.via = await read_region(changed.region, packed, start, config.block_timeout_s, config.via)
        except RegionError as error:
            _logger.warning("no delta, the version is read whole: %s", error)
            return todo
        self.read_bytes += len(packed)

        def apply() -> list[int]:
            for block, segment in sparse.items():
                self.checksums.pop(block)
                data = packed[segment.offset - start :].numpy()
                gaps = data[: segment.gap_bytes]
                values = data[segment.gap_bytes :][: segment.words * changed.word_bytes].view(f"u{changed.word_bytes}")
                try:
                    delta.apply(words_of(self._block(shard, block), changed.word_bytes), gaps, values)
                except ValueError as error:  # overwritten while it was read: the block itself may still be there
                    _logger.warning("a delta does not fit, its block is read whole: %s", error)
            return self._verify(shard, list(sparse))

        torn = set(await asyncio.to_thread(apply))
        return [block for block in todo if block not in sparse or block in torn]

    def _verify(self, shard: ShardRef, blocks: Iterable[int]) -> list[int]:
        """Note the checksums of these blocks; returns those that are not what the reference says."""
        for block in blocks:
            self.checksums[block] = checksum(self._block(shard, block))
        return [block for block in blocks if self.checksums[block] != shard.checksums[block]]

    async def _read(self, shard: ShardRef, start: int, stop: int, config: WeightsConfig) -> None:
        out = self.flat[start:stop]
        assert shard.region is not None
        self.via = await read_region(shard.region, out, start, config.block_timeout_s, config.via)
        self.read_bytes += len(out)

    def _block(self, shard: ShardRef, block: int) -> torch.Tensor:
        return self.flat[block * shard.block_bytes : (block + 1) * shard.block_bytes]


def check_has(ref: WeightsRef, names: Collection[str] | None) -> None:
    """KeyError for names that the version does not have."""
    missing = set(names or ()) - {spec.name for shard in ref.shards for spec in shard.specs}
    if missing:
        raise KeyError(f"version {ref.version} has no {sorted(missing)[:3]}: the trainer does not publish it")


async def pull_newest(
    reader: Reader,
    lease: Callable[[int], Awaitable[WeightsRef | None]],
    release: Callable[[str], Awaitable[None]],
    newer_than: int,
) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Lease, pull, release; the version and its tensors, or None when there is none newer than `newer_than`.

    A pull that fails is tried again with a new lease, `config.attempts` times in all; then its VersionGone or
    RegionError is raised, and the caller goes on with the version it has. `lease` and `release` bound their own waits;
    what `lease` raises goes through.
    """
    attempt = 0
    while True:
        attempt += 1
        ref = await lease(newer_than)
        if ref is None:
            return None
        try:
            return ref.version, await reader.pull(ref)
        except (VersionGone, RegionError) as error:
            if attempt == reader.config.attempts:
                raise
            _logger.warning("pull of version %d failed (attempt %d): %s", ref.version, attempt, error)
        finally:
            await _release_quietly(release, ref.lease_id)
        await asyncio.sleep(reader.config.retry_pause_s * 2 ** (attempt - 1))


async def _release_quietly(release: Callable[[str], Awaitable[None]], lease_id: str) -> None:
    try:
        await release(lease_id)
    except Exception as error:  # whatever the owner's actor raises: the lease ends by itself, the pull counts
        _logger.warning("lease %s was not released (%s); it expires by itself", lease_id, error)


def _nbytes(shard: ShardRef) -> int:
    if shard.region is None:
        raise RegionError(
            'this version lies in a torchstore: the reader needs transport = "torchstore" in its weights settings, too'
        )
    return shard.region.nbytes


def _blocks_with(shard: ShardRef, names: Collection[str] | None) -> list[int]:
    """The blocks, ascending, that hold any byte of these tensors."""
    if names is None:
        return list(range(len(shard.checksums)))
    size = shard.block_bytes
    return sorted(
        {
            block
            for spec in shard.specs
            if spec.name in names and spec.nbytes
            for block in range(spec.offset // size, (spec.offset + spec.nbytes - 1) // size + 1)
        }
    )


def _runs(blocks: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, last) of those that follow each other: one read each."""
    runs = []
    for _, group in itertools.groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0]):
        members = [block for _, block in group]
        runs.append((members[0], members[-1]))
    return runs
