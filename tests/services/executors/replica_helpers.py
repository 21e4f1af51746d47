"""Waiting for replicas and their processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mesh.processes import started
from services.executors import ReplicaSpec

LIMIT_S = 200.0  # of every wait: none takes long, but machines are slow at times


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s in vain until {what}"
        time.sleep(0.05)


def spec(store: Path, function: str, world_size: int = 1, **more: Any) -> ReplicaSpec:
    store.mkdir(exist_ok=True)
    return ReplicaSpec(f"replica_targets:{function}", world_size, str(store), **more)


def pids_of(store: Path, rank: int = 0) -> list[int]:
    file = store / f"pids-{rank}"
    wait_until(file.exists, f"replica {rank} is up")
    return [int(pid) for pid in file.read_text().split()]


def all_gone(pids: list[int]) -> bool:
    return all(started(pid) is None for pid in pids)


def stream_three_lines(executor: Any, store: Path) -> None:
    """A replica's log reaches its reader line by line: each is asked for only when the one before was read."""
    executor.launch_replicas(spec(store, "count"))
    lines = executor.stream_logs(0)
    for i in range(3):
        (store / f"go-{i}").touch()
        assert next(lines) == f"line {i}"
    assert list(lines) == []
