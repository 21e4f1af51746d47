"""The buffer's state: every task and batch, changed by nothing but the events of `services.rollouts.events`.

```
            Issued             Completed           Taken            Trained
  (stream) ───────▶ in_work ─────────────▶ ready ────────▶ taken ──────────▶ trained
                      │  ▲                   │               │
                      │  └── Reopened ───────┤               │
                      ▼                      ▼               │
                   dropped ◀──── Dropped ────┘               │
                     ready / in_work ◀──────── Moved ────────┘  (also from trained, when replayed with `keep_from`)
```

There are no clocks, rules or random numbers here: the same events give the same state, on every restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from mesh.messages import Group, Rollout, Task, TrainBatch
from services.rollouts import events as ev
from services.rollouts.late import LateResults
from services.rollouts.leases import Mark

MAX_REASONS = 32  # distinct texts counted; further ones share one entry, so that free text cannot grow without bound


class BufferState:
    """Build with `BufferState.replayed(events)`.

    `keep_from`: rollouts of batches from there on are kept when they are trained, so that `Moved` can bring them back.
    """

    def __init__(self, seed: int = 0, keep_from: int | None = None) -> None:
        self.seed = seed
        self.keep_from = keep_from
        self.incarnation = 0
        self.issued = 0
        self.frontier = 0  # batches below it are trained
        self.next_batch = 0  # batches below it are taken
        self.trained = 0  # tasks
        self.open: dict[str, ev.TaskState] = {}  # in work, ready or taken; in the order of the stream
        self.settled: dict[str, ev.TaskState] = {}  # trained or dropped, kept to recognise what comes late
        self.batches: dict[int, TrainBatch] = {}  # taken ones; with `keep_from`, also trained ones from there on
        self.late_pairs: dict[int, list[ev.LatePair]] = {}  # the pairs of `batches`, with their versions
        self.dropped: Counter[str] = Counter()  # tasks by reason
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()  # "failed: ..." and the like, as the generators worded them
        self.barren = 0  # tasks dropped as incomplete in a row, with no rollout delivered between them
        self.rewinds: list[tuple[Mark, int]] = []
        self.saves: list[int] = []
        self.late = LateResults()

    @classmethod
    def replayed(cls, events: Iterable[ev.Event], keep_from: int | None = None) -> BufferState:
        state = cls(keep_from=keep_from)
        for event in events:
            state.apply(event)
        return state

    # Questions

    def find(self, task_id: str) -> ev.TaskState | None:
        return self.open.get(task_id) or self.settled.get(task_id)

    def with_fate(self, fate: ev.Fate) -> list[ev.TaskState]:
        """Open tasks with this fate, in the order of the stream."""
        return [item for item in self.open.values() if item.fate == fate]

    def accounts(self) -> dict[str, Any]:
        """Every task by its fate (`issued = trained + dropped + in_work + ready + taken`), and all counts."""
        return {
            "issued": self.issued,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "in_work": len(self.with_fate("in_work")),
            "ready": len(self.with_fate("ready")),
            "taken": len(self.with_fate("taken")),
            "frontier": self.frontier,
            "next_batch": self.next_batch,
            "pairs_waiting": len(self.late.pairs),
            "counts": {name: number for name, number in sorted(self.counts.items()) if number},
            "reasons": dict(self.reasons),
        }

    # Changes

    def apply(self, event: ev.Event) -> None:
        match event:
            case ev.Opened():
                self.incarnation = event.incarnation
            case ev.Issued():
                self._issue(event.task, event.size)
            case ev.Delivered():
                self._deliver(event.rollout, event.replay)
            case ev.AttemptEnded():
                self._end_attempt(event)
            case ev.GivenUp():
                self.open[event.task_id].members[event.member].given_up = True
                self.counts["given_up"] += 1
            case ev.Completed():
                self._set_fate(event.task_id, "ready")
            case ev.Dropped():
                self.dropped[event.reason] += 1
                self.barren += event.reason == "incomplete"
                self._settle(event.task_id, "dropped", event.reason)
            case ev.Reopened():
                self._reopen(event)
            case ev.Taken():
                self._take(event)
            case ev.Trained():
                self._train(event.batch)
            case ev.Counted():
                self.counts[event.what] += 1
            case ev.ReplayLent():
                self.late.lend(event.rollout_id)
            case ev.ReplayClosed():
                self.counts[event.reason] += 1
                self.late.close(event.rollout_id)
            case ev.Heard():
                self.counts["delayed"] += 1
                self.counts["pairs"] += len(event.pairs)
                self.counts["pair_unusable"] += event.unusable
                self.late.hear(event.rollout_id, event.pairs)
            case ev.Moved():
                self._move(event)
            case ev.Saved():
                self._note_save(event.step)
            case _:
                self._restore(event)

    def _issue(self, task: Task, size: int) -> None:
        self.open[task.id] = ev.TaskState(task, [ev.Member() for _ in range(size)])
        self.issued += 1

    def _deliver(self, rollout: Rollout, replay: bool) -> None:
        member = self.open[rollout.task.id].members[rollout.member]
        member.rollout, member.delivered = rollout, True
        self.barren = 0
        self.counts["put"] += 1
        self.counts["truncated"] += rollout.status == "truncated"
        self.counts["unscorable"] += rollout.reward is None
        self.counts["flagged"] += bool(rollout.flags)
        self.late.deliver(rollout, replay)

    def _end_attempt(self, event: ev.AttemptEnded) -> None:
        member = self.open[event.task_id].members[event.member]
        member.ended[event.lease_id] = event.how
        member.attempts += 1
        self.counts[event.how] += 1
        text = f"{event.how}: {event.reason[:120]}"
        self.reasons[text if text in self.reasons or len(self.reasons) < MAX_REASONS else "other"] += 1

    def _set_fate(self, task_id: str, fate: ev.Fate) -> None:
        item = self.open[task_id]
        item.fate, item.changed_at = fate, self.next_batch

    def _settle(self, task_id: str, fate: ev.Fate, reason: str = "", keep: bool = False) -> None:
        item = self.open.pop(task_id)
        item.fate, item.reason, item.changed_at = fate, reason, self.next_batch
        if not keep:
            for member in item.members:
                member.rollout = None
        self.settled[task_id] = item

    def _reopen(self, event: ev.Reopened) -> None:
        item = self.open[event.task_id]
        self.counts[event.reason] += len(item.rollouts)
        item.members = [ev.Member() for _ in item.members]
        item.fate, item.since = "in_work", event.mark

    def _take(self, event: ev.Taken) -> None:
        groups = []
        for taken in event.groups:
            item = self.open[taken.task_id]
            item.fate = "taken"
            groups.append(Group(item.task, item.rollouts, taken.advantages, taken.dead, taken.staleness))
        pairs = [late.pair for late in event.pairs]
        self.batches[event.batch] = TrainBatch(event.batch, groups, pairs, event.counts)
        self.late_pairs[event.batch] = event.pairs
        self.late.pairs = []
        self.counts.update(event.left_out)
        self.next_batch = event.batch + 1

    def _train(self, batch: int) -> None:
        keep = self.keep_from is not None and batch >= self.keep_from
        for group in self.batches[batch].groups:
            self._settle(group.task.id, "trained", keep=keep)
        self.trained += len(self.batches[batch].groups)
        self.frontier = batch + 1
        if not keep:
            del self.batches[batch], self.late_pairs[batch]

    def _move(self, event: ev.Moved) -> None:
        """Batches from `step` on are ready again, without the rollouts of weights that no longer exist."""
        untaken = [number for number in self.batches if number >= min(event.step, self.frontier)]
        pairs: list[ev.LatePair] = []
        for number in sorted(untaken):
            pairs += self.late_pairs.pop(number)
            for group in self.batches.pop(number).groups:
                if group.task.id in self.settled:
                    self.open[group.task.id] = self.settled.pop(group.task.id)
                    self.trained -= 1
                self.open[group.task.id].fate = "ready"
        self.late.pairs = pairs + self.late.pairs
        self.open = dict(sorted(self.open.items(), key=lambda named: named[1].task.index))
        self.frontier = self.next_batch = event.step
        self.barren = 0  # training goes on elsewhere or with other settings: what failed before may work now
        self.saves = [step for step in self.saves if step <= event.step]
        if event.rewound:
            self.rewinds.append((event.mark, event.step))
            for item in self.open.values():
                self._discard_newer(item, event.step)

    def _discard_newer(self, item: ev.TaskState, step: int) -> None:
        for number, member in enumerate(item.members):
            if member.rollout is not None and (newest_version(member.rollout) or 0) > step:
                item.members[number] = ev.Member()
                item.fate = "in_work"
                self.counts["rewound"] += 1

    def _note_save(self, step: int) -> None:
        self.saves = [*(saved for saved in self.saves if saved != step), step]

    def forget_before(self, step: int) -> None:
        """Forget settled tasks that changed before batch `step`; what comes late for them is then simply late."""
        self.settled = {name: item for name, item in self.settled.items() if item.changed_at >= step}
        self.late.forget_all_but(lambda rollout_id: self.find(rollout_id.rpartition("/")[0]) is not None)

    # Snapshots

    def snapshot(self) -> Iterator[ev.Event]:
        """Events that build this state from nothing (without the trained batches of `keep_from`)."""
        yield ev.Snapshot(
            self.seed, self.incarnation, self.issued, self.frontier, self.next_batch, self.trained,
            dict(self.dropped), dict(self.counts), dict(self.reasons), list(self.rewinds), list(self.saves),
            self.barren,
        )  # fmt: skip
        yield from self.settled.values()
        yield from self.open.values()
        for number in range(self.frontier, self.next_batch):
            shapes = [ev.TakenGroup(g.task.id, g.advantages, g.dead, g.staleness) for g in self.batches[number].groups]
            yield ev.Taken(number, shapes, self.late_pairs[number], self.batches[number].counts, {})
        held = {rollout.id: rollout for item in self.open.values() for rollout in item.rollouts}
        yield from self.late.snapshot(held)

    def _restore(self, event: ev.Event) -> None:
        match event:
            case ev.Snapshot():
                self.seed, self.incarnation, self.issued = event.seed, event.incarnation, event.issued
                self.frontier, self.next_batch, self.trained = event.frontier, event.next_batch, event.trained
                self.dropped, self.counts = Counter(event.dropped), Counter(event.counts)
                self.reasons, self.rewinds, self.saves = Counter(event.reasons), list(event.rewinds), list(event.saves)
                self.barren = event.barren
            case ev.TaskState():
                # A copy, because a snapshot may be replayed while the state it was taken from goes on.
                item = replace(event, members=[replace(member) for member in event.members])
                (self.settled if event.fate in ("trained", "dropped") else self.open)[event.task.id] = item
            case ev.PairsWaiting():
                self.late.pairs = list(event.pairs)
            case ev.ReplayEntry():
                self.late.restore(event, self._held(event.rollout_id))
            case ev.SnapshotEnd():
                pass  # a marker for readers of the file

    def _held(self, rollout_id: str) -> Rollout | None:
        task_id, _, member = rollout_id.rpartition("/")
        item = self.open.get(task_id)
        return item.members[int(member)].rollout if item is not None else None


def newest_version(rollout: Rollout) -> int | None:
    """The newest weights that sampled a token of the rollout; None when nothing was sampled."""
    return max((span.version for sequence in rollout.sequences for span in sequence.versions), default=None)
