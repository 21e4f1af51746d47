"""Replicas as processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from services.executors.base import FileLogExecutor, entrypoint_command
from services.executors.child import ChildProcess
from services.executors.protocol import ReplicaSpec, ReplicaStatus


class LocalProcessExecutor(FileLogExecutor):
    """The replicas end with this process, however it ends. `logs`: the folder of their logs, `replica-R.log`."""

    poll_s = 0.1

    def __init__(self, logs: str | Path) -> None:
        super().__init__()
        self.logs = Path(logs).expanduser().absolute()
        self._children: dict[int, ChildProcess] = {}

    def pid(self, rank: int) -> int | None:
        """Of the replica's guard, which ends with it and takes it along when it is killed."""
        return self._children[rank].pid

    def _start(self, rank: int, spec: ReplicaSpec, launch: str) -> None:
        command = entrypoint_command(spec, rank, launch, sys.executable)
        child = ChildProcess(command, spec.env, self.logs / f"replica-{rank}.log", spec.grace_s, spec.limit_s)
        self._children[rank] = child
        child.start()

    def _look(self, rank: int) -> ReplicaStatus:
        child = self._children[rank]
        code = child.exit_code
        if code is None:
            return ReplicaStatus(rank, "running")
        child.settle()
        return ReplicaStatus(rank, "failed" if code else "succeeded", code)

    def _end(self, rank: int) -> None:
        self._children[rank].end()

    def _read_log(self, rank: int, offset: int) -> bytes:
        return self._children[rank].read(offset)
