"""The SDPO teacher's rows as the learner reads them: in order, in a thread, chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import torch

from mesh.messages import LogitsRef
from services.weights.logits import read_logits
from services.weights.region import Via


class RemoteRows:
    """Called from the learner's thread with a number of rows; `loop` reads them, one chunk ahead of the caller.

    Raises LogitsGone, RegionError or TimeoutError when the rows cannot be had (any more).
    """

    CHUNK = 256

    def __init__(self, ref: LogitsRef, loop: asyncio.AbstractEventLoop, via: Via) -> None:
        self._loop = loop
        self._chunks: AsyncIterator[tuple[int, torch.Tensor]] = read_logits(ref, self.CHUNK, via=via)
        self._left = torch.empty((0, ref.vocab))

    def __call__(self, count: int) -> torch.Tensor:
        """The next `count` rows (count, V) float32."""
        parts, have = [self._left], self._left.shape[0]
        while have < count:
            _, rows = asyncio.run_coroutine_threadsafe(self._next(), self._loop).result(timeout=60.0)
            parts.append(rows.clone())  # a chunk is overwritten when the one after it is asked for
            have += rows.shape[0]
        together = torch.cat(parts) if len(parts) > 1 else self._left
        self._left = together[count:]
        return together[:count]

    async def _next(self) -> tuple[int, torch.Tensor]:
        return await anext(self._chunks)
