"""Processes that a killed driver left: their pids are in the run folder, and the next driver ends them first."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from services.runs.atomic import write_atomic
from services.runs.lock import started
from services.weights.region import sweep_dead_regions

FILE = "pids.json"


def remember(run_dir: Path, pids: Iterable[int]) -> None:
    """Write down which processes belong to the run, each with its start time: a pid alone may be reused."""
    known = {str(pid): started(pid) for pid in pids}
    write_atomic(run_dir / FILE, json.dumps({pid: start for pid, start in known.items() if start}))


def end_leftovers(run_dir: Path, log: Callable[[str], None]) -> None:
    """kill -9 what is left of an earlier driver's processes on this host, and free their shared memory."""
    path = run_dir / FILE
    if path.exists():
        for pid, start in json.loads(path.read_text()).items():
            if started(int(pid)) == start:
                log(f"process {pid} is left from an earlier driver of this run: ending it")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for pid, start in json.loads(path.read_text()).items():
            until = time.monotonic() + 10.0
            while started(int(pid)) == start and time.monotonic() < until:
                time.sleep(0.05)
        path.unlink()
    for freed in sweep_dead_regions():
        log(f"freed {freed}")
