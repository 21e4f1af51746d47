"""What to do when an actor dies or hangs: notice it, fill its place again, and give up when that does not help.

One watch per member looks at its processes and asks for their status, every `heartbeat_s`. A stopped or stuck process
is noticed by its silence, because Monarch does not see it. A lost member is taken out of its role's table, its procs
are stopped, its place is filled again and every holder of the role is told. A member of several procs is lost with any
of them, and as a whole: what the others hold is worth nothing without it. A holder that missed a change is told at its
next heartbeat. `RestartPolicy` bounds this: a role that keeps dying ends the run with that role's own error.

    watch ──process? status──▶ member      ok: health[name] = answer, tables it missed
      │ gone | dead | silent | its loop failed
      ▼
    retire (table without it → holders) → kill, stop procs → policy ──▶ RoleKeepsDying, or given up if others play on
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
from typing import Any, Protocol

import monarch.actor
from pydantic import BaseModel, ConfigDict, Field

from mesh.binding import Binding, BindingError, MemberDied, MemberRef, RemoteFailure, RoleTable
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


class Witness(Protocol):
    """Who is told of every loss, at once, and of every place that is filled again."""

    def lost(self, member: str, role: str, incarnation: int, reason: str) -> None: ...

    def back(self, member: str, incarnation: int) -> None: ...


class Supervisor:
    """Owns every place of a run. Called from one event loop (the driver's)."""

    def __init__(
        self,
        host: Any,
        config: SupervisionConfig,
        log: Callable[[str], None] = print,
        witness: Witness | None = None,
    ) -> None:
        self.host, self.config, self.log, self.witness = host, config, log, witness
        self.placed: dict[str, Placed] = {}
        self.tables: dict[str, RoleTable] = {}
        self.health: dict[str, dict[str, Any]] = {}
        self.deaths: dict[str, int] = {}  # by role, for the metrics
        self.given_up: dict[str, str] = {}  # members whose places stay empty, and why
        self.listeners: list[Callable[[RoleTable], Any]] = []  # told of every new table (the directory)
        self._processes: dict[str, list[ProcessId]] = {}  # by member, those on this host
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
        limit_s = self.config.start_s
        try:
            placed = self.placed[place.name] = await asyncio.wait_for(fill(place, self.host, incarnation), limit_s)
            answers = await asyncio.gather(*[_ask(member, Member.status, limit_s) for member in placed.members])
        except TimeoutError:
            raise StartFailed(f"{place.name} has no process after {limit_s:g} s") from None
        except BindingError as error:
            raise StartFailed(_why(place, error)) from None
        here = [process(answer["pid"]) for answer in answers if answer["host"] == socket.gethostname()]
        self._processes[place.name] = [each for each in here if each is not None]

    async def _start(self, place: Place) -> None:
        placed = self.placed[place.name]
        try:
            await _ask(placed.ref, Member.bind, 30.0, self.tables)
            if placed.peers:  # it starts them: only it knows what they need for that
                await _ask(placed.ref, Member.lead, 30.0, placed.peers)
            await _ask(placed.ref, Member.start, self.config.start_s)
        except BindingError as error:
            raise StartFailed(_why(place, error)) from None

    @property
    def processes(self) -> list[ProcessId]:
        """All processes of all members that run on this host."""
        return [each for members in self._processes.values() for each in members]

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
        born = time.monotonic()
        heard: dict[MemberRef, float] = {}  # when each of its actors last answered
        while True:
            await asyncio.sleep(self.config.heartbeat_s)
            # Asked first: when several processes die at once, Monarch fails the calls to only one of them.
            lost = self._gone_process(name) or await self._listen(name, born, heard)
            if lost:
                if not await self._replace(name, lost, lived_s=max(heard.values(), default=born) - born):
                    return
                born, heard = time.monotonic(), {}

    def _gone_process(self, name: str) -> str | None:
        gone = [known.pid for known in self._processes.get(name, []) if not known.alive]
        return f"its process {gone[0]} is gone" if gone else None

    async def _listen(self, name: str, born: float, heard: dict[MemberRef, float]) -> str | None:
        """Ask all of a member's actors for their status; returns why the member is lost, if it is."""
        placed, asked = self.placed[name], time.monotonic()
        limit_s = min(STATUS_LIMIT_S, self.config.hang_s)
        answers = await asyncio.gather(
            *[_ask(actor, Member.status, limit_s) for actor in placed.members], return_exceptions=True
        )
        now = time.monotonic()
        for actor, answer in zip(placed.members, answers, strict=True):
            if isinstance(answer, MemberDied):
                return str(answer)
            if not isinstance(answer, BaseException):
                heard[actor] = now
            elif not isinstance(answer, BindingError):
                raise answer
            elif (silent := now - heard.get(actor, born)) >= self.config.hang_s:
                return f"{actor.name} is silent for {silent:.0f} s"
        told = [answer for answer in answers if not isinstance(answer, BaseException)]
        if len(told) == len(answers):
            leader, *peers = told
            self.health[name] = {
                **leader,
                "peers": peers,
                "answered_in_s": now - asked,
                "heard": time.time(),
                "incarnation": placed.incarnation,
            }
            await self._catch_up(name, leader["bindings"])
        return next((answer["failure"] for answer in told if answer["failure"]), None)

    async def _catch_up(self, name: str, held: dict[str, Any]) -> None:
        """Tell a member what it missed: a table may have changed while it started, or was too busy to be told."""
        behind = {
            role: table
            for role, table in self.tables.items()
            if held.get(role, {}).get("revision", 1e9) < table.revision
        }
        if behind:
            try:
                await _ask(self.placed[name].ref, Member.bind, STATUS_LIMIT_S, behind)
            except BindingError as error:
                self.log(f"{name} could not be told of {', '.join(behind)} ({error}); the next beat tries again")

    async def _replace(self, name: str, reason: str, lived_s: float) -> bool:
        """Fill the place again; False when it is given up because it keeps dying and others of its role live."""
        place = self.placed[name].place
        policy = self._policies.setdefault(name, RestartPolicy(self.config.max_restarts, self.config.window_s))
        while True:
            self.log(f"{name} is lost ({reason})")
            self.deaths[place.role] = self.deaths.get(place.role, 0) + 1
            if self.witness:
                self.witness.lost(name, place.role, self.placed[name].incarnation, reason)
            await self._retire(name)
            if not policy.allows_restart(lived_s):
                why = f"{name} died {policy.deaths} times in a row; last: {reason}"
                if not (place.spare and self.tables[place.role].members):
                    raise RoleKeepsDying(why + _end_of_log(place))
                self.given_up[name] = why
                self.log(f"{name} is given up: {why}{_end_of_log(place)}")
                return False
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
        if self.witness:
            self.witness.back(name, self.placed[name].incarnation)
        return True

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
        """kill -9 of a member's processes on this host: a hung one does not stop when asked."""
        for known in self._processes.pop(name, []):
            known.kill()

    async def _announce(self, table: RoleTable) -> None:
        """A new table: to every member and to the listeners. Whoever cannot be told now is told by its watch."""
        self._set_table(table)
        living = [member.name for t in self.tables.values() for member in t.members]
        told = await asyncio.gather(
            *[_ask(self.placed[name].ref, Member.bind, STATUS_LIMIT_S, {table.role: table}) for name in living],
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
                *[_ask(self.placed[n].ref, Member.finish, limit) for n, limit in zip(names, limits, strict=True)],
                return_exceptions=True,
            )
            for name, result in zip(names, ended, strict=True):
                if isinstance(result, BaseException):
                    self.log(f"{name} did not end by itself: {result}")

    async def stop(self) -> None:
        """Stop all procs, at once: who had something to bring to its end did so in `finish`."""
        self.log("stopping all procs")
        install_fault_hook(lambda text: None)  # of these deaths nobody needs to be told
        # Killed first, because Monarch lets every process of a busy host wait many seconds for its end.
        for name in list(self._processes):
            self._kill(name)
        await asyncio.gather(*[_stop_procs(placed) for placed in self.placed.values()])
        self.placed.clear()


async def _ask(actor: MemberRef, endpoint: Any, limit_s: float, *args: Any) -> Any:
    """One call to one actor, not to its role."""
    return await Binding[Member].to(actor).call_within(limit_s, endpoint, *args)


def _why(place: Place, error: BindingError) -> str:
    """Why a member did not start: what it raised, or, where its process died, the end of its log."""
    if isinstance(error, RemoteFailure):
        return f"{place.name} did not start: {error.cause}"
    return f"{place.name} did not start: {error}{_end_of_log(place)}"


def _end_of_log(place: Place) -> str:
    paths = [place.proc.log_of(rank) for rank in range(place.procs)]
    ends = [(path, tail(path)) for path in paths]
    return "".join(f"\n--- end of its log ({path}) ---\n{logged}" for path, logged in ends if logged)


async def _stop_procs(placed: Placed) -> None:
    try:
        await asyncio.wait_for(placed.procs.stop(), 20.0)
    except Exception as error:  # Monarch raises many kinds here, and what matters is only that the proc is gone
        print(f"stopping {placed.place.name}: {type(error).__name__}: {error}", file=sys.stderr)
