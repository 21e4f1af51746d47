"""The base of every actor of the mesh: it answers while it works.

All endpoints are concurrent, so a status call is never queued behind work. An actor's own loop is a task on its event
loop; whatever blocks (torch, files, imports) goes to a thread. Construction does nothing that can fail: `start` does,
so that its error reaches whoever placed the actor instead of killing it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import traceback
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from mesh.binding import Binding, MemberRef, RoleTable


class BusyClock:
    """Seconds during which at least one `with clock:` block was open; entered from the actor's event loop only."""

    def __init__(self) -> None:
        self._open = 0
        self._since = 0.0
        self._seconds = 0.0

    def __enter__(self) -> None:
        if self._open == 0:
            self._since = time.monotonic()
        self._open += 1

    def __exit__(self, *_: object) -> None:
        self._open -= 1
        if self._open == 0:
            self._seconds += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        return self._seconds + (time.monotonic() - self._since if self._open else 0.0)


class MeshActor(Actor):
    """Subclasses override `setup`, `run`, `teardown`, `figures`, `rebound`; `self.bindings` maps roles to bindings."""

    finish_limit_s = 15.0  # how long `finish` lets the loop come to its end before it is cancelled

    def __init__(self, name: str, roles: tuple[str, ...] = ()) -> None:
        self.name = name
        self.bindings: dict[str, Binding[Any]] = {role: Binding(role) for role in roles}
        self.rank = int(os.environ.get("RANK", 0))  # among the procs of the same place
        self.peers: tuple[MemberRef, ...] = ()  # the others, where this is the first of several
        self.failure: str | None = None
        self.finishing = asyncio.Event()
        self.busy = BusyClock()  # `with self.busy:` around work; how much it idles is shown by the run's progress
        self._born = time.monotonic()
        self._starting: asyncio.Task[None] | None = None
        self._loop_task: asyncio.Task[None] | None = None

    async def setup(self) -> None:
        """Load what the actor needs. An exception here is the actor's failure to start, told to whoever placed it."""

    async def run(self) -> None:
        """The actor's own loop; returns when `self.finishing` is set or its work is done."""

    async def teardown(self) -> None:
        """Release what is held (processes, shared memory, sockets)."""

    def figures(self) -> dict[str, Any]:
        """What this actor tells about itself in `status`; cheap, no waiting."""
        return {}

    def rebound(self, role: str) -> None:
        """Called when a newer table of `role` is held: members may have come or gone. Cheap, no waiting."""

    @concurrent_endpoint
    async def status(self) -> dict[str, Any]:
        running = self._loop_task is not None and not self._loop_task.done()
        return {
            "name": self.name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "uptime_s": time.monotonic() - self._born,
            "busy_s": self.busy.seconds,
            "running": running,
            "failure": self.failure,
            "bindings": {
                role: {
                    "revision": b.table.revision if b.table else -1,
                    "members": len(b.table.members) if b.table else 0,
                    "calls": b.counts.calls,
                    "errors": b.counts.errors,
                    "retries": b.counts.retries,
                    "seconds": b.counts.seconds,
                }
                for role, b in self.bindings.items()
            },
            **self.figures(),
        }

    @concurrent_endpoint
    async def bind(self, tables: dict[str, RoleTable]) -> None:
        for role, table in tables.items():
            if role in self.bindings and self.bindings[role].update(table):
                self.rebound(role)

    @concurrent_endpoint
    async def lead(self, peers: tuple[MemberRef, ...]) -> None:
        self.peers = peers

    @concurrent_endpoint
    async def start(self) -> None:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        await self.setup()
        self._loop_task = asyncio.create_task(self._guarded_run())

    async def _guarded_run(self) -> None:
        try:
            await self.run()
        except Exception as error:
            # A loop that ends by an error leaves the actor answering; the supervisor reads `failure` and replaces it.
            self.failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()

    @concurrent_endpoint
    async def finish(self) -> None:
        self.finishing.set()
        if self._loop_task is not None:
            _, pending = await asyncio.wait({self._loop_task}, timeout=self.finish_limit_s)
            for task in pending:
                task.cancel()
        await self.teardown()
