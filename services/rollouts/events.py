"""Everything that can happen to a rollout buffer, as small dataclasses, and their JSON form.

The buffer decides, writes the decision down as an event, then applies it; a restart applies the same events again. So
an event says what *was* decided (this group is dropped), never the rule that led there, and a changed configuration
does not change the past. The last section holds the events that a snapshot consists of.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from mesh.messages import PreferencePair, Rollout, Task
from services.rollouts.leases import Mark

Fate = Literal["in_work", "ready", "taken", "trained", "dropped"]
AttemptEnd = Literal["failed", "malformed", "expired", "abandoned"]
ReplayState = Literal["none", "waiting", "done", "closed"]


@dataclass(frozen=True, slots=True)
class Opened:
    """A buffer was opened on this journal; it grants leases of this incarnation."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Issued:
    """The next task of the stream went to work as a group of `size` members."""

    task: Task
    size: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """A member's rollout was accepted; `replay`: it waits for teachers."""

    rollout: Rollout
    replay: bool


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """A lease ended without a rollout that can be trained: its member is free again."""

    task_id: str
    member: int
    lease_id: str
    how: AttemptEnd
    reason: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A member is not attempted any more."""

    task_id: str
    member: int


@dataclass(frozen=True, slots=True)
class Completed:
    """A group is ready to be trained."""

    task_id: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A task will never be trained."""

    task_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reopened:
    """A group's rollouts were discarded and its task is generated again; leases below `mark` are of the old round."""

    task_id: str
    mark: Mark
    reason: str


@dataclass(frozen=True, slots=True)
class TakenGroup:
    task_id: str
    advantages: list[float]
    dead: bool
    staleness: int


@dataclass(frozen=True, slots=True)
class LatePair:
    """A preference pair, and the oldest version that sampled the rollout it is about."""

    pair: PreferencePair
    version: int


@dataclass(frozen=True, slots=True)
class Taken:
    """A batch was formed. Pairs that waited and are not in it are gone; `left_out` counts them by reason."""

    batch: int
    groups: list[TakenGroup]
    pairs: list[LatePair]
    counts: dict[str, float]
    left_out: dict[str, int]


@dataclass(frozen=True, slots=True)
class Trained:
    """The frontier moved over a batch."""

    batch: int


@dataclass(frozen=True, slots=True)
class Counted:
    """Something that changes nothing but a count, as a refused duplicate does."""

    what: str


@dataclass(frozen=True, slots=True)
class ReplayLent:
    """A rollout went to a caller who asks teachers about it."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class ReplayClosed:
    """A rollout is not offered to teachers any more."""

    rollout_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    """What teachers said about a rollout arrived."""

    rollout_id: str
    pairs: list[PreferencePair]
    unusable: int  # pairs that cannot be trained and were left out


@dataclass(frozen=True, slots=True)
class Moved:
    """Training goes on at batch `step`: batches from there on are untaken, leases below `mark` are of the time before.

    `rewound`: the weights after `step` no longer exist, so rollouts that they sampled are discarded.
    """

    step: int
    mark: Mark
    rewound: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """The state as of `step` is in a checkpoint."""

    step: int


# A snapshot: `Snapshot`, then `TaskState`, `Taken`, `PairsWaiting` and `ReplayEntry`, then `SnapshotEnd`.


@dataclass(slots=True)
class Member:
    rollout: Rollout | None = None  # freed when its task is settled
    delivered: bool = False
    given_up: bool = False
    attempts: int = 0  # leases that ended without a rollout
    ended: dict[str, AttemptEnd] = field(default_factory=dict)  # how those leases ended, by lease id

    @property
    def open(self) -> bool:
        return not (self.delivered or self.given_up)

    @property
    def spent(self) -> int:
        """Attempts that would end the same way with the same random numbers: not those that were given back."""
        return sum(how != "abandoned" for how in self.ended.values())


@dataclass(slots=True)
class TaskState:
    task: Task
    members: list[Member]
    fate: Fate = "in_work"
    reason: str = ""
    since: Mark = (0, 0)  # leases below this mark belong to an earlier round of the task
    changed_at: int = 0  # the next batch when the task became ready or was settled

    @property
    def rollouts(self) -> list[Rollout]:
        return [member.rollout for member in self.members if member.rollout is not None]

    @property
    def oldest_version(self) -> int | None:
        versions = [rollout.oldest_version for rollout in self.rollouts]
        return min((version for version in versions if version is not None), default=None)


@dataclass(slots=True)
class ReplayEntry:
    """What is known of one delivered rollout on its way to the teachers."""

    rollout_id: str
    version: int  # the oldest that sampled one of its tokens
    state: ReplayState
    rollout: Rollout | None  # None when not waiting, or while its task holds it (in snapshots)
    lent: int = 0


@dataclass(frozen=True, slots=True)
class PairsWaiting:
    pairs: list[LatePair]


@dataclass(frozen=True, slots=True)
class Snapshot:
    seed: int
    incarnation: int
    issued: int
    frontier: int
    next_batch: int
    trained: int
    dropped: dict[str, int]
    counts: dict[str, int]
    reasons: dict[str, int]
    rewinds: list[tuple[Mark, int]]
    saves: list[int]
    barren: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    pass


Event = (
    Opened | Issued | Delivered | AttemptEnded | GivenUp | Completed | Dropped | Reopened | Taken | Trained | Counted
    | ReplayLent | ReplayClosed | Heard | Moved | Saved
    | Snapshot | TaskState | PairsWaiting | ReplayEntry | SnapshotEnd
)  # fmt: skip
_BY_NAME: dict[str, Any] = {kind.__name__: kind for kind in typing.get_args(Event)}


def encode(event: Event) -> bytes:
    """One line of JSON. Floats keep every bit; NaN and infinities are written as Python's JSON does."""
    return json.dumps([type(event).__name__, event], default=_fields, separators=(",", ":")).encode()


def decode(payload: bytes) -> Event:
    """The event that `encode` wrote. ValueError for a kind that this version does not know."""
    name, value = json.loads(payload)
    if name not in _BY_NAME:
        raise ValueError(f"unknown journal record {name!r}: written by a newer version; use that one to read it")
    event: Event = _builder(_BY_NAME[name])(value)
    return event


def _fields(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    return {name: getattr(value, name) for name in _hints(kind)}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}


@cache
def _builder(hint: Any) -> Callable[[Any], Any]:
    """What turns parsed JSON into a value of type `hint`: dataclasses, lists, tuples and optionals of them."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hasattr(hint, "__dataclass_fields__"):
        builders = {name: _builder(inner) for name, inner in _hints(hint).items()}
        return lambda value: hint(**{name: builders[name](item) for name, item in value.items()})
    if origin is list and _builder(arguments[0]) is not _as_it_is:
        element = _builder(arguments[0])
        return lambda value: [element(item) for item in value]
    if origin is tuple:
        elements = [_builder(inner) for inner in arguments]
        return lambda value: tuple(build(item) for build, item in zip(elements, value, strict=True))
    if origin in (typing.Union, types.UnionType):
        some = [inner for inner in arguments if inner is not type(None)]
        present = _builder(some[0]) if len(some) == 1 else _as_it_is
        return lambda value: None if value is None else present(value)
    return _as_it_is


def _as_it_is(value: Any) -> Any:
    return value
