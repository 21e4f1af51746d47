"""Teacher logits in registered memory: the teacher writes rows as it makes them, the trainer reads them into the loss.

    teacher                                             trainer
    store.open ─▶ writer.write(rows) … ─▶ seal ──LogitsRef──▶ read_logits ─▶ chunk, chunk, … ─▶ store.release
                  a few rows at a time                        two buffers, whatever the total

A region starts with a header that names the reference whose rows it holds. A release clears the header; the next
writer writes its rows and then, when it is sealed, its name. A reader looks at the header *after* each chunk, so rows
of another reference (put there after this one expired) are an error and never a gradient. Regions are reused,
registered once.

Memory is free again when rows were read (`release`), when whoever asked for them is dead (`release_asker`), or after
`ttl_s`, whichever comes first.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict, Field

from mesh.messages import LogitsRef
from services.losses.topk import TopKRows
from services.weights.region import Region, Via, read_region
from services.weights.row_format import RowFormat, WireDtype

_HEADER_BYTES = 4096  # a block of its own, of one page
# A block holds whole rows: as many as fit into about this many bytes, but not more than this many rows. A block is read
# whole, and those at the two ends of a chunk are read for the neighbouring chunks, too.
_BLOCK_BYTES = 4 << 20
_BLOCK_ROWS = 32


class LogitsConfig(BaseModel):
    """In what form the teacher's rows travel, and how long and how much the teacher keeps for its readers."""

    model_config = ConfigDict(extra="forbid")

    dtype: WireDtype = Field(
        default="float32",
        description="float32 is exact; bfloat16 is half the bytes and off by up to 1 part in 256 of a token's distance "
        "from the likeliest one.",
    )
    top_k: int = Field(
        default=0,
        ge=0,
        description="0: rows over the whole vocabulary. k: of each row the k likeliest tokens and what all others have "
        "together; needs sdpo.loss.support = 'teacher' and sdpo.loss.top_k = k.",
    )
    ttl_s: float = Field(default=300.0, gt=0, description="Seconds after which rows that nobody released are dropped.")
    max_bytes: int = Field(
        default=4 << 30, gt=0, description="Most bytes of logits in registered memory; more is an error."
    )


class LogitsGone(RuntimeError):
    """The rows of a reference were released, expired or overwritten."""


class LogitsFull(RuntimeError):
    """There is no room for these rows; the message says what to do."""


@dataclass(slots=True)
class _Held:
    writer: LogitsWriter
    asker: Hashable
    expires: float


