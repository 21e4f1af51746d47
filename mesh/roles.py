"""The typed contract of each role.

An actor that plays a role has these endpoints; a `Binding` calls them by passing the protocol's own function, so the
type checker sees arguments and results: `await rewarder.call(roles.Rewarder.score, rollout)`. `@contract` states, next
to the signature, how long a caller waits and whether the call may be sent again when its answer was lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from mesh.messages import (
    DelayedReward,
    HintedContext,
    Lease,
    LogitsRef,
    Rollout,
    ShardRef,
    TrainBatch,
    WeightsRef,
)

if TYPE_CHECKING:
    from mesh.binding import MemberRef

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Contract:
    """`limit_s`: a caller gives up after this many seconds. `retry`: repeating an unanswered call does no harm."""

    limit_s: float
    retry: bool


def contract(limit_s: float, *, retry: bool) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def mark(function: Callable[P, R]) -> Callable[P, R]:
        function.__contract__ = Contract(limit_s, retry)  # type: ignore[attr-defined]
        return function

    return mark


def contract_of(function: Callable[..., Any]) -> Contract:
    """The contract of a role's endpoint. TypeError for a function that has none."""
    found = getattr(function, "__contract__", None)
    if found is None:
        raise TypeError(f"{getattr(function, '__qualname__', function)} has no @contract: it is no endpoint of a role")
    return found


class Member(Protocol):
    """What every actor of the mesh answers, at any time, in well under half a second."""

    @contract(5.0, retry=True)
    def status(self) -> Awaitable[dict[str, Any]]: ...

    @contract(10.0, retry=True)
    def bind(self, tables: dict[str, Any]) -> Awaitable[None]:
        """New members or a new generation of roles that this actor holds (`mesh.binding.RoleTable`)."""
        ...

    @contract(10.0, retry=True)
    def lead(self, peers: tuple[MemberRef, ...]) -> Awaitable[None]:
        """Before `start`: these are the actors in the other procs of the same place, by rank from 1 on."""
        ...

    @contract(60.0, retry=True)
    def start(self) -> Awaitable[None]:
        """Begin the actor's own loop. Starting twice is one start."""
        ...

    @contract(30.0, retry=True)
    def finish(self) -> Awaitable[None]:
        """End the loop in an orderly way and release what is held; bounded."""
        ...


class RolloutBuffer(Member, Protocol):
    """Hands out tasks, completes groups, enforces staleness. Endpoints are idempotent by id."""

    @contract(30.0, retry=True)
    def claim(
        self, generator: str, version: int, count: int, holding: list[str], wait_s: float
    ) -> Awaitable[list[Lease]]:
        """Up to `count` leases for a generator with weights `version`; waits up to `wait_s` for one; [] if none.

        `holding` are the lease ids it works on: others that were given to it (before it died, or in an answer that
        was lost) are free again.
        """
        ...

    @contract(30.0, retry=True)
    def put(self, rollout: Rollout) -> Awaitable[bool]:
        """Deliver a rollout. False: it was known already, or its task is no longer wanted."""
        ...

    @contract(30.0, retry=True)
    def abandon(self, lease_ids: list[str], reason: str) -> Awaitable[None]:
        """Give leases back before they expire (an episode that could not be run)."""
        ...

    @contract(30.0, retry=True)
    def delayed(self, result: DelayedReward) -> Awaitable[bool]:
        """Deliver what teachers said of a rollout. False: known already."""
        ...

    @contract(30.0, retry=True)
    def to_replay(self, count: int, wait_s: float) -> Awaitable[list[Rollout]]:
        """Finished rollouts with something to replay, not replayed yet; each is leased to one caller for a time."""
        ...

    @contract(60.0, retry=True)
    def take(self, batch_id: int, wait_s: float) -> Awaitable[TrainBatch | None]:
        """Batch `batch_id`, whose training starts at version `batch_id`; None when it is not complete after `wait_s`.

        Asking again for the same id returns the same batch.
        """
        ...

    @contract(30.0, retry=True)
    def trained(self, batch_id: int) -> Awaitable[None]:
        """Batch `batch_id` was trained: the frontier moves."""
        ...

    @contract(60.0, retry=True)
    def move_to(self, step: int) -> Awaitable[None]:
        """The trainer stands at `step`: at its checkpoint again, or where the peer stood from which it healed.

        Batches from there on are not trained yet; those before it are not this trainer's to train any more.
        """
        ...

    @contract(60.0, retry=True)
    def save(self, path: str, step: int) -> Awaitable[dict[str, Any]]:
        """Write the state as of the frontier `step` (batches < step are trained) into the folder `path`."""
        ...

    @contract(30.0, retry=True)
    def accounts(self) -> Awaitable[dict[str, Any]]:
        """Every task ever issued by its fate: trained, dropped by reason, in work, waiting."""
        ...


class Rewarder(Member, Protocol):
    @contract(60.0, retry=True)
    def score(self, rollout: Rollout) -> Awaitable[Rollout]:
        """The rollout with `reward`, `rewards` (and `reason` where unscorable) filled in."""
        ...


