"""What a killed driver left: processes, which the run folder names, and files that it was writing.

The next driver of the run ends the ones and removes the others before it does anything else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mesh.processes import ProcessId
from services.runs.atomic import write_atomic
from services.weights.region import sweep_dead_regions

FILE = "pids.json"
LIMIT_S = 10.0
WRITTEN = ("config.toml", "metrics.jsonl", "status.json", FILE)  # by `write_atomic`


def remember(run_dir: Path, processes: Iterable[ProcessId | None]) -> None:
    """Write down which processes of this host belong to the run."""
    write_atomic(run_dir / FILE, json.dumps({each.pid: each.start for each in processes if each is not None}))


def end_leftovers(run_dir: Path, log: Callable[[str], None]) -> None:
    """kill -9 what is left of an earlier driver on this host, free its shared memory, remove its half-written files."""
    path = run_dir / FILE
    known = json.loads(path.read_text()) if path.exists() else {}
    left = [each for each in (ProcessId(int(pid), start) for pid, start in known.items()) if each.alive]
    for each in left:
        log(f"process {each.pid} is left from an earlier driver of this run: ending it")
        each.kill()
    until = time.monotonic() + LIMIT_S
    while any(each.alive for each in left) and time.monotonic() < until:
        time.sleep(0.05)
    path.unlink(missing_ok=True)
    for freed in sweep_dead_regions():
        log(f"freed {freed}")
    # Files of the run as a whole are written by its driver alone, and that is the caller, who holds the run's lock.
    for half in (path for name in WRITTEN for path in run_dir.glob(f".{name}.*.aside")):
        half.unlink()
