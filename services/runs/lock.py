"""One driver per run: a lock file that says who holds it.

Two drivers on one run would both write its metrics and both place its actors. The file holds the driver's pid, host
and start time: a pid alone may have been given to another process since. It is created by linking a file that is
already written, so nobody ever reads half of it. Whether a process on another host still lives cannot be known from
here; its lock is respected, and the error says which file to delete.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from mesh.processes import started
from services.runs.atomic import write_atomic

ATTEMPTS = 5  # each failure means that another driver came or went in between


class RunLock:
    """`with RunLock(run.lock):` holds the run. RuntimeError names the driver that holds it already."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._mine: str | None = None

    def acquire(self) -> None:
        """Take the lock, also from a dead process of this host."""
        mine = json.dumps(_this_process())
        aside = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.aside")
        write_atomic(aside, mine)
        try:
            for _ in range(ATTEMPTS):
                if _linked(aside, self.path) or self._took_over(aside):
                    self._mine = mine
                    return
        finally:
            aside.unlink(missing_ok=True)
        raise RuntimeError(f"{self.path} kept changing hands: other drivers are starting on this run; leave it to one")

    def release(self) -> None:
        """Give the lock back. A lock that somebody else holds by now stays."""
        if self._mine is not None and _read(self.path) == self._mine:
            self.path.unlink()
        self._mine = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _took_over(self, aside: Path) -> bool:
        """Replace the lock of a dead process by `aside`. False when the lock changed meanwhile."""
        held = _read(self.path)
        if held is None:
            return False  # its holder released it just now
        holder = _parse(held)
        if holder is not None and _may_live(holder):
            raise RuntimeError(
                f"the run is driven already by process {holder['pid']} on {holder['host']} since {holder['since']}: "
                f"stop that driver first; if it is known to be dead, delete {self.path}"
            )
        # Only who holds the marker may replace a stale lock, and looks again after getting it: of two drivers that
        # found the same stale lock, the late one would else replace the winner's.
        marker = self.path.with_name(f"{self.path.name}.takeover")
        if not _linked(aside, marker):
            raise RuntimeError(
                f"another driver is taking over this run's stale lock; if none is starting, delete {marker}"
            )
        try:
            if _read(self.path) != held:
                return False
            os.replace(aside, self.path)
            return True
        finally:
            marker.unlink()


def holder(path: str | Path) -> dict[str, Any] | None:
    """Who drives the run with this lock file: pid, host, start; None when nobody does, or a dead process."""
    held = _parse(_read(Path(path)) or "")
    return held if held is not None and _may_live(held) else None


def _linked(source: Path, name: Path) -> bool:
    """Whether `name` was free and is now the file `source`; one atomic step on local and network file systems."""
    try:
        os.link(source, name)
    except FileExistsError:
        return False
    return True


def _this_process() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": started(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def _parse(text: str) -> dict[str, Any] | None:
    """The holder; None for a text that no driver wrote, which is treated as stale."""
    try:
        holder = json.loads(text)
    except ValueError:
        return None
    return holder if isinstance(holder, dict) and {"pid", "host", "started", "since"} <= holder.keys() else None


def _may_live(holder: dict[str, Any]) -> bool:
    return holder["host"] != socket.gethostname() or started(int(holder["pid"])) == holder["started"]
