"""The actor that runs one replica of `MonarchExecutor`: a child process, its log, its exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol

from monarch.actor import concurrent_endpoint

from mesh.actor import MeshActor
from mesh.roles import Member, contract
from services.executors.base import entrypoint_command
from services.executors.child import ChildProcess
from services.executors.protocol import ReplicaSpec

# Of this proc, not of the machine: a replica may well be a Monarch program of its own, and must not take itself for us.
_OURS = ("HYPERACTOR_MESH_BOOTSTRAP_MODE", "HYPERACTOR_PROCESS_NAME", "MONARCH_CLIENT_TRACE_ID", "OMP_NUM_THREADS")


class ReplicaRunner(Member, Protocol):
    """Its `status` tells the `exit_code` of the replica, None while that runs."""

    @contract(15.0, retry=True)
    def read_log(self, offset: int) -> Awaitable[bytes]:
        """A part of the replica's log from `offset` on, empty at its end; a negative offset counts from the end."""
        ...


class ReplicaRunnerActor(MeshActor):
    """The replica is a process of its own: whatever it does, the actor answers. It ends with the actor's proc, though
    that be killed.
    """

    def __init__(self, name: str, spec: ReplicaSpec, rank: int, launch: str, log_path: str) -> None:
        super().__init__(name)
        command = entrypoint_command(spec, rank, launch, sys.executable)
        env = {**dict.fromkeys(_OURS), **spec.env}
        self.child = ChildProcess(command, env, Path(log_path), spec.grace_s, spec.limit_s)

    async def setup(self) -> None:
        await asyncio.to_thread(self.child.start)

    async def teardown(self) -> None:
        await asyncio.to_thread(self.child.end)

    def figures(self) -> dict[str, Any]:
        return {"exit_code": self.child.exit_code, "child": self.child.pid}

    @concurrent_endpoint
    async def read_log(self, offset: int) -> bytes:
        return await asyncio.to_thread(self.child.read, offset)