class SDPOTeacher(Member, Protocol):
    @contract(120.0, retry=True)
    def logits(self, contexts: list[HintedContext], asker: str) -> Awaitable[LogitsRef]:
        """Logits at the aligned turn tokens of every context, in registered memory until released.

        `asker` is the proc that asks: its trainer's name, a slash, its rank. Each asks one question at a time, a newer
        one supersedes it. What a trainer that died was given is released.
        """
        ...

    @contract(10.0, retry=True)
    def release(self, ref_id: str) -> Awaitable[None]:
        """Free the memory of a `LogitsRef`; unknown ids are ignored (they expire by themselves)."""
        ...


class Trainer(Member, Protocol):
    @contract(30.0, retry=True)
    def weights(self, newer_than: int, wait_s: float) -> Awaitable[WeightsRef | None]:
        """The newest published version if it is newer; waits up to `wait_s` for one. It comes with a read lease."""
        ...

    @contract(10.0, retry=True)
    def release_weights(self, lease_id: str, pulled_bytes: int = 0) -> Awaitable[None]:
        """End a lease; `pulled_bytes` is how much of the version was fetched. Unknown ids are ignored."""
        ...

    @contract(30.0, retry=True)
    def reports(self, life: str, after_step: int, wait_s: float) -> Awaitable[list[dict[str, Any]]]:
        """This trainer's steps after `after_step`, oldest first; waits up to `wait_s` for one.

        `life` names the trainer that the caller last heard of: to another one all its steps are news.
        """
        ...

    @contract(180.0, retry=True)
    def checkpoint(self) -> Awaitable[str]:
        """Save trainer and buffer together between two steps; returns the folder."""
        ...


class TrainerPeer(Member, Protocol):
    """A proc of a trainer but its first: who calls is the trainer itself, which does the same at the same time."""

    @contract(600.0, retry=False)
    def load(self, size: int, port: int, checkpoint: str | None, own: bool) -> Awaitable[int]:
        """Meet the others of `size` procs at `port`, and load; returns the step."""
        ...

    @contract(3600.0, retry=False)
    def catch_up(self, rounds: int, limit_s: float) -> Awaitable[int]:
        """Heal from another trainer that stands at `rounds` syncs or more; returns the step."""
        ...

    @contract(60.0, retry=False)
    def leave(self) -> Awaitable[None]:
        """Average with other trainers no more."""
        ...

    @contract(3600.0, retry=False)
    def step(self, share: Any, ref: LogitsRef | None) -> Awaitable[str]:
        """Train a share (a `services.training.plan.StepPlan`); why the teacher's rows could not be read, or ""."""
        ...

    @contract(600.0, retry=False)
    def save(self, path: str, step: int) -> Awaitable[None]:
        """This proc's part of the checkpoint of `step`, into the folder `path`."""
        ...

    @contract(60.0, retry=False)
    def open_writer(self, store: Any | None) -> Awaitable[None]:
        """Make ready to write this proc's shards of published versions, into the leader's store if it has one."""
        ...

    @contract(600.0, retry=False)
    def copy(self, slot: int, version: int) -> Awaitable[None]:
        """`services.weights.shards.Writer.copy` of this proc's shards, and so `seal`."""
        ...

    @contract(600.0, retry=False)
    def seal(self, slot: int, base: int | None) -> Awaitable[ShardRef]: ...


NO_VERSION = -1  # of a generator that has no weights yet


class Generator(Member, Protocol):
    @contract(10.0, retry=True)
    def hold(self, seconds: float) -> Awaitable[tuple[str, int]]:
        """Keep the weights in use for so long from now on, 0: no longer. Whose they are, and their version."""
        ...

    @contract(120.0, retry=True)
    def evaluate(self, seeds: list[int], greedy: bool, limit_s: float | None = None) -> Awaitable[list[Rollout]]:
        """Held-out episodes that no buffer sees; those that are done after `limit_s`.

        The same seeds under the same weights make the same rollouts, up to rounding in the logits.
        """
        ...


class TeacherPool(Member, Protocol):
    @contract(60.0, retry=True)
    def ask(self, messages: list[dict[str, str]]) -> Awaitable[dict[str, str]]:
        """Every teacher's answer to one chat, by teacher."""
        ...


class Lighthouse(Member, Protocol):
    """Where trainer replicas learn who takes part in a sync. They find it by its address, not by a binding."""


ROLES: dict[str, type] = {
    "rollout_buffer": RolloutBuffer,
    "rewarder": Rewarder,
    "sdpo_teacher": SDPOTeacher,
    "trainer": Trainer,
    "generator": Generator,
    "teachers": TeacherPool,
    "lighthouse": Lighthouse,
}

# Of members that may span several procs: what the actors beside the first are asked by it, and by nobody else.
PEERS: dict[str, type] = {"trainer": TrainerPeer}
