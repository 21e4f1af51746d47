"""Processes of this host by pid *and* start time: a pid alone may be another process's by now."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of this host; `start` is what `started` said of it."""

    pid: int
    start: str

    @property
    def alive(self) -> bool:
        return started(self.pid) == self.start

    def kill(self) -> None:
        """kill -9, unless it is gone already."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def process(pid: int) -> ProcessId | None:
    """The living process `pid` of this host, or None."""
    start = started(pid)
    return None if start is None else ProcessId(pid, start)


def started(pid: int) -> str | None:
    """When process `pid` of this host started, in a form that only compares; None when it does not run.

    Under Linux the boot id and the start in clock ticks (fields 3 and 22 of /proc/PID/stat are the state and the
    start time), elsewhere what `ps` says.
    """
    if not Path("/proc/self/stat").exists():
        asked = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=10, check=False
        )
        return asked.stdout.strip() or None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name, in parentheses, may hold spaces
    if fields[0] in "ZX":  # ended, its parent has not asked for the exit status
        return None
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {fields[19]}"
