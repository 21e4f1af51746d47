"""Publishing beside training: the optimizer waits for the copy and for nothing else.

    step k ─▶ begin(k+1): copy │ step k+1 ............................ ─▶ begin(k+2): copy │ step k+2 …
               trainer/publish │ weights/seal: checksums, delta, current

A version that cannot be copied at once, because the one before it is still being sealed or slow readers hold the
memory, is skipped: readers get the next one, or this one if the trainer has the time to `begin` it again. One that
could not be published is counted and told, and the run goes on with the one before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.telemetry.spans import Spans
from services.weights.snapshots import SnapshotPublisher


class Publishing:
    """One version at a time through `publisher`. Every method is called from one event loop."""

    def __init__(self, publisher: SnapshotPublisher, spans: Spans, on_failure: Callable[[str], None]) -> None:
        """`on_failure` is told why a version could not be published."""
        self.publisher, self.failures = publisher, 0
        self._skipped: set[int] = set()
        self._spans, self._on_failure = spans, on_failure
        self._sealing: asyncio.Task[None] | None = None

    async def begin(self, version: int) -> None:
        """Copy the weights unless this version is current or under way; they may change once this has returned."""
        if version in (self.publisher.version, self.publisher.copied):
            return
        try:
            with self._spans("trainer/publish"):
                copied = await self.publisher.copy(version)
        except (RuntimeError, OSError) as error:
            self._failed(version, error)
            return
        if copied:
            self._skipped.discard(version)
            self._sealing = asyncio.create_task(self._seal(version))
        else:
            self._skipped.add(version)

    async def finish(self, version: int) -> None:
        """Publish the last version, however long its readers take; returns when it is current, or has failed."""
        if version not in (self.publisher.version, self.publisher.copied):
            await self.publisher.ready()
            await self.begin(version)
        await self.settled()

    async def settled(self) -> None:
        """Return when no version is under way any more, current or failed."""
        if self._sealing is not None:
            await asyncio.wait({self._sealing})

    def metrics(self) -> dict[str, float]:
        counts = {"weights/publish_failures": float(self.failures), "weights/skipped": float(len(self._skipped))}
        return counts | self.publisher.metrics()

    async def close(self) -> None:
        """Give up what is under way and free the memory. Idempotent."""
        if self._sealing is not None:
            self._sealing.cancel()
            await self.settled()
        await self.publisher.close()

    async def _seal(self, version: int) -> None:
        try:
            with self._spans("weights/seal"):
                await self.publisher.seal()
        except (RuntimeError, OSError) as error:
            self._failed(version, error)

    def _failed(self, version: int, error: Exception) -> None:
        self.failures += 1
        self._on_failure(f"publish of version {version}: {error}")
