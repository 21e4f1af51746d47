"""What to do when an actor dies or hangs: notice it, fill its place again, and give up when that does not help.

One watch per member asks for its status every `heartbeat_s`. A dead process fails that call at once (Monarch's
supervision); a stopped or stuck one is noticed by silence, because Monarch does not see it. Either way the member is
taken out of its role's table, its proc is stopped, its place is filled again and every holder of the role is told.
`RestartPolicy` bounds this: a role that keeps dying ends the run with that role's own error.

    watch ──status──▶ member      ok: health[name] = answer
      │ dead | hung | its loop failed
      ▼
    retire (table without it → holders) → kill, stop procs → policy ──▶ RoleKeepsDying
      ▼
    fill → bind(all tables) → start → table with it → holders
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import monarch.actor
from pydantic import BaseModel, ConfigDict, Field

from mesh.binding import Binding, BindingError, MemberDied, RoleTable
from mesh.roles import Member
from mesh.topology import Place, Placed, fill, tail


class SupervisionConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    heartbeat_s: float = Field(1.0, gt=0, description="Seconds between two status calls to each actor.")
    hang_s: float = Field(
        20.0, gt=0, description="An actor silent for this long is taken for hung, killed and replaced."
    )
    max_restarts: int = Field(4, ge=0, description="Deaths of one actor within the window that end the run.")
    window_s: float = Field(300.0, gt=0, description="The window over which deaths are counted, seconds.")
    start_s: float = Field(180.0, gt=0, description="Limit for one actor to start (it may load a model), seconds.")


class RoleKeepsDying(Exception):
    """A member died more often than the policy allows. The message holds the last reason and the tail of its log."""


class StartFailed(Exception):
    """A member could not start. The message says why."""


class RestartPolicy:
    """Allows `max_restarts` deaths within any `window_s` seconds."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts, self.window_s = max_restarts, window_s
        self._deaths: list[float] = []

    def allows_restart(self, now: float) -> bool:
        """Count a death at `now`; True when the place may be filled again."""
        self._deaths = [t for t in self._deaths if now - t < self.window_s] + [now]
        return len(self._deaths) <= self.max_restarts


def install_fault_hook(log: Callable[[str], None]) -> None:
    """Take over Monarch's hook for unhandled faults: its default ends the process, and the watches handle deaths."""

    def hook(failure: Any) -> None:
        log(" ".join(str(failure).split())[:300])

    monarch.actor.unhandled_fault_hook = hook


