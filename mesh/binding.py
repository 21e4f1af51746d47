"""A role's name bound to the actors that play it now.

Actors hold a `Binding`, never an actor mesh: members die and are placed again, implementations are swapped, and the
holder's code does not change. A call picks the least-loaded healthy member, waits no longer than the endpoint's
contract allows, and is sent again only where the contract says that this does no harm. What comes back is the answer
or one exception that names role, member and endpoint.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from mesh.roles import contract_of

P = ParamSpec("P")
R = TypeVar("R")
RoleT = TypeVar("RoleT")


class BindingError(Exception):
    """A call through a binding did not bring an answer."""


class NoMember(BindingError):
    """Nobody plays the role, and nobody came within the time the caller could wait."""


class CallTimeout(BindingError):
    """A member did not answer within the endpoint's limit."""


class MemberDied(BindingError):
    """The member died while the call was pending, and the call is not safe to repeat."""


class RemoteFailure(BindingError):
    """The endpoint raised. `cause` is the first line of what it raised; the member lives."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause

    def __reduce__(self) -> tuple[Any, ...]:  # an endpoint may fail by another's failure, and then it travels
        return type(self), (str(self), self.cause)


class MemberRef:
    """One actor of a role: its name, how often its place was filled before, and the handle to call it.

    It travels packed: unpacking a handle imports the actor's class and all that it needs, which only a caller wants.
    """

    def __init__(self, name: str, handle: Any, incarnation: int = 0, packed: bytes = b"") -> None:
        self.name, self.incarnation = name, incarnation  # "generator-0", 0
        self._handle = handle
        # Packed here, not when it is sent: inside Monarch's own pickling a handle may leave a hole to be filled later.
        self._packed = packed or pickle.dumps(handle)

    @property
    def handle(self) -> Any:
        """A Monarch actor mesh of one actor."""
        if self._handle is None:
            self._handle = pickle.loads(self._packed)
        return self._handle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemberRef) and (self.name, self.incarnation) == (other.name, other.incarnation)

    def __hash__(self) -> int:
        return hash((self.name, self.incarnation))

    def __reduce__(self) -> tuple[Any, ...]:
        return MemberRef, (self.name, None, self.incarnation, self._packed)


@dataclass(frozen=True, slots=True)
class RoleTable:
    """Who plays a role. `revision` grows with every change; a holder ignores an older table than its own."""

    role: str
    members: tuple[MemberRef, ...]
    generation: int = 0  # of the implementation: raised by a swap, not by a replaced member
    revision: int = 0
    implementation: str = ""


NO_ANSWER = (NoMember, CallTimeout, MemberDied)  # what passes when the role is played again; RemoteFailure does not


@dataclass(slots=True)
class CallCounts:
    """What this holder saw of one role."""

    calls: int = 0
    errors: int = 0
    retries: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Load:
    in_flight: int = 0
    suspect_until: float = 0.0  # a member that died or hung is the last choice until then
    used: int = 0
    pending: set[asyncio.Future[Any]] = field(default_factory=set)
    dead: bool = False  # it was taken out of the role, so that nothing pending will be answered


SUSPECT_S = 5.0
_POLL_S = 0.1


@dataclass(slots=True)
class Binding(Generic[RoleT]):
    """`patience_s`: how long a safe call keeps looking for a living member before it fails."""

    role: str
    table: RoleTable | None = None
    patience_s: float = 60.0
    counts: CallCounts = field(default_factory=CallCounts)
    member: str | None = None  # of a binding to whoever fills this one place of the role; None: to all of them
    _load: dict[tuple[str, int], _Load] = field(default_factory=dict)
    _only: dict[str, Binding[RoleT]] = field(default_factory=dict)

    @classmethod
    def to(cls, member: MemberRef) -> Binding[RoleT]:
        """To this one actor, for calls that are meant for it and for nobody else of its role."""
        return cls(member.name, RoleTable(member.name, (member,)), patience_s=0)

    def only(self, member: str, patience_s: float | None = None) -> Binding[RoleT]:
        """To whoever fills this one place of the role, now and after it was placed again; it follows this binding."""
        if member not in self._only:
            patience_s = self.patience_s if patience_s is None else patience_s
            one: Binding[RoleT] = Binding(self.role, patience_s=patience_s, counts=self.counts, member=member)
            if self.table is not None:
                one.update(self.table)
            self._only[member] = one
        return self._only[member]

    @property
    def names(self) -> tuple[str, ...]:
        """The members that play the role now."""
        return tuple(member.name for member in self.table.members) if self.table else ()

    @property
    def bound(self) -> bool:
        return self.table is not None and bool(self.table.members)

    @property
    def incarnations(self) -> tuple[int, ...]:
        """How often each member's place was filled: changes when a member was placed again."""
        return tuple(member.incarnation for member in self.table.members) if self.table else ()

    def update(self, table: RoleTable) -> bool:
        """Take over a newer table. False (and nothing changes) when it is older than the one held.

        Calls that wait for a member which is no longer there fail at once: Monarch may leave a call to a process that
        was frozen when it was killed without an answer. After a swap of implementations they may still be answered.
        """
        if table.role != self.role:
            raise ValueError(f"a table of role {table.role!r} was given to the binding of {self.role!r}")
        if self.table is not None and table.revision < self.table.revision:
            return False
        for one in self._only.values():
            one.update(table)
        if self.member is not None:
            table = replace(table, members=tuple(m for m in table.members if m.name == self.member))
        swapped = self.table is not None and self.table.generation != table.generation
        self.table = table
        alive = {(m.name, m.incarnation) for m in table.members}
        for key, load in self._load.items():
            if key not in alive and not swapped:
                load.dead = True
                for call in load.pending:
                    call.cancel()
        self._load = {key: load for key, load in self._load.items() if key in alive or load.in_flight}
        return True

    async def call(
        self,
        endpoint: Callable[Concatenate[RoleT, P], Awaitable[R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call an endpoint of the role, given as the function of its protocol.

        Raises NoMember, CallTimeout, MemberDied or RemoteFailure, at the latest `patience_s` plus the contract's
        limit after the call.
        """
        return await self.call_within(contract_of(endpoint).limit_s, endpoint, *args, **kwargs)

    async def call_within(
        self,
        limit_s: float,
        endpoint: Callable[Concatenate[RoleT, P], Awaitable[R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """As `call`, with another limit than the contract's for each attempt."""
        retry, name = contract_of(endpoint).retry, endpoint.__name__
        give_up_at = time.monotonic() + self.patience_s
        self.counts.calls += 1
        began = time.monotonic()
        try:
            while True:
                member = await self._choose(name, give_up_at)
                try:
                    return await self._attempt(member, name, limit_s, args, kwargs)
                except (MemberDied, CallTimeout):
                    if not retry or time.monotonic() >= give_up_at:
                        raise
                    self.counts.retries += 1
        except BindingError:
            self.counts.errors += 1
            raise
        finally:
            self.counts.seconds += time.monotonic() - began

    async def _choose(self, endpoint: str, give_up_at: float) -> MemberRef:
        """The member with the fewest calls in flight from here; a suspect one only after its time."""
        while True:
            now = time.monotonic()
            members = self.table.members if self.table else ()
            loads = [(self._load.setdefault((m.name, m.incarnation), _Load()), m) for m in members]
            healthy = [(load, m) for load, m in loads if load.suspect_until <= now]
            if healthy:
                load, member = min(healthy, key=lambda pair: (pair[0].in_flight, pair[0].used))
                load.used += 1
                return member
            if now >= give_up_at:
                state = f"its {len(members)} member(s) died or hang" if members else "it has no member"
                who = self.member or self.role
                raise NoMember(f"{who}.{endpoint}: {state}, and no other came within {self.patience_s:.0f} s")
            await asyncio.sleep(_POLL_S)

    async def _attempt(self, member: MemberRef, endpoint: str, limit_s: float, args: Any, kwargs: Any) -> Any:
        load = self._load.setdefault((member.name, member.incarnation), _Load())
        where = f"{self.role}.{endpoint} on {member.name}"
        load.in_flight += 1
        call: asyncio.Future[Any] | None = None
        try:
            call = asyncio.ensure_future(getattr(member.handle, endpoint).call_one(*args, **kwargs))
            load.pending.add(call)
            return await asyncio.wait_for(call, limit_s)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not load.dead or (task is not None and task.cancelling()):
                raise
            raise MemberDied(f"{where}: the actor was lost while the call was pending") from None
        except TimeoutError:
            load.suspect_until = time.monotonic() + SUSPECT_S
            raise CallTimeout(f"{where}: no answer within {limit_s:g} s") from None
        except SupervisionError as error:
            load.suspect_until = time.monotonic() + SUSPECT_S
            raise MemberDied(f"{where}: the actor died while the call was pending ({first_line(error)})") from None
        except RuntimeError as error:
            if "stopped" not in str(error):
                raise
            # Monarch refuses to send through a mesh that this very process has stopped already.
            load.suspect_until = time.monotonic() + SUSPECT_S
            raise MemberDied(f"{where}: {error}") from None
        except ActorError as error:
            cause = describe(error.exception)
            raise RemoteFailure(f"{where} failed: {cause}", cause) from error
        finally:
            load.in_flight -= 1
            if call is not None:
                load.pending.discard(call)


def describe(error: BaseException) -> str:
    """`Type: message` on one line; the bare message for errors that are written for users."""
    text = " ".join(str(error).split())
    return text if isinstance(error, BindingError) else f"{type(error).__name__}: {text}"


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    killed = [line for line in lines if "Killed" in line or "failed:" in line]
    return (killed or lines or [type(error).__name__])[-1][:300]
