"""Where the time goes: named spans, whose name is also the metric.

    with spans("trainer/forward"):                      # an actor at work
        ...
    with spans("trainer/wait_batch", waiting=True):     # an actor that waits for another one
        ...
    idle = spans.idle_share("trainer")                  # before the drain, which begins a new interval
    metrics = spans.drain()                             # {"trainer/forward": 1.3, "trainer/wait_batch": 0.4}

Names are paths: time inside "trainer/forward" is also time inside "trainer". An actor runs many spans at once, so two
figures are kept per name: the seconds of its own spans added up (what `drain` reports), and the seconds in which at
least one span of it or under it was open (what `idle_share` needs). Both are integrals of the number of open spans
over time, brought up to date whenever that number changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Meter:
    """Integrals over one name since the last drain, valid as of `since`."""

    since: float
    open: int = 0  # spans of this very name
    active: int = 0  # spans that keep this name busy: its own and those under it
    total: float = 0.0  # seconds of its own spans, overlapping ones counted each
    covered: float = 0.0  # seconds with at least one span active

    def advance(self, now: float) -> None:
        elapsed = now - self.since
        self.total += self.open * elapsed
        self.covered += elapsed if self.active else 0.0
        self.since = now


class Spans:
    """The spans of one actor. Any thread and any asyncio task may open them.

    `clock` gives seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._meters: dict[str, _Meter] = {}
        self._drained_at = clock()

    @contextmanager
    def __call__(self, name: str, *, waiting: bool = False) -> Iterator[None]:
        """Time a block; also a decorator of plain functions (inside a coroutine use `with`).

        A `waiting` span is reported like any other but keeps no longer name's owner busy: put it beside the spans of
        work, not inside one of them (or in a block for which that one is `interrupted`).
        """
        names = [name] if waiting else _with_parents(name)
        self._change(names, +1)
        try:
            yield
        finally:
            self._change(names, -1)

    @contextmanager
    def interrupted(self, name: str) -> Iterator[None]:
        """Close the open span `name` for a block in which its owner waits; the block has a waiting span of its own."""
        names = _with_parents(name)
        self._change(names, -1)
        try:
            yield
        finally:
            self._change(names, +1)

    def drain(self) -> dict[str, float]:
        """Seconds by span name since the last drain.

        A span that is still open gives what it has so far; the rest falls into the next interval. Names are reported
        as long as they have spent time.
        """
        with self._lock:
            now = self._advance_all()
            seconds = {name: m.total for name, m in sorted(self._meters.items()) if m.total > 0.0}
            self._meters = {
                name: _Meter(since=now, open=m.open, active=m.active) for name, m in self._meters.items() if m.active
            }
            self._drained_at = now
            return seconds

    def idle_share(self, name: str) -> float:
        """Share (0 to 1) of the time since the last drain in which no span `name`, or `name/...`, was open.

        1.0 for a name that never ran, 0.0 when no time has passed. Waiting spans count under their full name only.
        """
        with self._lock:
            now = self._advance_all()
            elapsed = now - self._drained_at
            meter = self._meters.get(name)
            covered = meter.covered if meter else 0.0
            return max(0.0, 1.0 - covered / elapsed) if elapsed > 0 else 0.0

    def _change(self, names: list[str], by: int) -> None:
        with self._lock:
            now = self._clock()
            for name in names:
                meter = self._meters.setdefault(name, _Meter(since=now))
                meter.advance(now)
                meter.active += by
            self._meters[names[0]].open += by

    def _advance_all(self) -> float:
        now = self._clock()
        for meter in self._meters.values():
            meter.advance(now)
        return now


def _with_parents(name: str) -> list[str]:
    """["a/b/c", "a/b", "a"] for "a/b/c"."""
    parts = name.split("/")
    return ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
