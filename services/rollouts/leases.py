"""Leases: who may produce which member of which group, and until when.

Leases live in memory only. A buffer that is opened again knows none of them, so their members can be claimed at once;
a rollout that comes back under one of those forgotten leases is still welcome if its member is open.

A lease's id is its mark `(incarnation, number)`. Marks grow for the life of a run, over restarts too, so two marks say
which of two leases came first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from mesh.messages import Lease, Task

Mark = tuple[int, int]


@dataclass(frozen=True, slots=True)
class HeldLease:
    lease: Lease
    generator: str
    expires_at: float  # seconds on the table's clock


class LeaseTable:
    """At most one lease per member at any time."""

    def __init__(self, incarnation: int, lease_s: float, time_fn: Callable[[], float]) -> None:
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._time_fn = time_fn
        self._granted = 0
        self._held: dict[str, HeldLease] = {}  # by rollout id

    def __len__(self) -> int:
        return len(self._held)

    @property
    def mark(self) -> Mark:
        """The mark of the next lease: every lease granted so far lies below it."""
        return (self._incarnation, self._granted)

    def grant(self, task: Task, member: int, generator: str, attempt: int = 0) -> Lease:
        """A lease on a free member. ValueError when the member is held."""
        lease = Lease(f"{self._incarnation}.{self._granted}", task, member, self._lease_s, attempt)
        if lease.rollout_id in self._held:
            raise ValueError(
                f"member {lease.rollout_id} is leased already; wait for it to be put, abandoned or expired"
            )
        self._granted += 1
        self._held[lease.rollout_id] = HeldLease(lease, generator, self._time_fn() + self._lease_s)
        return lease

    def holder(self, rollout_id: str) -> HeldLease | None:
        return self._held.get(rollout_id)

    def find(self, lease_id: str) -> HeldLease | None:
        return next((held for held in self._held.values() if held.lease.id == lease_id), None)

    def end(self, rollout_id: str) -> None:
        """Forget the member's lease, if there is one."""
        self._held.pop(rollout_id, None)

    def end_task(self, task_id: str) -> None:
        """Forget the leases on every member of a task that is no longer wanted."""
        for rollout_id in [r for r, held in self._held.items() if held.lease.task.id == task_id]:
            del self._held[rollout_id]

    def overdue(self) -> list[HeldLease]:
        """The leases whose time is over, the oldest first."""
        now = self._time_fn()
        return [held for held in self._held.values() if held.expires_at <= now]

    def orphans(self, generator: str, holding: Collection[str]) -> list[HeldLease]:
        """Leases given to `generator` that it does not hold: it died and came back, or the answer never reached it."""
        return [h for h in self._held.values() if h.generator == generator and h.lease.id not in holding]

    def by_generator(self) -> dict[str, int]:
        return dict(Counter(held.generator for held in self._held.values()))


def parse_mark(lease_id: str) -> Mark | None:
    """The mark that a lease id states; None for an id that no buffer gave."""
    incarnation, dot, number = lease_id.partition(".")
    if not (dot and incarnation.isdecimal() and number.isdecimal()):
        return None
    return int(incarnation), int(number)
