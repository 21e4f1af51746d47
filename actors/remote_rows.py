"""The SDPO teacher's rows as the learner reads them: in order, in a thread, a chunk ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate, pairwise

import torch

from mesh.messages import LogitsRef
from services.losses.topk import TopKRows, cat_rows
from services.training.plan import StepPlan
from services.weights.logits import read_logits
from services.weights.region import Via
from services.weights.row_format import RowFormat

CHUNK_LIMIT_S = 60.0  # each block of a chunk has a limit of its own; this one is for a loop that does nothing any more


class RemoteRows:
    """Called from the learner's thread with a number of rows; `loop` reads them, one chunk ahead of the caller.

    Two chunks of `chunk_rows` rows are in memory, whatever the total. Rows that lie in one chunk are given as they lie
    there; those of several are copied together, so ask for no more than a chunk at a time. Calls raise LogitsGone,
    RegionError or TimeoutError when the rows cannot be had (any more).
    """

    def __init__(
        self,
        ref: LogitsRef,
        loop: asyncio.AbstractEventLoop,
        *,
        chunk_rows: int,
        via: Via = "auto",
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """`ranges`: the rows that are wanted, half-open, in order; None is all. No chunk lies in two of them."""
        self._loop = loop
        self._chunks: AsyncIterator[tuple[int, torch.Tensor | TopKRows]] = read_logits(
            ref, chunk_rows, via=via, ranges=ranges
        )
        self._rest = RowFormat.of(ref).read(torch.empty(0, dtype=torch.uint8))  # of the chunk that was read last

    @classmethod
    def of_plan(
        cls, ref: LogitsRef, plan: StepPlan, loop: asyncio.AbstractEventLoop, *, chunk_rows: int, via: Via = "auto"
    ) -> RemoteRows:
        """The answer to this plan, for a learner that reads each micro-batch's rows `chunk_rows` at a time."""
        sites = accumulate((len(micro.sites) for micro in plan.micro_batches), initial=0)
        ranges = list(pairwise(ref.row_offsets[site] for site in sites))
        return cls(ref, loop, chunk_rows=chunk_rows, via=via, ranges=ranges)

    def __call__(self, count: int) -> torch.Tensor | TopKRows:
        """The next `count` rows, whole (count, V) or cut, in the dtype that they travel in; valid until the next call.

        ValueError for more rows than there are.
        """
        parts, self._rest = [self._rest[:count]], self._rest[count:]
        while (missing := count - sum(map(len, parts))) > 0:
            parts[-1] = parts[-1].clone()  # a chunk is overwritten when the one after it is asked for
            chunk = self._next(missing)
            parts.append(chunk[:missing])
            self._rest = chunk[missing:]
        filled = [part for part in parts if len(part)] or parts[:1]
        return filled[0] if len(filled) == 1 else cat_rows(filled)

    def _next(self, missing: int) -> torch.Tensor | TopKRows:
        coming = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        try:
            chunk = coming.result(timeout=CHUNK_LIMIT_S)
        except TimeoutError:
            coming.cancel()
            raise
        if chunk is None:
            raise ValueError(f"{missing} more rows were asked for than the teacher's answer has")
        return chunk

    async def _read(self) -> torch.Tensor | TopKRows | None:
        try:
            _, rows = await anext(self._chunks)
        except StopAsyncIteration:
            return None
        return rows
