"""The driver's side of the directory: through it a live run is seen and commanded from other processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from mesh.binding import RoleTable
from mesh.directory import Directory, save_reference
from mesh.topology import Place, Placed, ProcSpec, fill
from services.runs.folder import RunFolder

Obey = Callable[[str], Awaitable[str]]  # a command's name -> the answer to whoever gave it


class Front:
    """Places the directory on `host`, and meets it once a beat. One that is lost is placed again: it owns nothing."""

    def __init__(self, run: RunFolder, host: Any, say: Callable[[str], None]) -> None:
        self.run, self.host, self.say = run, host, say
        self._placed: Placed | None = None

    async def open(self, view: dict[str, Any]) -> None:
        """The directory, and the reference through which `status`, `stop` and notebooks reach it."""
        await self._stop()
        log = str(self.run.logs / "directory.log")
        place = Place("directory", "directory", Directory, (self.run.name,), ProcSpec(log_path=log))
        self._placed = await asyncio.wait_for(fill(place, self.host, 0), 60.0)
        await asyncio.wait_for(self._placed.handle.beat.call_one(view), 30.0)
        save_reference(self._placed.handle, self.run.mesh_ref)

    async def beat(self, view: dict[str, Any], tables: dict[str, RoleTable], obey: Obey) -> None:
        """Show the run to whoever attached, and do what they asked for."""
        try:
            await self._meet(view, tables, obey)
        except Exception as error:  # Monarch's many kinds
            self.say(f"the directory is lost ({type(error).__name__}: {error}); placing it again")
            try:
                await self.open(view)
            except Exception as again:  # the run needs it for nothing: the next beat tries again
                self.say(f"the directory could not be placed ({type(again).__name__}: {again})")

    async def close(self) -> None:
        """Nobody reaches the run any more."""
        self.run.mesh_ref.unlink(missing_ok=True)
        await self._stop()

    async def _meet(self, view: dict[str, Any], tables: dict[str, RoleTable], obey: Obey) -> None:
        assert self._placed is not None
        directory = self._placed.handle
        await asyncio.wait_for(directory.publish.call_one(tables), 5.0)
        for command in await asyncio.wait_for(directory.beat.call_one(view), 5.0):
            answer = await obey(command.name)
            await asyncio.wait_for(directory.answer.call_one(command.id, answer), 5.0)

    async def _stop(self) -> None:
        if self._placed is not None:
            with contextlib.suppress(Exception):  # it may be gone already, and only that matters
                await asyncio.wait_for(self._placed.procs.stop(), 20.0)
            self._placed = None
