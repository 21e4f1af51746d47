"""The actor that knows every binding, its generation and its health: the way into a live run.

Whoever holds its reference (`mesh.ref` in the run folder) can look at the run and leave commands; the driver publishes
its view and drains the commands once per beat. It owns no training state, so losing it loses nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from mesh.binding import RoleTable


@dataclass(slots=True)
class Command:
    """Something asked of the driver from outside: `stop`, `checkpoint`, …"""

    id: int
    name: str
    args: dict[str, Any] = field(default_factory=dict)


class Directory(Actor):
    def __init__(self, name: str, run: str) -> None:
        self.name, self.run = name, run
        self._tables: dict[str, RoleTable] = {}
        self._view: dict[str, Any] = {}
        self._ids = itertools.count(1)
        self._queue: list[Command] = []
        self._answers: dict[int, asyncio.Future[str]] = {}

    # ---- from outside --------------------------------------------------------------------------------------------

    @concurrent_endpoint
    async def view(self) -> dict[str, Any]:
        """The driver's last published view, the bindings, and this actor's pid."""
        bindings = {
            role: {
                "implementation": table.implementation,
                "generation": table.generation,
                "revision": table.revision,
                "members": [m.name for m in table.members],
            }
            for role, table in self._tables.items()
        }
        return {"run": self.run, "pid": os.getpid(), "bindings": bindings, **self._view}

    @concurrent_endpoint
    async def tables(self) -> dict[str, RoleTable]:
        """The live role tables, with the references to call every member."""
        return dict(self._tables)

    @concurrent_endpoint
    async def submit(self, name: str, args: dict[str, Any], limit_s: float) -> str:
        """Queue a command for the driver and wait for its answer. TimeoutError after `limit_s`.

        A command that the driver has not taken by then is withdrawn, and never carried out.
        """
        command = Command(next(self._ids), name, args)
        answer = asyncio.get_running_loop().create_future()
        self._answers[command.id] = answer
        self._queue.append(command)
        try:
            return await asyncio.wait_for(answer, limit_s)
        except TimeoutError:
            if command in self._queue:
                what = f"no driver took {name!r} within {limit_s:g} s, so it was withdrawn"
            else:
                what = f"the driver took {name!r} but did not answer within {limit_s:g} s"
            raise TimeoutError(f"{what}: is the driver of run {self.run} alive?") from None
        finally:
            self._answers.pop(command.id, None)
            self._queue = [other for other in self._queue if other.id != command.id]

    # ---- from the driver -----------------------------------------------------------------------------------------

    @concurrent_endpoint
    async def publish(self, tables: dict[str, RoleTable]) -> None:
        self._tables.update(tables)

    @concurrent_endpoint
    async def beat(self, view: dict[str, Any]) -> list[Command]:
        """Publish the driver's view and take the commands that came since the last beat."""
        self._view = view
        queue, self._queue = self._queue, []
        return queue

    @concurrent_endpoint
    async def answer(self, command_id: int, text: str) -> None:
        future = self._answers.get(command_id)
        if future is not None and not future.done():
            future.set_result(text)


class BadReference(ValueError):
    """The file does not lead to a directory; the message says why and what to do."""


def save_reference(directory: Any, path: Path) -> None:
    """Write the directory's reference, readable by its owner only: whoever has it can command the run."""
    aside = path.with_suffix(".tmp")
    aside.unlink(missing_ok=True)  # a left-over one would keep its mode
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        pickle.dump(directory, file)
    aside.replace(path)


def load_reference(path: Path) -> Any:
    """The directory of a live run, to call as `await directory.view.call_one()`.

    The file must be one that only its owner can read and write, because unpickling runs code: PermissionError
    otherwise. BadReference when it is no reference, FileNotFoundError when there is none.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())  # of what is read, whatever the path names by then
        if status.st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user; only the one who started the run can attach to it")
        if status.st_mode & 0o077:
            raise PermissionError(
                f"{path} can be read or written by others (mode {status.st_mode & 0o777:03o}); if you know that nobody "
                "changed it, `chmod 600` it"
            )
        data = file.read()
    try:
        directory = pickle.loads(data)
    except Exception as error:  # damaged pickles raise exceptions of any kind
        raise BadReference(f"{_no_reference(path)} ({type(error).__name__}: {' '.join(str(error).split())})") from error
    if not all(hasattr(directory, endpoint) for endpoint in ("view", "tables", "submit")):
        raise BadReference(f"{_no_reference(path)} (it holds a {type(directory).__name__})")
    return directory


def _no_reference(path: Path) -> str:
    return (
        f"{path} is not the reference of a live run; it is damaged or was written by another version, so remove it and "
        "resume the run, which writes it anew"
    )