class Supervisor:
    """Owns every place of a run. Called from one event loop (the driver's)."""

    def __init__(self, host: Any, config: SupervisionConfig, log: Callable[[str], None] = print) -> None:
        self.host, self.config, self.log = host, config, log
        self.placed: dict[str, Placed] = {}
        self.tables: dict[str, RoleTable] = {}
        self.health: dict[str, dict[str, Any]] = {}
        self.deaths: dict[str, int] = {}  # by role, for the metrics
        self.listeners: list[Callable[[RoleTable], Any]] = []  # told of every new table (the directory)
        self._policies: dict[str, RestartPolicy] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    # ---- placing -------------------------------------------------------------------------------------------------

    async def place(self, places: list[Place]) -> None:
        """Fill all places, tell everybody of everybody, then start them in the order given, equal roles together."""
        filled = await asyncio.gather(*[fill(place, self.host, 0) for place in places])
        self.placed.update({placed.place.name: placed for placed in filled})
        await asyncio.gather(
            *[self._ask(p.place.name, Member.status, self.config.start_s) for p in self.placed.values()]
        )
        for role in dict.fromkeys(place.role for place in places):
            members = tuple(self.placed[p.name].ref for p in places if p.role == role)
            self._set_table(RoleTable(role, members, implementation=self.placed[members[0].name].place.actor.__name__))
        await asyncio.gather(*[self._ask(p.name, Member.bind, 30.0, self.tables) for p in places])
        for role in dict.fromkeys(place.role for place in places):
            await asyncio.gather(*[self._start(place) for place in places if place.role == role])

    async def _start(self, place: Place) -> None:
        try:
            await self._ask(place.name, Member.start, self.config.start_s)
        except BindingError as error:
            cause = getattr(error, "cause", str(error))
            raise StartFailed(f"{place.name} did not start: {cause}") from None

    async def _ask(self, name: str, endpoint: Any, limit_s: float, *args: Any) -> Any:
        """One call to one member, not to its role."""
        one = Binding[Member](name, RoleTable(name, (self.placed[name].ref,)), patience_s=0)
        return await one.call_within(limit_s, endpoint, *args)

    # ---- watching ------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Watch every member until cancelled. Raises RoleKeepsDying or StartFailed."""
        self._watches = {name: asyncio.create_task(self._watch(name)) for name in self.placed}
        try:
            done, _ = await asyncio.wait(self._watches.values(), return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in self._watches.values():
                task.cancel()
            await asyncio.gather(*self._watches.values(), return_exceptions=True)

    async def _watch(self, name: str) -> None:
        heard = time.monotonic()
        while True:
            await asyncio.sleep(self.config.heartbeat_s)
            asked = time.monotonic()
            try:
                answer = await self._ask(name, Member.status, min(5.0, self.config.hang_s))
                heard, reason = time.monotonic(), answer["failure"]
                self.health[name] = {
                    **answer,
                    "answered_in_s": heard - asked,
                    "heard": time.time(),
                    "incarnation": self.placed[name].incarnation,
                }
            except BindingError as error:
                silent = time.monotonic() - heard
                hung = silent >= self.config.hang_s
                reason = str(error) if isinstance(error, MemberDied) else f"silent for {silent:.0f} s" if hung else None
            if reason:
                await self._replace(name, reason)
                heard = time.monotonic()

    async def _replace(self, name: str, reason: str) -> None:
        old = self.placed[name]
        role = old.place.role
        self.log(f"{name} is lost ({reason}); placing it again")
        self.deaths[role] = self.deaths.get(role, 0) + 1
        await self._retire(name)
        policy = self._policies.setdefault(name, RestartPolicy(self.config.max_restarts, self.config.window_s))
        while policy.allows_restart(time.monotonic()):
            incarnation = self.placed[name].incarnation + 1
            try:
                self.placed[name] = await fill(old.place, self.host, incarnation)
                await self._ask(name, Member.bind, self.config.start_s, self.tables)
                await self._start(old.place)
            except (StartFailed, BindingError) as error:
                reason = str(error)
                self.log(f"{name} could not be placed again ({reason})")
                self.deaths[role] += 1
                await self._retire(name)
                continue
            table = self.tables[role]
            await self._announce(RoleTable(role, (*table.members, self.placed[name].ref), table.generation,
                                           table.revision + 1, table.implementation))  # fmt: skip
            self.log(f"{name} is back (incarnation {incarnation})")
            return
        logged = tail(old.place.proc.log_path)
        raise RoleKeepsDying(
            f"{name} died {self.config.max_restarts + 1} times within {self.config.window_s:.0f} s; last: {reason}"
            + (f"\n--- end of its log ({old.place.proc.log_path}) ---\n{logged}" if logged else "")
        )

    async def _retire(self, name: str) -> None:
        """Take a member out of its table and make sure that its process is gone before its place is filled again."""
        placed, table = self.placed[name], self.tables[self.placed[name].place.role]
        left = tuple(m for m in table.members if m.name != name)
        await self._announce(RoleTable(table.role, left, table.generation, table.revision + 1, table.implementation))
        _kill(self.health.pop(name, None))
        await _stop_procs(placed, self.log)

    async def _announce(self, table: RoleTable) -> None:
        """A new table: to every member (the dead are not waited for) and to the listeners."""
        self._set_table(table)
        living = [m.name for t in self.tables.values() for m in t.members]
        told = await asyncio.gather(
            *[self._ask(name, Member.bind, 5.0, {table.role: table}) for name in living], return_exceptions=True
        )
        # A holder that could not be told is dead or hung: its own watch replaces it, and it is bound anew then.
        for name, result in zip(living, told, strict=True):
            if isinstance(result, BaseException):
                self.log(f"{name} was not told of the new {table.role}: {result}")

    def _set_table(self, table: RoleTable) -> None:
        self.tables[table.role] = table
        for listener in self.listeners:
            listener(table)

    # ---- ending --------------------------------------------------------------------------------------------------

    async def finish(self, *finishing: str) -> None:
        """Let these roles end in an orderly way, one after the other; bounded, and what fails is logged."""
        for role in finishing:
            names = [m.name for m in self.tables[role].members] if role in self.tables else []
            self.log(f"ending {', '.join(names) or f'no {role}'}")
            limits = [self.placed[name].place.actor.finish_limit_s + 15.0 for name in names]
            ended = await asyncio.gather(
                *[self._ask(name, Member.finish, limit) for name, limit in zip(names, limits, strict=True)],
                return_exceptions=True,
            )
            for name, result in zip(names, ended, strict=True):
                if isinstance(result, BaseException):
                    self.log(f"{name} did not end by itself: {result}")

    async def stop(self) -> None:
        """Stop all procs. What does not stop in time is killed."""
        self.log("stopping all procs")
        await asyncio.gather(*[_stop_procs(placed, self.log) for placed in self.placed.values()])
        for name in list(self.health):
            _kill(self.health.pop(name))
        self.placed.clear()


def _kill(health: dict[str, Any] | None) -> None:
    """kill -9 of a member on this host that was last heard with this pid: a hung one does not stop when asked."""
    if health and health["host"] == socket.gethostname():
        with contextlib.suppress(ProcessLookupError):
            os.kill(health["pid"], signal.SIGKILL)


async def _stop_procs(placed: Placed, log: Callable[[str], None]) -> None:
    try:
        await asyncio.wait_for(placed.procs.stop(), 20.0)
    except Exception as error:  # Monarch raises many kinds here, and what matters is only that the proc is gone
        print(f"stopping {placed.place.name}: {type(error).__name__}: {error}", file=sys.stderr)
