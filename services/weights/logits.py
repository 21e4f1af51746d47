"""Teacher logits in registered memory: the teacher puts rows, the trainer reads them in chunks straight into the loss.

A region starts with a header that names the reference whose rows it holds. A release clears the header; the next `put`
writes its rows and then its name. A reader looks at the header *after* each chunk, so rows of another reference (put
there after this one expired) are an error and never a gradient. Regions are reused, registered once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict, Field

from mesh.messages import LogitsRef
from services.weights.region import Region, Via, read_region

_HEADER_BYTES = 4096  # a block of its own, of one page
_BLOCK_BYTES = 4 << 20  # about; a block holds whole rows
_ROW_BYTES_PER_LOGIT = 4  # float32


class LogitsConfig(BaseModel):
    """How long and how much the teacher keeps for its readers."""

    model_config = ConfigDict(extra="forbid")

    ttl_s: float = Field(default=300.0, gt=0, description="Seconds after which rows that nobody released are dropped.")
    max_bytes: int = Field(
        default=4 << 30, gt=0, description="Most bytes of logits in registered memory; more is an error."
    )


class LogitsGone(RuntimeError):
    """The rows of a reference were released, expired or overwritten."""


@dataclass(slots=True)
class _Held:
    region: Region
    expires: float


class LogitsStore:
    """The teacher's side. Every method is called from one event loop."""

    def __init__(self, config: LogitsConfig | None = None) -> None:
        self.config = config or LogitsConfig()
        self._held: dict[str, _Held] = {}
        self._free: list[Region] = []
        self._changing = asyncio.Lock()

    async def put(
        self,
        rows: torch.Tensor,
        row_offsets: Sequence[int],
        *,
        teacher_version: int,
        hinted_accuracy: float | None = None,
    ) -> LogitsRef:
        """Copy `rows` (N, V), any float dtype, as float32; context `i` owns rows `row_offsets[i] : row_offsets[i+1]`.

        Raises ValueError for empty or misaligned input, RuntimeError when `max_bytes` would be exceeded.
        """
        if rows.dim() != 2 or not rows.numel() or not rows.is_floating_point():
            raise ValueError(f"logits are a non-empty float tensor (rows, vocab), not {rows.dtype} {tuple(rows.shape)}")
        offsets = list(row_offsets)
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != rows.shape[0] or offsets != sorted(offsets):
            raise ValueError(f"row_offsets must ascend from 0 to the {rows.shape[0]} rows; got {offsets[:8]}")
        async with self._changing:
            region = await self._region_for(*rows.shape)
            ref_id = secrets.token_hex(16)
            # From here the region belongs to the new reference even if this call is cancelled: it expires by itself.
            self._held[ref_id] = _Held(region, time.monotonic() + self.config.ttl_s)
            await asyncio.to_thread(_write, region, rows.detach(), ref_id)
        count, vocab = rows.shape
        return LogitsRef(ref_id, region.ref(), count, vocab, "float32", offsets, teacher_version, hinted_accuracy)

    async def release(self, ref_id: str) -> None:
        """Make a reference's memory free for the next `put`. Unknown ids are ignored."""
        self._free_region(ref_id)

    def expire(self) -> int:
        """Release what is older than `ttl_s`; returns how many references that were. `put` does it first, too."""
        now = time.monotonic()
        old = [ref_id for ref_id, held in self._held.items() if held.expires <= now]
        for ref_id in old:
            self._free_region(ref_id)
        return len(old)

    @property
    def held(self) -> int:
        """References that are neither released nor expired."""
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Registered bytes, in use or free."""
        return sum(region.nbytes for region in [*self._free, *(held.region for held in self._held.values())])

    async def close(self) -> None:
        """Release everything and give the memory back. Idempotent."""
        async with self._changing:
            for ref_id in list(self._held):
                self._free_region(ref_id)
            while self._free:
                await self._free.pop().close()

    def _free_region(self, ref_id: str) -> None:
        held = self._held.pop(ref_id, None)
        if held is not None:
            # Before the region can be given to another `put`, because a reader may be in the middle of it.
            held.region.tensor[:_HEADER_BYTES].zero_()
            self._free.append(held.region)

    async def _region_for(self, rows: int, vocab: int) -> Region:
        """The smallest free region that is large enough, else a new one; free ones that are too small make room."""
        self.expire()
        row_bytes = vocab * _ROW_BYTES_PER_LOGIT
        needed = _HEADER_BYTES + rows * row_bytes
        fitting = [region for region in self._free if region.nbytes >= needed]
        if fitting:
            best = min(fitting, key=lambda region: region.nbytes)
            self._free.remove(best)
            return best
        while self._free and self.nbytes + needed > self.config.max_bytes:
            await self._free.pop(0).close()
        if self.nbytes + needed > self.config.max_bytes:
            raise RuntimeError(
                f"{needed} more bytes of logits exceed max_bytes={self.config.max_bytes} with {self.held} references "
                "unreleased: release them after reading, ask for fewer contexts at once, or raise max_bytes"
            )
        return Region(needed, header_bytes=_HEADER_BYTES, block_bytes=row_bytes * max(1, _BLOCK_BYTES // row_bytes))


async def read_logits(
    ref: LogitsRef, chunk_rows: int, timeout_s: float = 5.0, via: Via = "auto"
) -> AsyncIterator[tuple[int, torch.Tensor]]:
    """Yield `(start, rows)` in order: at most `chunk_rows` float32 rows (n, V) that begin at row `start`.

    The next chunk travels while the caller works on this one, in two buffers that take turns: a chunk is valid until
    the next one is asked for. `timeout_s` bounds each RDMA block. Raises LogitsGone when the rows are no longer there,
    RegionError when the owner does not deliver, ValueError for a bad `chunk_rows`.
    """
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    fetch_rows = min(_fetch_rows(ref, chunk_rows), ref.rows)
    buffers = [
        torch.empty(fetch_rows, ref.vocab, dtype=torch.float32) for _ in range(2 if fetch_rows < ref.rows else 1)
    ]
    starts = range(0, ref.rows, fetch_rows)

    async def fetch(index: int) -> torch.Tensor:
        start = starts[index]
        rows = buffers[index % len(buffers)][: ref.rows - start]
        offset = _HEADER_BYTES + start * ref.vocab * _ROW_BYTES_PER_LOGIT
        await read_region(ref.region, rows.view(torch.uint8).view(-1), offset, timeout_s, via)
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        await read_region(ref.region, header, 0, timeout_s, via)
        if _header_of(ref.id) != header[: len(ref.id)].numpy().tobytes():
            raise LogitsGone(
                f"the logits {ref.id} were released or expired before row {start} of {ref.rows} was read: "
                "read sooner, or raise the teacher's ttl_s"
            )
        return rows

    coming = asyncio.create_task(fetch(0))
    try:
        for index, start in enumerate(starts):
            rows = await coming
            if index + 1 < len(starts):
                coming = asyncio.create_task(fetch(index + 1))
                # A task starts at the loop's next turn; the caller may compute for long without giving it one.
                await asyncio.sleep(0)
            for first in range(0, len(rows), chunk_rows):
                yield start + first, rows[first : first + chunk_rows]
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)  # the caller left early: nobody wants this chunk


def _fetch_rows(ref: LogitsRef, chunk_rows: int) -> int:
    """Rows per read: over RDMA a multiple of what a block holds, because a block is always read whole."""
    if not ref.region.rdma or len(ref.region.rdma) < 2:
        return chunk_rows
    block_rows = max(1, ref.region.rdma[1].size() // (ref.vocab * _ROW_BYTES_PER_LOGIT))
    return -(-chunk_rows // block_rows) * block_rows


def _write(region: Region, rows: torch.Tensor, ref_id: str) -> None:
    nbytes = rows.numel() * _ROW_BYTES_PER_LOGIT
    region.tensor[_HEADER_BYTES : _HEADER_BYTES + nbytes].view(torch.float32).view(rows.shape).copy_(rows)
    # The name last: who reads it there also finds the rows.
    region.tensor[: len(ref_id)] = torch.frombuffer(bytearray(_header_of(ref_id)), dtype=torch.uint8)


def _header_of(ref_id: str) -> bytes:
    return ref_id.encode("ascii")