class LogitsStore:
    """The teacher's side. Every method is called from one event loop."""

    def __init__(self, config: LogitsConfig | None = None) -> None:
        self.config = config or LogitsConfig()
        self._held: dict[str, _Held] = {}
        self._free: list[Region] = []
        self._changing = asyncio.Lock()

    async def open(self, rows: int, vocab: int, asker: Hashable = None) -> LogitsWriter:
        """Room for that many rows. They are the asker's from now on: see `release_asker`.

        Raises ValueError for no rows or no vocabulary, LogitsFull when `max_bytes` would be exceeded.
        """
        if rows < 1:
            raise ValueError(f"a writer is for at least one row, not {rows}: answer without memory when there is none")
        form = RowFormat(vocab, self.config.dtype, min(self.config.top_k, vocab))
        async with self._changing:
            region = await self._region_for(rows, form)
        writer = LogitsWriter(region, form, rows)
        self._held[writer.ref_id] = _Held(writer, asker, time.monotonic() + self.config.ttl_s)
        return writer

    async def put(
        self,
        rows: torch.Tensor,
        row_offsets: Sequence[int],
        *,
        teacher_version: int,
        hinted_accuracy: float | None = None,
        asker: Hashable = None,
    ) -> LogitsRef:
        """Open, write and seal rows (N, V) that are here already, of any float dtype."""
        if rows.dim() != 2 or not rows.numel() or not rows.is_floating_point():
            raise ValueError(f"logits are a non-empty float tensor (rows, vocab), not {rows.dtype} {tuple(rows.shape)}")
        writer = await self.open(len(rows), rows.shape[1], asker)
        # Cancelled in the middle, the thread goes on writing to memory that is the writer's until it is released.
        await asyncio.to_thread(writer.write, rows)
        return writer.seal(row_offsets, teacher_version=teacher_version, hinted_accuracy=hinted_accuracy)

    async def release(self, ref_id: str) -> None:
        """Make a reference's memory free for the next writer. Unknown ids are ignored."""
        self._release(ref_id)

    def release_asker(self, asker: Hashable) -> int:
        """Release all that this asker was given, sealed or not; returns how many references that were."""
        return self._release_all(ref_id for ref_id, held in self._held.items() if held.asker == asker)

    def expire(self) -> int:
        """Release what is older than `ttl_s`; returns how many references that were. `open` does it first, too."""
        now = time.monotonic()
        return self._release_all(ref_id for ref_id, held in self._held.items() if held.expires <= now)

    @property
    def held(self) -> int:
        """References that are neither released nor expired."""
        return len(self._held)

    @property
    def askers(self) -> set[Hashable]:
        """Whose references are held."""
        return {held.asker for held in self._held.values()}

    @property
    def nbytes(self) -> int:
        """Registered bytes, in use or free."""
        return sum(region.nbytes for region in [*self._free, *(held.writer.region for held in self._held.values())])

    async def close(self) -> None:
        """Release everything and give the memory back. Idempotent."""
        async with self._changing:
            self._release_all(iter(self._held))
            while self._free:
                await self._free.pop().close()

    def _release_all(self, ref_ids: Iterator[str]) -> int:
        found = list(ref_ids)
        for ref_id in found:
            self._release(ref_id)
        return len(found)

    def _release(self, ref_id: str) -> None:
        held = self._held.pop(ref_id, None)
        if held is not None:
            # Before the region can be given to another writer, because this one or a reader may be in the middle of it.
            held.writer.close()
            self._free.append(held.writer.region)

    async def _region_for(self, rows: int, form: RowFormat) -> Region:
        """The smallest free region that is large enough, else a new one in place of the free ones."""
        self.expire()
        needed = _HEADER_BYTES + rows * form.row_bytes
        fitting = [region for region in self._free if region.nbytes >= needed]
        if fitting:
            best = min(fitting, key=lambda region: region.nbytes)
            self._free.remove(best)
            return best
        while self._free:  # all too small, and the new one will do for whatever they would
            await self._free.pop(0).close()
        if self.nbytes + needed > self.config.max_bytes:
            raise LogitsFull(
                f"{rows} rows of {form.row_bytes} bytes do not fit into sdpo.hinted.logits.max_bytes = "
                f"{self.config.max_bytes} beside {self.held} unreleased references of {self.nbytes} bytes: raise "
                "max_bytes, lower sdpo.max_sites, or make rows smaller with sdpo.hinted.logits.dtype = 'bfloat16' or "
                "sdpo.hinted.logits.top_k"
            )
        block_rows = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // form.row_bytes))
        # In a thread: the pages of a large region take their time, and the owner must go on answering.
        return await asyncio.to_thread(
            Region, needed, header_bytes=_HEADER_BYTES, block_bytes=block_rows * form.row_bytes
        )


