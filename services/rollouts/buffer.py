"""The rollout buffer: hands out tasks under leases, completes groups, enforces staleness, forms batches.

Plain, synchronous and clocked from outside; the actor around it does the waiting. It keeps the rules; what they decide
becomes an event, which is written to the journal first and applied second, so that a buffer killed at any moment is
opened again as it was (leases apart, whose members are simply free). Everything is idempotent by id: a rollout, a late
result, a batch number, a save may each come twice.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesh.messages import DelayedReward, Lease, Rollout, TrainBatch
from services.rollouts import events as ev
from services.rollouts.advantages import is_dead
from services.rollouts.batches import form_batch
from services.rollouts.config import BufferConfig
from services.rollouts.journal import Journal, read_events, write_events
from services.rollouts.leases import LeaseTable
from services.rollouts.refusals import refusal_of
from services.rollouts.replays import Replays
from services.rollouts.staleness import admissible, lease_admissible, predicted_batch
from services.rollouts.state import BufferState
from services.rollouts.tasks import TaskStream
from services.rollouts.validation import malformed

__all__ = ["BufferConfig", "RolloutBuffer"]

SAVED_FILE = "buffer.jsonl"
DEFAULT_CLOCK: Callable[[], float] = time.monotonic


class RolloutBuffer:
    """Made by `RolloutBuffer.open`, or from a checkpoint by `RolloutBuffer.load`."""

    def __init__(
        self,
        config: BufferConfig,
        state: BufferState,
        journal: Journal,
        time_fn: Callable[[], float] = DEFAULT_CLOCK,
        replica: tuple[int, int] = (0, 1),
    ) -> None:
        self.config = config
        self.refusals: deque[str] = deque(maxlen=16)  # the last reasons why something was not accepted
        self._state = state
        self._journal = journal
        self._time_fn = time_fn
        self._tasks = TaskStream(state.seed, state.issued, *replica)
        self._record(ev.Opened(state.incarnation + 1))
        self._resume()

    @classmethod
    def open(
        cls,
        folder: Path | str,
        config: BufferConfig,
        seed: int,
        time_fn: Callable[[], float] = DEFAULT_CLOCK,
        replica: tuple[int, int] = (0, 1),
    ) -> RolloutBuffer:
        """The buffer that lives in `folder`, as it was when it was last open; a new one in a new folder.

        `replica`: whose tasks it hands out, of how many. JournalError when another process holds the folder or a
        record is damaged; ValueError for another run's seed.
        """
        journal = Journal(Path(folder))
        try:
            state = BufferState.replayed(journal.restore())
            if not journal.segments:
                state = BufferState(seed)
                journal.start_segment(state.snapshot(), frontier=0)
            if state.seed != seed:
                raise ValueError(
                    f"the buffer in {folder} belongs to a run with seed {state.seed}, not {seed}; "
                    "use that seed or another folder"
                )
            return cls(config, state, journal, time_fn, replica)
        except BaseException:
            journal.close()
            raise

    @classmethod
    def load(
        cls,
        path: Path | str,
        folder: Path | str,
        config: BufferConfig,
        time_fn: Callable[[], float] = DEFAULT_CLOCK,
        replica: tuple[int, int] = (0, 1),
    ) -> RolloutBuffer:
        """The buffer that `save` put into the checkpoint folder `path`, living on in `folder`."""
        state = BufferState.replayed(read_events(Path(path) / SAVED_FILE))
        journal = Journal(Path(folder))
        try:
            journal.start_segment(state.snapshot(), state.frontier)
            journal.keep_newest()  # what was here before is another history
            buffer = cls(config, state, journal, time_fn, replica)
            buffer._record(ev.Saved(state.frontier))
            return buffer
        except BaseException:
            journal.close()
            raise

    @property
    def frontier(self) -> int:
        """The batch that is trained next: those before it are trained."""
        return self._state.frontier

    def close(self) -> None:
        """Let another process open the folder. Nothing is lost by not closing."""
        self._journal.close()

    # Leases

    def claim(self, generator: str, version: int, count: int, holding: Collection[str] | None = None) -> list[Lease]:
        """Up to `count` leases for a generator with weights `version`; [] when it may start nothing now.

        `holding`: the lease ids that it works on. What it was given before and does not hold is free again at once.
        """
        self.expire()
        if holding is not None:
            orphans = [held.lease.id for held in self._leases.orphans(generator, holding)]
            self.abandon(orphans, f"{generator} does not hold it")
        self._drop_stale()
        leases: list[Lease] = []
        while len(leases) < count and (place := self._next_place(version)) is not None:
            item, member = place
            leases.append(self._leases.grant(item.task, member, generator, item.members[member].spent))
        return leases

    def _next_place(self, version: int) -> tuple[ev.TaskState, int] | None:
        """The free member of the oldest group that needs one, else of a new task; None when nothing may start."""
        if self._holding and self._can_serve():
            return None
        ahead = len(self._state.with_fate("ready"))
        for item in self._state.with_fate("in_work"):
            free = (n for n, m in enumerate(item.members) if m.open and not self._leases.holder(f"{item.task.id}/{n}"))
            if (member := next(free, None)) is not None and self._may_start(version, ahead):
                return item, member
            ahead += 1
        if self.starved() or not self._may_start(version, ahead):
            return None
        task = self._tasks.next()
        self._record(ev.Issued(task, self.config.group_size))
        return self._state.open[task.id], 0

    def starved(self) -> str | None:
        """Why no new task is handed out: the last ones were all dropped as incomplete, without a rollout between them.

        One rollout that is accepted ends that, and so does a rewind, with which a resumed run begins.
        """
        barren, limit = self._state.barren, max(8, 4 * self.config.groups_per_batch)
        if barren < limit:
            return None
        reasons = "; ".join(f"{reason} ({times} times)" for reason, times in self._state.reasons.most_common(3))
        return (
            f"the last {barren} tasks in a row brought no rollout that can be trained, so no other is begun. Most "
            f"frequent reasons: {reasons}. Mend what they name (the environment, generator.episode, "
            "generator.engine), then resume the run"
        )

    def _may_start(self, version: int, groups_ahead: int) -> bool:
        config, next_batch = self.config, self._state.next_batch
        batch = predicted_batch(next_batch, groups_ahead, config.groups_per_batch)
        if config.total_batches is not None and batch >= config.total_batches:
            return False
        return lease_admissible(version, next_batch, groups_ahead, config.groups_per_batch, config.max_staleness)

    def expire(self) -> int:
        """End the leases whose time is over; returns how many. Their members can be claimed again."""
        expired = 0
        for held in self._leases.overdue():
            # The end of one lease can drop its group, and with it the leases on the other members.
            if self._leases.holder(held.lease.rollout_id) is held:
                self._end_attempt(
                    held.lease, "expired", f"{held.generator} did not deliver in {self.config.lease_s:g} s"
                )
                expired += 1
        return expired

    def abandon(self, lease_ids: list[str], reason: str) -> None:
        """Give leases back before they expire; unknown and ended ones are ignored."""
        for lease_id in lease_ids:
            held = self._leases.find(lease_id)
            if held is not None:
                self._end_attempt(held.lease, "abandoned", reason)

    def _end_attempt(self, lease: Lease, how: ev.AttemptEnd, reason: str) -> None:
        """Free the lease's member, or give the member up when that was its last chance."""
        item, holder = self._state.open[lease.task.id], self._leases.holder(lease.rollout_id)
        if holder is not None and holder.lease.id == lease.id:
            self._leases.end(lease.rollout_id)
        self._record(ev.AttemptEnded(item.task.id, lease.member, lease.id, how, reason))
        tried = item.members[lease.member].attempts
        # A lease that was given back says nothing about its task, so shipping without the member would waste the group.
        shipped = self.config.incomplete == "ship" and how != "abandoned"
        if shipped or tried >= self.config.max_attempts:
            self._record(ev.GivenUp(item.task.id, lease.member))
            self._leases.end(lease.rollout_id)
            self._judge(item)

    # Rollouts

    def put(self, rollout: Rollout) -> bool:
        """Deliver a rollout. False: it was known already, is malformed, or its task is no longer wanted.

        The first rollout of a member wins, whoever holds the lease by then. A failed one, or one without a sampled
        token, is taken note of (True) and its member is free again.
        """
        fault = malformed(rollout)
        refusal = "malformed" if fault else refusal_of(rollout, self._state, next_mark=self._leases.mark)
        if refusal:
            self.refusals.append(fault or f"rollout {rollout.id} of lease {rollout.lease_id} was refused: {refusal}")
            held = self._leases.find(rollout.lease_id) if fault else None
            if held is None:
                self._record(ev.Counted(refusal))
            else:
                self._end_attempt(held.lease, "malformed", fault or "")
            return False
        if rollout.reward is not None and not math.isfinite(rollout.reward):
            rollout = replace(rollout, reward=None, reason=f"the reward was {rollout.reward}")
        item = self._state.open[rollout.task.id]
        if rollout.status == "failed" or rollout.sampled_tokens == 0:
            lease = Lease(rollout.lease_id, item.task, rollout.member, 0.0)
            nothing = "" if rollout.status == "failed" else f"{rollout.status} without a sampled token"
            reason = ": ".join(text for text in (nothing, rollout.reason) if text)
            self._end_attempt(lease, "failed", reason or "no reason given")
            return True
        self._leases.end(rollout.id)
        self._record(ev.Delivered(rollout, self._replays.wants(rollout)))
        self._replays.close_overflow()
        self._judge(item)
        return True

    def _judge(self, item: ev.TaskState) -> None:
        """Decide what a group in work has become: ready, not worth going on with, or still in work."""
        size = len(item.members)
        possible = sum(not member.given_up for member in item.members)
        if possible < min(self.config.min_group_size, size):
            self._drop(item, "incomplete")
        elif any(member.open for member in item.members):
            return
        elif self.config.dead_groups == "drop" and is_dead([rollout.reward for rollout in item.rollouts]):
            self._drop(item, "dead")
        else:
            self._record(ev.Completed(item.task.id))

    def _drop(self, item: ev.TaskState, reason: str) -> None:
        self._record(ev.Dropped(item.task.id, reason))
        self._leases.end_task(item.task.id)

    def _drop_stale(self) -> None:
        """Drop the groups that are too old for the next batch: no later batch could train them either."""
        for item in [*self._state.with_fate("ready"), *self._state.with_fate("in_work")]:
            oldest, now = item.oldest_version, self._state.next_batch
            if oldest is None or admissible(now, oldest, self.config.max_staleness):
                continue
            if self.config.stale_tasks == "retry":
                self._record(ev.Reopened(item.task.id, self._leases.mark, "stale"))
                self._leases.end_task(item.task.id)
            else:
                self._drop(item, "stale")

    # Batches

    def take(self, batch_id: int) -> TrainBatch | None:
        """Batch `batch_id`, whose training starts at version `batch_id`; None while it is not complete.

        A batch that is not trained yet is returned again, the same. One batch may be taken before its predecessor is
        trained. ValueError for every other id.
        """
        state = self._state
        if state.frontier <= batch_id < state.next_batch:
            return state.batches[batch_id]
        allowed = self._allowed_batches()
        if batch_id not in allowed:
            raise ValueError(
                f"batch {batch_id} cannot be taken: batches below {state.frontier} are trained; "
                f"allowed now: {', '.join(map(str, allowed)) or 'none, the run is over'}"
            )
        self.expire()
        self._drop_stale()
        if not self._can_serve():
            return None
        self._holding = False
        self._record(form_batch(batch_id, state, self.config, leases_open=len(self._leases)))
        return state.batches[batch_id]

    def _allowed_batches(self) -> list[int]:
        state, total = self._state, self.config.total_batches
        taken = list(range(state.frontier, state.next_batch))
        following = state.next_batch <= state.frontier + 1 and (total is None or state.next_batch < total)
        return [*taken, state.next_batch] if following else taken

    def _can_serve(self) -> bool:
        return len(self._state.with_fate("ready")) >= self.config.groups_per_batch

    def trained(self, batch_id: int) -> None:
        """Batch `batch_id` was trained. Repeating it is harmless; ValueError for one that is not the next."""
        state = self._state
        if batch_id < state.frontier:
            return
        if batch_id != state.frontier or batch_id >= state.next_batch:
            raise ValueError(
                f"batch {batch_id} cannot be trained now: the next one to train is {state.frontier}, "
                f"and batches below {state.next_batch} are taken"
            )
        self._record(ev.Trained(batch_id))
        self._close_if_over()

    def _close_if_over(self) -> None:
        """After the run's last batch nothing that is still open will be trained."""
        if self.config.total_batches is not None and self._state.frontier >= self.config.total_batches:
            for item in list(self._state.open.values()):
                self._drop(item, "run_over")

    # Late results

    def delayed(self, result: DelayedReward) -> bool:
        """Deliver what teachers said of a rollout. False: heard already, or never put here."""
        return self._replays.delayed(result)

    def to_replay(self, count: int) -> list[Rollout]:
        """Up to `count` rollouts to ask teachers about, the oldest first; each is lent for `replay_lease_s`."""
        return self._replays.lend(count)

    # Saving and going back

    def save(self, path: Path | str, step: int) -> dict[str, Any]:
        """Write the state as of the frontier `step` (batches < `step` are trained) into the folder `path`.

        Batches that are taken and not trained are saved as ready. ValueError when `step` is ahead of what was trained
        or older than the journal.
        """
        if step > self._state.frontier:
            raise ValueError(
                f"the buffer cannot be saved as of step {step}: batches from {self._state.frontier} on are not "
                "trained yet; report them with trained() first"
            )
        view = self._as_of(step, rewound=step < self._state.frontier)
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        write_events(folder / SAVED_FILE, view.snapshot())
        self._record(ev.Saved(step))
        kept = sorted({0, *self._state.saves})[-self.config.keep_saves :]  # the beginning is as good as a save
        self._state.forget_before(kept[0])
        self._journal.start_segment(self._state.snapshot(), self._state.frontier)
        self._journal.forget_before(kept[0])
        return {"step": step, "issued": view.issued, "ready": len(view.with_fate("ready")), "file": SAVED_FILE}

    def rewind(self, step: int) -> dict[str, Any]:
        """Go back to the frontier `step`, because training starts again from that checkpoint.

        Groups trained from there on are ready again. Rollouts sampled by weights newer than `step`, which no longer
        exist, are discarded, and their tasks are generated again. ValueError when `step` lies ahead, or too far back.
        """
        if step > self._state.frontier:
            raise ValueError(
                f"cannot rewind to step {step}: this buffer has trained up to {self._state.frontier}; "
                "load the buffer's file from that step's checkpoint instead"
            )
        discarded = self._state.counts["rewound"]
        self._move(step, rewound=True)
        return {"step": step, "discarded": self._state.counts["rewound"] - discarded, **self.accounts()}

    def advance(self, step: int) -> None:
        """Go on at batch `step`, because the trainer healed from a peer that was further.

        Batches that are taken and not trained are ready again. ValueError when `step` lies behind.
        """
        if step < self._state.frontier:
            raise ValueError(f"step {step} lies behind the frontier {self._state.frontier}; use rewind() to go back")
        if step > self._state.frontier:
            self._move(step, rewound=False)
            self._close_if_over()

    def _move(self, step: int, *, rewound: bool) -> None:
        # The moved state and the event that explains it reach the disk in one rename: a kill leaves all or nothing.
        self._state = self._as_of(step, rewound)
        self._journal.start_segment(self._state.snapshot(), step, prelude=[ev.Moved(step, self._leases.mark, rewound)])
        # From here on leases of the time before are told apart by their incarnation.
        self._record(ev.Opened(self._state.incarnation + 1))
        self._resume()

    def _as_of(self, step: int, rewound: bool) -> BufferState:
        """A copy of the state, moved to `step`; from the journal when rollouts trained since then are needed again."""
        if step < self._state.frontier:
            view = BufferState.replayed(self._journal.history(step), keep_from=step)
        else:
            view = BufferState.replayed(self._state.snapshot())
        view.apply(ev.Moved(step, self._leases.mark, rewound))
        view.keep_from = None
        return view

    def _resume(self) -> None:
        self._leases = LeaseTable(self._state.incarnation, self.config.lease_s, self._time_fn)
        self._replays = Replays(self.config, self._state.late, self._record, self._time_fn)
        # A group whose last rollout was journaled just before the end may not have been judged yet.
        for item in self._state.with_fate("in_work"):
            self._judge(item)
        # What was saved is trained before anything is generated.
        self._holding = self._can_serve()

    def accounts(self) -> dict[str, Any]:
        """Every task by its fate (`issued = trained + dropped + in_work + ready + taken`), and all counts."""
        return {
            **self._state.accounts(),
            "leases": self._leases.by_generator(),
            "replay": {"waiting": len(self._state.late.waiting), "lent": self._replays.lent},
            "refusals": list(self.refusals),
            "journal_cut_bytes": self._journal.cut_bytes,
        }

    def _record(self, event: ev.Event) -> None:
        # Written before it is applied: what the journal cannot take has not happened.
        self._journal.append(event)
        self._state.apply(event)
