"""What to do when an actor dies or hangs: notice it, fill its place again, and give up when that does not help.

One watch per member looks at its process and asks for its status, every `heartbeat_s`. A stopped or stuck process is
noticed by its silence, because Monarch does not see it. A lost member is taken out of its role's table, its proc is
stopped, its place is filled again and every holder of the role is told. A holder that missed a change is told at its
next heartbeat. `RestartPolicy` bounds this: a role that keeps dying ends the run with that role's own error.

    watch ──process? status──▶ member      ok: health[name] = answer, tables it missed
      │ gone | dead | silent | its loop failed
      ▼
    retire (table without it → holders) → kill, stop procs → policy ──▶ RoleKeepsDying
      ▼
    fill → bind(all tables) → start → table with it → holders
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import monarch.actor
from pydantic import BaseModel, ConfigDict, Field

from mesh.binding import Binding, BindingError, MemberDied, RemoteFailure, RoleTable
from mesh.processes import ProcessId, process
from mesh.roles import Member
from mesh.topology import Place, Placed, fill, tail


class SupervisionConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    heartbeat_s: float = Field(1.0, gt=0, description="Seconds between two status calls to each actor.")
    hang_s: float = Field(
        20.0, gt=0, description="An actor silent for this long is taken for hung, killed and replaced."
    )
    max_restarts: int = Field(4, ge=0, description="Deaths of one actor in a row after which the run is ended.")
    window_s: float = Field(300.0, gt=0, description="Living this long, in seconds, clears an actor's count of deaths.")
    start_s: float = Field(180.0, gt=0, description="Limit for one actor to start (it may load a model), seconds.")


STATUS_LIMIT_S = 2.0  # for one status call: a member that is only busy answers the next one


class RoleKeepsDying(Exception):
    """A member died more often than the policy allows. The message holds the last reason and the tail of its log."""


class StartFailed(Exception):
    """A member could not start. The message says why."""


class RestartPolicy:
    """Allows `max_restarts` deaths in a row; one that comes after `window_s` seconds of life begins a new row.

    A row and not a rate: a member that needs minutes to fail would never reach a limit per time.
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts, self.window_s = max_restarts, window_s
        self.deaths = 0

    def allows_restart(self, lived_s: float) -> bool:
        """Count a death after `lived_s` seconds of life (0: it did not start); True to fill the place again."""
        self.deaths = 1 if lived_s >= self.window_s else self.deaths + 1
        return self.deaths <= self.max_restarts


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
        self.processes: dict[str, ProcessId | None] = {}  # by member, those on this host
        self._policies: dict[str, RestartPolicy] = {}

    # ---- placing -------------------------------------------------------------------------------------------------

    async def place(self, places: list[Place]) -> None:
        """Fill all places, tell everybody of everybody, then start them in the order given, equal roles together.

        Raises StartFailed, with the end of its log where a process died.
        """
        await asyncio.gather(*[self._fill(place, 0) for place in places])
        for role in dict.fromkeys(place.role for place in places):
            members = tuple(self.placed[p.name].ref for p in places if p.role == role)
            self._set_table(RoleTable(role, members, implementation=self.placed[members[0].name].place.actor.__name__))
        for role in dict.fromkeys(place.role for place in places):
            await asyncio.gather(*[self._start(place) for place in places if place.role == role])

    async def _fill(self, place: Place, incarnation: int) -> None:
        """Fill a place, and know its process from then on: it may have to be killed before it ever answers again."""
        try:
            self.placed[place.name] = await asyncio.wait_for(fill(place, self.host, incarnation), self.config.start_s)
            answer = await self._ask(place.name, Member.status, self.config.start_s)
        except TimeoutError:
            raise StartFailed(f"{place.name} has no process after {self.config.start_s:g} s") from None
        except BindingError as error:
            raise StartFailed(_why(place, error)) from None
        if answer["host"] == socket.gethostname():
            self.processes[place.name] = process(answer["pid"])

    async def _start(self, place: Place) -> None:
        try:
            await self._ask(place.name, Member.bind, 30.0, self.tables)
            await self._ask(place.name, Member.start, self.config.start_s)
        except BindingError as error:
            raise StartFailed(_why(place, error)) from None

    async def _ask(self, name: str, endpoint: Any, limit_s: float, *args: Any) -> Any:
        """One call to one member, not to its role."""
        one = Binding[Member](name, RoleTable(name, (self.placed[name].ref,)), patience_s=0)
        return await one.call_within(limit_s, endpoint, *args)

    # ---- watching ------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Watch every member until cancelled. Raises RoleKeepsDying."""
        watches = [asyncio.create_task(self._watch(name)) for name in self.placed]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, name: str) -> None:
        born = heard = time.monotonic()
        while True:
            await asyncio.sleep(self.config.heartbeat_s)
            lost = self._process_is_gone(name)
            if lost is None:
                lost, heard = await self._listen(name, heard)
            if lost:
                await self._replace(name, lost, lived_s=heard - born)
                born = heard = time.monotonic()

    def _process_is_gone(self, name: str) -> str | None:
        """Asked first: when several processes die at once, Monarch fails the calls to only one of them."""
        known = self.processes.get(name)
        return f"its process {known.pid} is gone" if known is not None and not known.alive else None

    async def _listen(self, name: str, heard: float) -> tuple[str | None, float]:
        """Ask for the status; returns why the member is lost, if it is, and when it was last heard."""
        asked = time.monotonic()
        try:
            answer = await self._ask(name, Member.status, min(STATUS_LIMIT_S, self.config.hang_s))
        except MemberDied as error:
            return str(error), heard
        except BindingError:
            silent = time.monotonic() - heard
            return (f"silent for {silent:.0f} s" if silent >= self.config.hang_s else None), heard
        now = time.monotonic()
        self.health[name] = {
            **answer,
            "answered_in_s": now - asked,
            "heard": time.time(),
            "incarnation": self.placed[name].incarnation,
        }
        await self._catch_up(name, answer["bindings"])
        return answer["failure"], now

    async def _catch_up(self, name: str, held: dict[str, Any]) -> None:
        """Tell a member what it missed: a table may have changed while it started, or was too busy to be told."""
        behind = {
            role: table
            for role, table in self.tables.items()
            if held.get(role, {}).get("revision", 1e9) < table.revision
        }
        if behind:
            try:
                await self._ask(name, Member.bind, STATUS_LIMIT_S, behind)
            except BindingError as error:
                self.log(f"{name} could not be told of {', '.join(behind)} ({error}); the next beat tries again")

    async def _replace(self, name: str, reason: str, lived_s: float) -> None:
        place = self.placed[name].place
        policy = self._policies.setdefault(name, RestartPolicy(self.config.max_restarts, self.config.window_s))
        while True:
            self.log(f"{name} is lost ({reason})")
            self.deaths[place.role] = self.deaths.get(place.role, 0) + 1
            await self._retire(name)
            if not policy.allows_restart(lived_s):
                raise RoleKeepsDying(f"{name} died {policy.deaths} times in a row; last: {reason}{_end_of_log(place)}")
            try:
                await self._fill(place, self.placed[name].incarnation + 1)
                await self._start(place)
                break
            except StartFailed as error:
                reason, lived_s = str(error), 0.0
        table = self.tables[place.role]
        members = (*table.members, self.placed[name].ref)
        await self._announce(replace(table, members=members, revision=table.revision + 1))
        self.log(f"{name} is back (incarnation {self.placed[name].incarnation})")

    async def _retire(self, name: str) -> None:
        """Take a member out of its table and make sure that its process is gone before its place is filled again."""
        table = self.tables[self.placed[name].place.role]
        left = tuple(member for member in table.members if member.name != name)
        if left != table.members:
            await self._announce(replace(table, members=left, revision=table.revision + 1))
        self.health.pop(name, None)
        self._kill(name)
        await _stop_procs(self.placed[name])

    def _kill(self, name: str) -> None:
        """kill -9 of a member on this host: a hung one does not stop when asked."""
        known = self.processes.pop(name, None)
        if known is not None:
            known.kill()

    async def _announce(self, table: RoleTable) -> None:
        """A new table: to every member and to the listeners. Whoever cannot be told now is told by its watch."""
        self._set_table(table)
        living = [member.name for t in self.tables.values() for member in t.members]
        told = await asyncio.gather(
            *[self._ask(name, Member.bind, STATUS_LIMIT_S, {table.role: table}) for name in living],
            return_exceptions=True,
        )
        for name, result in zip(living, told, strict=True):
            if isinstance(result, BaseException):
                self.log(f"{name} was not told of the new {table.role} yet: {result}")

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
        await asyncio.gather(*[_stop_procs(placed) for placed in self.placed.values()])
        for name in list(self.processes):
            self._kill(name)
        self.placed.clear()


def _why(place: Place, error: BindingError) -> str:
    """Why a member did not start: what it raised, or, where its process died, the end of its log."""
    if isinstance(error, RemoteFailure):
        return f"{place.name} did not start: {error.cause}"
    return f"{place.name} did not start: {error}{_end_of_log(place)}"


def _end_of_log(place: Place) -> str:
    logged = tail(place.proc.log_path)
    return f"\n--- end of its log ({place.proc.log_path}) ---\n{logged}" if logged else ""


async def _stop_procs(placed: Placed) -> None:
    try:
        await asyncio.wait_for(placed.procs.stop(), 20.0)
    except Exception as error:  # Monarch raises many kinds here, and what matters is only that the proc is gone
        print(f"stopping {placed.place.name}: {type(error).__name__}: {error}", file=sys.stderr)