class LogitsWriter:
    """One answer in the making: its rows are written in order, then it is sealed. Made by `LogitsStore.open`."""

    def __init__(self, region: Region, form: RowFormat, rows: int) -> None:
        self.region, self.form, self.rows = region, form, rows
        self.ref_id = secrets.token_hex(16)
        self.written = 0
        self._open = True
        self._writing = threading.Lock()

    def write(self, logits: torch.Tensor) -> None:
        """The next rows (n, V), any float dtype and device; from any thread.

        Raises ValueError for rows of another vocabulary or more than were opened, LogitsGone once the memory was
        released.
        """
        if logits.dim() != 2 or logits.shape[1] != self.form.vocab or self.written + len(logits) > self.rows:
            raise ValueError(
                f"{tuple(logits.shape)} does not continue {self.written} of {self.rows} rows over "
                f"{self.form.vocab} tokens"
            )
        start = _HEADER_BYTES + self.written * self.form.row_bytes
        with self._writing:
            if not self._open:
                raise LogitsGone(f"the memory for {self.rows} rows was released while they were written")
            self.form.write(logits, self.region.tensor[start : start + len(logits) * self.form.row_bytes])
            self.written += len(logits)

    def seal(
        self, row_offsets: Sequence[int], *, teacher_version: int, hinted_accuracy: float | None = None
    ) -> LogitsRef:
        """Make the rows readable; context `i` owns rows `row_offsets[i] : row_offsets[i+1]`.

        Raises ValueError for offsets that do not fit or rows that were not written, LogitsGone once the memory was
        released.
        """
        offsets = list(row_offsets)
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != self.rows or offsets != sorted(offsets):
            raise ValueError(f"row_offsets must ascend from 0 to the {self.rows} rows; got {offsets[:8]}")
        if self.written < self.rows:
            raise ValueError(f"only {self.written} of {self.rows} rows were written")
        with self._writing:
            if not self._open:
                raise LogitsGone(f"the memory for {self.rows} rows was released before they were sealed")
            # The name last: who reads it there also finds the rows.
            self.region.tensor[: len(self.ref_id)] = torch.frombuffer(_header_of(self.ref_id), dtype=torch.uint8)
        form = self.form
        return LogitsRef(
            self.ref_id, self.region.ref(), self.rows, form.vocab, form.dtype, offsets,
            teacher_version, hinted_accuracy, form.top_k,
        )  # fmt: skip

    def close(self) -> None:
        """Nothing is written to the region any more, and what it holds has no name."""
        with self._writing:
            self._open = False
            self.region.tensor[:_HEADER_BYTES].zero_()


async def read_logits(
    ref: LogitsRef,
    chunk_rows: int,
    timeout_s: float = 5.0,
    via: Via = "auto",
    ranges: Sequence[tuple[int, int]] | None = None,
) -> AsyncIterator[tuple[int, torch.Tensor | TopKRows]]:
    """Yield `(start, rows)`: at most `chunk_rows` rows that begin at row `start`, whole (n, V) or `TopKRows`.

    All rows in order, or those of the half-open `ranges`, in their order; a chunk lies in one range. Values have the
    reference's dtype. The next chunk travels while the caller works on this one, in two buffers that take turns, so a
    chunk is valid until the next one is asked for; a backward pass that still needs it then is an error of autograd.
    `timeout_s` bounds each RDMA block. Raises LogitsGone when the rows are no longer there, RegionError when the owner
    does not deliver, ValueError for a bad `chunk_rows` or range.
    """
    form = RowFormat.of(ref)
    chunks = _chunks([(0, ref.rows)] if ranges is None else ranges, ref.rows, chunk_rows)
    if not chunks:
        return
    largest = max(stop - start for start, stop in chunks) * form.row_bytes
    buffers = [torch.empty(largest, dtype=torch.uint8) for _ in chunks[:2]]

    async def fetch(number: int) -> torch.Tensor | TopKRows:
        start, stop = chunks[number]
        buffer = buffers[number % 2]
        # The bytes are about to change behind autograd's back.
        torch.autograd.graph.increment_version(buffer)
        raw = buffer[: (stop - start) * form.row_bytes]
        await read_region(ref.region, raw, _HEADER_BYTES + start * form.row_bytes, timeout_s, via)
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        await read_region(ref.region, header, 0, timeout_s, via)
        if header[: len(ref.id)].numpy().tobytes() != _header_of(ref.id):
            raise LogitsGone(
                f"the logits {ref.id} were released or expired before row {start} of {ref.rows} was read: "
                "read sooner, or raise the teacher's ttl_s"
            )
        return form.read(raw)

    coming = asyncio.create_task(fetch(0))
    try:
        for number, (start, _) in enumerate(chunks):
            rows = await coming
            if number + 1 < len(chunks):
                coming = asyncio.create_task(fetch(number + 1))
                # A task starts at the loop's next turn; the caller may compute for long without giving it one.
                await asyncio.sleep(0)
            yield start, rows
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)  # the caller left early: nobody wants this chunk


def _chunks(ranges: Sequence[tuple[int, int]], rows: int, chunk_rows: int) -> list[tuple[int, int]]:
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    for start, stop in ranges:
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"rows {start} to {stop} are outside of the answer's {rows}")
    return [
        (first, min(first + chunk_rows, stop)) for start, stop in ranges for first in range(start, stop, chunk_rows)
    ]


def _header_of(ref_id: str) -> bytearray:
    return bytearray(ref_id.encode("ascii"))
