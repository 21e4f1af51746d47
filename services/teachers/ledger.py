"""The teachers' account book: an append-only JSONL file that outlives the process.

Two lines per paid attempt, each forced to disk. `start` is written before a request is sent and holds its worst case;
`end` holds the outcome. A `start` without an `end` is a call whose outcome nobody knows (the process was killed, the
task cancelled): it counts as spent at its worst case and is not sent again unless the caller allows it.

The file is the truth, not the process: each operation takes the file's lock and first reads what others appended. So
during a hot swap the old and the new teacher pool share one budget and one set of answers. All state changes go through
`_apply`, whether a line was just written here, by another process, or by an earlier run.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from services.runs.atomic import sync
from services.teachers.budget import Budget

logger = logging.getLogger(__name__)

# started: sent, and not ended as far as the book knows. answered: there is a text. unusable: the server replied and
# charged, but there is no usable text. refused: the server did not do the work, nothing is charged. unknown: sent, and
# no reply came.
Outcome = Literal["started", "answered", "unusable", "refused", "unknown"]


class LedgerError(Exception):
    """The ledger cannot be read or written, so no money may be spent."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One call as the ledger knows it. `cost_usd` is the worst case until the outcome is known."""

    id: str
    key: str
    teacher: str
    outcome: Outcome
    cost_usd: float
    text: str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    new: bool = False  # made by this very `begin`: send the request, then `end` it


class Ledger:
    """Opens (or makes) the file at `path` and restores the budget's spend from it.

    Raises LedgerError when the file holds a damaged line, or stays locked for `lock_wait_s` seconds. A last line that
    was cut short by a crash is removed, reported in the log and counted in `torn_lines`.
    """

    def __init__(self, path: Path | str, budget: Budget, *, lock_wait_s: float = 10.0) -> None:
        self.path = Path(path)
        self.budget = budget
        self.torn_lines = 0
        self._lock_wait_s = lock_wait_s
        self._thread_lock = threading.Lock()
        self._by_id: dict[str, Entry] = {}
        self._by_key: dict[str, Entry] = {}
        self._offset = 0  # bytes of the file that were applied; always the end of a whole line
        self._lines = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            sync(self.path.parent)
            with self._exclusive():
                self._catch_up()
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Close the file. Nothing is pending: each line was on disk when its call returned."""
        with self._thread_lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def find(self, key: str, *, repeat_unknown: bool = False) -> Entry | None:
        """What makes asking again needless or unwise: the answer, or a call that may have been paid. Reads no file."""
        entry = self._by_key.get(key)
        if entry is None or entry.outcome == "refused":
            return None
        if entry.outcome in ("started", "unknown") and repeat_unknown:
            return None
        return entry

    def begin(
        self, key: str, *, teacher: str, model: str, state_id: str, worst_usd: float, repeat_unknown: bool = False
    ) -> Entry:
        """Reserve `worst_usd` and put the start on disk. When it returns an entry with `new`, the request may be sent.

        Otherwise the entry is an earlier call with this key that must not be repeated. Raises BudgetExceeded when the
        worst case does not fit, LedgerError when the line cannot be written.
        """
        with self._exclusive():
            self._catch_up()
            earlier = self.find(key, repeat_unknown=repeat_unknown)
            if earlier is not None:
                return earlier
            self.budget.check(worst_usd)
            entry_id = uuid.uuid4().hex
            self._append(
                {
                    "event": "start",
                    "id": entry_id,
                    "key": key,
                    "teacher": teacher,
                    "model": model,
                    "state_id": state_id,
                    "worst_usd": worst_usd,
                    "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
                }
            )
            return replace(self._by_id[entry_id], new=True)

    def end(
        self,
        entry: Entry,
        outcome: Outcome,
        *,
        cost_usd: float,
        text: str | None = None,
        error: str | None = None,
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Put the outcome of a call on disk and settle its reservation at `cost_usd`."""
        with self._exclusive():
            self._catch_up()
            self._append(
                {
                    "event": "end",
                    "id": entry.id,
                    "outcome": outcome,
                    "cost_usd": cost_usd,
                    "text": text,
                    "error": error,
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": completion_tokens,
                    "seconds": round(seconds, 3),
                }
            )

    def _apply(self, record: dict[str, Any]) -> None:
        if record["event"] == "start":
            entry = Entry(record["id"], record["key"], record["teacher"], "started", record["worst_usd"])
            self.budget.hold(entry.id, entry.cost_usd)
        else:
            entry = replace(
                self._by_id[record["id"]],
                outcome=record["outcome"],
                cost_usd=record["cost_usd"],
                text=record["text"],
                error=record["error"],
                prompt_tokens=record["prompt_tokens"],
                completion_tokens=record["completion_tokens"],
            )
            self.budget.settle(entry.id, entry.cost_usd)
        self._by_id[entry.id] = entry
        # Of several calls with one key (a refused one asked again, a repeated unknown one) an answer counts most.
        known = self._by_key.get(entry.key)
        if known is None or known.outcome not in ("answered", "unusable") or known.id == entry.id:
            self._by_key[entry.key] = entry

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes were written (is the disk full?)")
            os.fsync(self._fd)
        except OSError as error:
            # What was written of the line is a torn tail now; the next operation removes it.
            raise LedgerError(f"cannot write {self.path}: {error}; free the disk or choose another ledger") from error
        self._catch_up()

    def _catch_up(self) -> None:
        """Apply the lines after `_offset`. The lock is held, so a tail without a newline belongs to a dead writer."""
        size = os.fstat(self._fd).st_size
        if size == self._offset:
            return
        if size < self._offset:
            raise LedgerError(f"{self.path} became shorter while in use: stop whoever edits it and start again")
        data = b""
        while len(data) < size - self._offset:
            chunk = os.pread(self._fd, size - self._offset - len(data), self._offset + len(data))
            if not chunk:
                break
            data += chunk
        *whole_lines, tail = data.split(b"\n")
        for line in whole_lines:
            self._lines += 1
            try:
                self._apply(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise LedgerError(
                    f"line {self._lines} of {self.path} is damaged ({type(error).__name__}: {error}): what was spent "
                    "cannot be known; repair the line, or move the file away and lower max_total_usd by what it spent"
                ) from error
            self._offset += len(line) + 1
        if tail:
            self.torn_lines += 1
            logger.warning(
                "the last line of %s was cut short by a crash; %d bytes removed, the call counts as of unknown outcome",
                self.path,
                len(tail),
            )
            os.ftruncate(self._fd, self._offset)
            os.fsync(self._fd)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the ledger against other threads and, through the file's lock, against other processes."""
        with self._thread_lock:
            if self._fd < 0:
                raise LedgerError(f"{self.path} is closed: open a new Ledger")
            give_up = time.monotonic() + self._lock_wait_s
            while True:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > give_up:
                        raise LedgerError(
                            f"{self.path} is locked by another process for more than {self._lock_wait_s:g} s: "
                            "stop that process or use another ledger"
                        ) from error
                    time.sleep(0.005)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
