"""The books of a rollout buffer, checked from its journal by rules of their own and by none of its code.

    issued ──▶ open ──▶ taken ──▶ trained     every task once, or dropped with a reason
                ▲         │          │
                └───── moved back ───┘        a trainer began again at an older step: what it had trained is undone

The journal keeps what happened since the oldest checkpoint that is kept. Of what was settled before that only numbers
are known, so an audit of a whole run needs `trainer.keep_checkpoints` to be large.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from services.rollouts import events as ev
from services.rollouts.journal import course
from services.rollouts.state import newest_version


@dataclass(slots=True)
class Audit:
    """What a journal says of its tasks. `faults`: each broken promise in one sentence; none when all were kept."""

    since: int = 0  # the batch from which on every task is known by name
    batches: int = 0  # trained ones, those before `since` included
    issued: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    open: int = 0  # in work, ready or taken
    moves: int = 0  # how often training went on at another step
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "0"
        known = f" (each task followed from batch {self.since} on)" if self.since else ""
        return (
            f"{self.issued} tasks issued: {self.trained} trained once, in {self.batches} batches; dropped {dropped}; "
            f"{self.open} open; training moved to another step {self.moves} times{known}"
        )


def audit(folder: Path | str) -> Audit:
    """Audit the journal in `folder`, whose buffer has ended.

    FileNotFoundError where there is none, JournalError when it is damaged.
    """
    books = _Books()
    for event in course(Path(folder)):
        books.read(event)
    return books.close()


class _Books:
    """The state of the check, event by event."""

    def __init__(self) -> None:
        self.found = Audit()
        self.fate: dict[str, str] = {}  # open, taken, trained or dropped, of every task known by name
        self.taken: dict[int, list[str]] = {}  # tasks by batch, of the present course
        self.held: defaultdict[str, dict[int, int]] = defaultdict(dict)  # by task and member: version of its rollout
        self.next_batch = 0  # to be trained

    def fault(self, text: str) -> None:
        self.found.faults.append(text)

    def read(self, event: ev.Event) -> None:
        match event:
            case ev.Snapshot():
                self._begin(event)
            case ev.TaskState():
                self._know(event)
            case ev.Issued():
                self._issue(event.task.id, event.task.index)
            case ev.Delivered():
                self._deliver(event)
            case ev.Reopened():
                self.held[event.task_id].clear()
            case ev.Dropped():
                self._drop(event)
            case ev.Taken():
                self._take(event)
            case ev.Trained():
                self._train(event.batch)
            case ev.Moved():
                self._move(event)

    def _begin(self, event: ev.Snapshot) -> None:
        self.found.since = self.next_batch = event.frontier
        self.found.issued, self.found.trained = event.issued, event.trained
        self.found.dropped = dict(event.dropped)

    def _know(self, item: ev.TaskState) -> None:
        self.fate[item.task.id] = item.fate if item.fate in ("trained", "dropped") else "open"
        for number, member in enumerate(item.members):
            if member.rollout is not None:
                self.held[item.task.id][number] = newest_version(member.rollout) or 0

    def _issue(self, task: str, index: int) -> None:
        if task in self.fate:
            self.fault(f"task {task} was issued twice")
        if index != self.found.issued:
            self.fault(f"task {task} was issued where number {self.found.issued} of the stream was next")
        self.fate[task] = "open"
        self.found.issued += 1

    def _deliver(self, event: ev.Delivered) -> None:
        task, member = event.rollout.task.id, event.rollout.member
        if member in self.held[task]:
            self.fault(f"rollout {event.rollout.id} was accepted twice")
        self._expect(task, "open", f"rollout {event.rollout.id} was accepted")
        self.held[task][member] = newest_version(event.rollout) or 0

    def _drop(self, event: ev.Dropped) -> None:
        self._expect(event.task_id, "open", f"task {event.task_id} was dropped")
        if not event.reason:
            self.fault(f"task {event.task_id} was dropped without a reason")
        self.fate[event.task_id] = "dropped"
        self.found.dropped[event.reason] = self.found.dropped.get(event.reason, 0) + 1

    def _take(self, event: ev.Taken) -> None:
        if event.batch in self.taken:
            self.fault(f"batch {event.batch} was formed twice")
        self.taken[event.batch] = [group.task_id for group in event.groups]
        for task in self.taken[event.batch]:
            self._expect(task, "open", f"task {task} was put into batch {event.batch}")
            self.fate[task] = "taken"

    def _train(self, batch: int) -> None:
        if batch != self.next_batch:
            self.fault(f"batch {batch} was trained where {self.next_batch} was next")
        for task in self.taken.get(batch, []):
            self._expect(task, "taken", f"task {task} was trained")
            self.fate[task] = "trained"
            self.found.trained += 1
        self.next_batch = batch + 1

    def _move(self, event: ev.Moved) -> None:
        """The course after `step` is undone: its tasks are open again, and rollouts of lost weights are gone."""
        self.found.moves += 1
        for batch in [number for number in self.taken if number >= min(event.step, self.next_batch)]:
            for task in self.taken.pop(batch):
                self.found.trained -= self.fate[task] == "trained"
                self.fate[task] = "open"
        self.next_batch = event.step
        for task, rollouts in self.held.items() if event.rewound else ():
            if self.fate.get(task) == "open":
                self.held[task] = {member: version for member, version in rollouts.items() if version <= event.step}

    def _expect(self, task: str, fate: str, what: str) -> None:
        if self.fate.get(task) != fate:
            self.fault(f"{what} although the task is {self.fate.get(task, 'unknown')}, not {fate}")

    def close(self) -> Audit:
        """Fates by name and numbers must tell the same."""
        found, fates = self.found, Counter(self.fate.values())
        found.batches, found.open = self.next_batch, fates["open"] + fates["taken"]
        settled = found.trained + sum(found.dropped.values())
        if found.issued != settled + found.open:
            self.fault(f"{found.issued} tasks were issued, but {settled} are settled and {found.open} open")
        return found
