"""The buffer's events on disk: append-only segments, one checksummed JSON record a line.

A segment is `segment-<sequence>-step-<frontier>.jsonl`. It starts with a snapshot of the buffer's state, written aside
and renamed so that it is whole or not there, and grows by one `os.write` per event, which a killed process cannot undo.
Only the last record can be torn; it is cut when the folder is opened again. The newest segment alone restores the
state; older ones serve a rewind to an earlier step and are deleted when no rewind may go back that far.

    prelude | Snapshot … SnapshotEnd | event | event | …

The prelude holds the event that led from the segment before to this snapshot, when that event began the segment.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from services.rollouts.events import Event, Snapshot, SnapshotEnd, decode, encode

SEGMENTS = "segment-*.jsonl"


class JournalError(RuntimeError):
    """The journal's folder cannot be used; the message says which file and what to do."""


class Journal:
    """One process owns a journal's folder at a time. JournalError when another one still does after `lock_wait_s`."""

    def __init__(self, folder: Path, lock_wait_s: float = 5.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.cut_bytes = 0  # torn bytes cut from the newest segment
        self._file: int | None = None
        self._lock: int | None = _locked(folder / "lock", lock_wait_s)
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()

    @property
    def segments(self) -> list[Path]:
        """Every segment, the oldest first."""
        return sorted(self.folder.glob(SEGMENTS))

    def restore(self) -> list[Event]:
        """Snapshot and events of the newest segment, its torn tail cut off; [] for a new folder."""
        if not self.segments:
            return []
        newest = self.segments[-1]
        events, whole = _read(newest)
        self.cut_bytes = newest.stat().st_size - whole
        os.truncate(newest, whole)
        self._file = os.open(newest, os.O_WRONLY | os.O_APPEND)
        _, snapshot, later = _parts(events)
        return snapshot + later

    def history(self, step: int) -> Iterator[Event]:
        """Snapshot and events from the newest segment that started at a frontier <= `step` until now.

        ValueError when the segments do not go back that far.
        """
        starts = [number for number, path in enumerate(self.segments) if _frontier(path) <= step]
        if not starts:
            oldest = min(map(_frontier, self.segments), default=0)
            raise ValueError(
                f"the journal in {self.folder} goes back to step {oldest}, not to {step}; "
                "load the buffer's file from that step's checkpoint instead"
            )
        yield from _course(self.segments[starts[-1] :])

    def append(self, event: Event) -> None:
        if self._file is None:
            raise JournalError(f"the journal in {self.folder} is closed; open the buffer again before using it")
        size = os.fstat(self._file).st_size
        try:
            _write_all(self._file, _frame(event))
        except OSError as error:
            # Half a record would damage every one after it.
            os.ftruncate(self._file, size)
            raise JournalError(
                f"cannot write to the journal in {self.folder}: {error}; make room, then try again"
            ) from error

    def start_segment(self, snapshot: Iterable[Event], frontier: int, prelude: Iterable[Event] = ()) -> None:
        """Begin a new segment with `snapshot`; on disk for good when this returns."""
        sequence = int(self.segments[-1].name.split("-")[1]) + 1 if self.segments else 0
        path = self.folder / f"segment-{sequence:06d}-step-{frontier:08d}.jsonl"
        write_events(path, [*prelude, *snapshot, SnapshotEnd()])
        if self._file is not None:
            os.close(self._file)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def forget_before(self, step: int) -> None:
        """Delete the segments that no rewind to `step` or later needs."""
        starts = [number for number, path in enumerate(self.segments) if _frontier(path) <= step]
        for path in self.segments[: starts[-1] if starts else 0]:
            path.unlink()

    def keep_newest(self) -> None:
        """Delete every segment but the newest."""
        for path in self.segments[:-1]:
            path.unlink()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Write a file of records that is whole or not there."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as file:
        for event in events:
            file.write(_frame(event))
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    # The rename itself is durable only once the folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def course(folder: Path) -> Iterator[Event]:
    """Everything that a journal's folder still tells, oldest first, beginning with a snapshot. Needs no lock.

    FileNotFoundError when no journal is there, JournalError for damage that is not a torn tail.
    """
    segments = sorted(folder.glob(SEGMENTS))
    if not segments:
        raise FileNotFoundError(f"no rollout buffer's journal in {folder}: it ended before it began")
    yield from _course(segments)


def read_events(path: Path) -> list[Event]:
    """The records of a file written by `write_events`. JournalError when it is torn or damaged."""
    events, whole = _read(path)
    if whole != path.stat().st_size:
        raise JournalError(f"{path} ends in the middle of a record; use an earlier checkpoint")
    return events


def _course(segments: Sequence[Path]) -> Iterator[Event]:
    for number, path in enumerate(segments):
        prelude, snapshot, later = _parts(_read(path)[0])
        # Only the first snapshot is needed: the others repeat what the events before them led to.
        yield from [*prelude, *later] if number else [*snapshot, *later]


def _read(path: Path) -> tuple[list[Event], int]:
    """The whole records of a file and the bytes they fill. JournalError for damage that is not a torn tail."""
    events: list[Event] = []
    whole = 0
    damaged_at: int | None = None
    with path.open("rb") as file:
        for line in file:
            payload = _unframe(line)
            if payload is None:
                damaged_at = whole if damaged_at is None else damaged_at
            elif damaged_at is not None:
                raise JournalError(
                    f"{path} is damaged at byte {damaged_at}, with whole records after it; restore a copy"
                )
            else:
                events.append(decode(payload))
                whole += len(line)
    return events, whole


def _frame(event: Event) -> bytes:
    payload = encode(event)
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


def _unframe(line: bytes) -> bytes | None:
    payload = line[9:-1]
    return payload if line.endswith(b"\n") and line[:9] == b"%08x " % zlib.crc32(payload) else None


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _frontier(path: Path) -> int:
    return int(path.stem.rsplit("-", 1)[1])


def _parts(events: list[Event]) -> tuple[list[Event], list[Event], list[Event]]:
    """A segment's prelude, snapshot and later events."""
    kinds = [type(event) for event in events]
    start, end = kinds.index(Snapshot), kinds.index(SnapshotEnd)
    return events[:start], events[start:end], events[end + 1 :]


def _locked(path: Path, wait_s: float) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                os.close(file)
                raise JournalError(f"another process keeps a buffer in {path.parent}; stop it first") from error
            time.sleep(0.05)
