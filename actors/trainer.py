"""The actor that trains: takes batches, asks the SDPO teacher, steps, publishes, reports, saves.

    ┌─────────────────────────── prepare(k+1), while step k runs ───────────────────────────┐
    │ buffer.take(k+1) ─▶ a share for each proc ─▶ sdpo_teacher.logits(contexts) ─▶ LogitsRef │
    └──────────────────────────────────────────┬────────────────────────────────────────────┘
                                               ▼
    step k+1: every proc its share, reading the rows chunk by chunk ─▶ release(LogitsRef), not waited for
              ─▶ buffer.trained(k+1) ─▶ copy version k+2 ─▶ report ─▶ checkpoint when due
                                             └─▶ sealed and published while the next step runs

Batch `k` trains from version `k` to version `k + 1`. It may be taken one step ahead; the buffer judges its staleness
against the version that will train it. A published version is a snapshot: the optimizer goes on while readers pull.
A publish that failed is tried again while the next batch is waited for, because that batch may need the version.
The teacher is never waited for when it is dead: the step goes without it, counted in `sdpo/missing`.

One of several replicas syncs with the others inside its steps (`services.diloco`). One that starts behind them trains
nothing until it healed at their next sync, and then stands where they stand; so does one that they went on without.

This is the trainer's only thread of control, however many procs it has: what happens in each of them is
`actors.trainer_part`, that it happens in all of them `actors.trainer_team`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.actor import concurrent_endpoint

from actors.following import buffer_name
from actors.replicas import Look, OtherReplicas, checkpoints_of, newest_checkpoint
from actors.trainer_part import TrainerPart, TrainerSettings
from actors.trainer_team import Team
from mesh import roles
from mesh.actor import MeshActor
from mesh.binding import NO_ANSWER, BindingError
from mesh.messages import LogitsRef, TrainBatch, WeightsRef
from services.telemetry.spans import Spans
from services.training.plan import StepPlan
from services.training.report import describe_batch
from services.weights.publishing import Publishing
from services.weights.snapshots import SnapshotPublisher

TEACHER_PATIENCE_S = 2.0  # a step does not wait until a dead SDPO teacher is placed again
CATCH_UP_S = 30.0  # for one sync of the others, before it is looked whether they are still there
TO_SYNC_S = 60.0  # that a replica goes on to its next sync although it was told to finish
SAVE_LIMIT_S = 120.0  # for the checkpoint of a loop that was cancelled


@dataclass(slots=True)
class Prepared:
    """A batch, dealt out and asked about. By rank: what each proc does, and the teacher's answer to it."""

    batch: TrainBatch
    shares: list[StepPlan]
    refs: list[LogitsRef | None]


class TrainerActor(MeshActor):
    """Endpoints of `mesh.roles.Trainer`."""

    # What a caller of `finish` must allow for. Each trainer ends by itself before that: see `finish_limit`.
    finish_limit_s = 600.0

    def __init__(self, name: str, settings: TrainerSettings, run_dir: str) -> None:
        super().__init__(name, roles=("rollout_buffer", "sdpo_teacher", "trainer"))
        replica = settings.replica
        self.buffer = self.bindings["rollout_buffer"].only(buffer_name(replica))
        self.others = OtherReplicas(self.bindings["trainer"], name, settings.config.replicas)
        self.settings, self.config, self.run_dir = settings, settings.config, Path(run_dir)
        self.bindings["sdpo_teacher"].patience_s = TEACHER_PATIENCE_S
        self.step_n = 0
        self.behind = False  # other replicas are further, so that nothing is trained before it healed
        self.life = secrets.token_hex(8)  # tells the reports of this trainer from those of the one before it
        self.spans = Spans()
        self.trouble = ""
        self.finish_limit_s = finish_limit(0.0)
        self._longest_step_s = 0.0
        self._reports: list[dict[str, Any]] = []
        self._reported = asyncio.Event()
        self._between_steps = asyncio.Lock()  # held while a step changes the state; a checkpoint waits for it
        self._training: int | None = None  # the batch on which model, optimizer and buffer do not agree yet
        self._background: set[asyncio.Task[None]] = set()  # asyncio itself keeps no task alive
        self._ends_at = 0.0  # when it has gone on towards the next sync for long enough

    # ---- life ----------------------------------------------------------------------------------------------------

    async def setup(self) -> None:
        config, replica = self.config, self.settings.replica
        self.checkpoints = checkpoints_of(self.run_dir, replica, config.keep_checkpoints)
        await asyncio.to_thread(self.checkpoints.sweep)  # the trainer before this one may have died while it saved
        self.team = Team(TrainerPart(self.settings, self.spans), self.peers)
        await self._load()
        writers, store = await self.team.open_writers()
        self.publisher = SnapshotPublisher(writers, self.settings.weights, store)
        self.publishing = Publishing(self.publisher, self.spans, self._note)
        if not self.behind:
            await self._begin()

    async def _load(self) -> None:
        """Stand at the newest checkpoint of all replicas, and see whether those that train are further."""
        replica, replicas = self.settings.replica, self.config.replicas
        latest, own = await asyncio.to_thread(newest_checkpoint, self.run_dir, replica, replicas)
        self.step_n = await self.team.load(latest.path if latest else None, own)
        self.behind = await self._newest_round(await self.others.look()) > self.rounds

    async def _newest_round(self, others: Look) -> int:
        """Of the replicas that train now, as far as one hears of them without a sync."""
        outer = self.team.part.outer
        return max(others.rounds or 0, await asyncio.to_thread(lambda: outer.newest_round)) if outer else 0

    async def _begin(self) -> None:
        """Offer the weights it stands at; before the first batch is taken, the buffer agrees on what was trained."""
        await self.publisher.publish(self.step_n)
        await self.buffer.call(roles.RolloutBuffer.move_to, self.step_n)

    async def _catch_up(self) -> None:
        """Heal at the next sync of those that are further. They may end meanwhile: then from their last checkpoint.

        TimeoutError when only an object store tells of them, and none came to a sync in `diloco.give_up_s`.
        """
        assert self.settings.diloco is not None
        limit_s, seen = self.settings.diloco.give_up_s, time.monotonic()
        while self.behind and not self.finishing.is_set():
            others = await self.others.look()
            rounds = await self._newest_round(others)
            if others.rounds is not None:
                seen = time.monotonic()
            if others.all_done:
                await self._load()
            elif rounds > self.rounds:
                if time.monotonic() - seen > limit_s:
                    raise TimeoutError(
                        f"{self.settings.diloco.uri} shows round {rounds} and this replica is at {self.rounds}, but "
                        f"nobody came to a sync in {limit_s:g} s: if the others have ended, their weights are the "
                        "result; if their rounds are longer than that, raise diloco.give_up_s"
                    )
                with self.spans("trainer/catch_up", waiting=True):
                    self.step_n = await self.team.catch_up(rounds, min(CATCH_UP_S, limit_s))
                self.behind = self.rounds < rounds
            else:  # they died meanwhile: everybody goes on from where it stands
                self.behind = False
        if not self.behind:
            await self._begin()

    @property
    def rounds(self) -> int:
        """Syncs with other replicas that its weights have behind them."""
        outer = self.team.part.outer if hasattr(self, "team") else None
        return outer.rounds if outer is not None else 0

    def _note(self, trouble: str) -> None:
        self.trouble = trouble

    async def run(self) -> None:
        """Train until the last step, or until the run is told to finish; then save."""
        try:
            if self.behind:
                await self._catch_up()
            await self._train_steps()
        except asyncio.CancelledError:
            # `finish` waited its time for whatever this loop waits for. What was trained is saved all the same.
            if not self.behind:
                await self._save()
            raise
        if self.behind:  # told to finish before it began
            return
        await self.publishing.finish(self.step_n)  # the last version is the one that the run is judged by
        await self._save()
        await self.team.leave()

    async def _train_steps(self) -> None:
        upcoming: asyncio.Task[Prepared | None] | None = None
        due = False  # a checkpoint
        try:
            while self.step_n < self.config.steps and not self._may_end():
                with self.spans("trainer/wait_batch", waiting=True):
                    prepared = await (upcoming or asyncio.create_task(self._prepare(self.step_n)))
                upcoming = None
                if prepared is None:  # told to finish while waiting
                    break
                if self.config.prefetch and self.step_n + 1 < self.config.steps:
                    upcoming = asyncio.create_task(self._prepare(self.step_n + 1))
                await self._train(prepared)
                if self.step_n != prepared.batch.id + 1:  # it healed, and stands elsewhere
                    await _ended(upcoming)
                    upcoming = None
                due = due or self.step_n % self.config.checkpoint_every == 0
                if due and self._settled and self.step_n < self.config.steps:
                    await self._save()
                    due = False
        finally:
            await _ended(upcoming)

    @property
    def _settled(self) -> bool:
        """Whether it can be saved: nothing that it sent to other replicas is in the air. That lands in a few steps."""
        outer = self.team.part.outer
        return outer is None or outer.settled

    def _may_end(self) -> bool:
        """Whether it is told to finish, and may: a replica goes on to the next sync, where the others wait for it."""
        if not self.finishing.is_set():
            return False
        outer = self.team.part.outer
        if outer is None or outer.at_boundary or self.behind:
            return True
        self._ends_at = self._ends_at or time.monotonic() + TO_SYNC_S
        return time.monotonic() > self._ends_at and outer.settled

    async def teardown(self) -> None:
        if self._loop_task is not None:  # a cancelled loop still saves
            await asyncio.wait({self._loop_task}, timeout=SAVE_LIMIT_S)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if hasattr(self, "publishing"):
            await self.publishing.close()
        if hasattr(self, "team"):
            await self.team.close()

    def figures(self) -> dict[str, Any]:
        done = self._loop_task is not None and self._loop_task.done()
        return {"step": self.step_n, "steps": self.config.steps, "rounds": self.rounds, "behind": self.behind,
                "trouble": self.trouble, "done": done}  # fmt: skip

    # ---- one step ------------------------------------------------------------------------------------------------

    async def _prepare(self, batch_id: int) -> Prepared | None:
        """Take the batch, deal it out, and ask the teacher about each share's failing turns."""
        batch = await self._take(batch_id)
        if batch is None:
            return None
        shares = await asyncio.to_thread(self.team.part.shares, batch)
        asking = [self._ask_teacher(share, f"{self.name}/{rank}") for rank, share in enumerate(shares)]
        return Prepared(batch, shares, await asyncio.gather(*asking))

    async def _take(self, batch_id: int) -> TrainBatch | None:
        """The batch, however long the generators need for it; None once the run is told to finish."""
        while not self._may_end():
            if batch_id == self.step_n:
                # No step is running. Without staleness nobody can make this batch before they have this version.
                await self._publish()
            try:
                batch = await self.buffer.call(roles.RolloutBuffer.take, batch_id, 2.0)
            except NO_ANSWER as error:
                # A dead buffer comes back from its journal with the same batches. One that refuses (RemoteFailure)
                # would for ever: that ends this trainer, and the next one and the buffer agree on a step again.
                self.trouble = f"take: {error}"
                await asyncio.sleep(0.5)
                continue
            if batch is not None:
                return batch
        return None

    async def _ask_teacher(self, share: StepPlan, asker: str) -> LogitsRef | None:
        """The hinted teacher's rows for a share; none when there is nothing to ask or nobody answers in time."""
        if not share.contexts or self.settings.inline:
            return None
        teacher = self.bindings["sdpo_teacher"]
        if not teacher.bound:
            self.trouble = "sdpo teacher: it is dead and not placed again yet"
            return None
        wait_s = self.settings.sdpo.wait_s
        try:
            return await asyncio.wait_for(teacher.call(roles.SDPOTeacher.logits, share.contexts, asker), wait_s)
        except (BindingError, TimeoutError) as error:
            # Training goes on without the channel; the report of this step says so.
            self.trouble = f"sdpo teacher: {error or f'no logits within {wait_s:g} s'}"
            return None

    async def _train(self, prepared: Prepared) -> None:
        began, batch = time.monotonic(), prepared.batch
        async with self._between_steps:
            self._training = batch.id
            # `waiting`: the spans inside it tell the learner's work from its waiting for logits.
            with self.spans("trainer/step", waiting=True):
                try:
                    metrics, unread = await self.team.step(prepared.shares, prepared.refs)
                finally:
                    for ref in prepared.refs:
                        if ref is not None:
                            self._release_later(ref)
            self.step_n = self.team.part.step_n
            # The frontier moves before anybody can sample from the new version.
            await self.buffer.call(roles.RolloutBuffer.trained, batch.id)
            if self.step_n != batch.id + 1:
                self.trouble = f"the other replicas synced without this one: it took over their step {self.step_n}"
                await self.buffer.call(roles.RolloutBuffer.move_to, self.step_n)
            self._training = None
        await self._publish()
        if unread:
            self.trouble = f"sdpo teacher: {unread}"
        metrics |= self.publishing.metrics()
        figures, histograms = describe_batch(batch)
        metrics |= figures
        metrics["idle/trainer"] = self.spans.idle_share("trainer")
        metrics |= {f"seconds/{name}": seconds for name, seconds in self.spans.drain().items()}
        metrics["seconds/step"] = time.monotonic() - began
        self._longest_step_s = max(self._longest_step_s, metrics["seconds/step"])
        self.finish_limit_s = finish_limit(self._longest_step_s)
        report = {"step": batch.id, "replica": self.settings.replica, "metrics": metrics, "histograms": histograms}
        self._reports.append({**report, "finished_at": time.time(), "life": self.life})
        del self._reports[:-1000]
        self._reported.set()
        self._reported = asyncio.Event()

    async def _publish(self) -> None:
        """Make the weights available unless they are. On failure readers stay on the old version, the run goes on."""
        async with self._between_steps:
            if self._training is None:
                await self.publishing.begin(self.step_n)

    def _release_later(self, ref: LogitsRef) -> None:
        """Give the teacher its memory back, beside what comes next: nobody waits for a teacher that died."""
        task = asyncio.create_task(self._release(ref))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _release(self, ref: LogitsRef) -> None:
        try:
            await self.bindings["sdpo_teacher"].call(roles.SDPOTeacher.release, ref.id)
        except BindingError as error:
            self.trouble = f"release of logits: {error}; they expire by themselves"

    async def _save(self) -> str:
        """Trainer and buffer together, between two steps. RuntimeError when a step was cut off in its middle."""
        async with self._between_steps:
            if self._training is not None:
                raise RuntimeError(
                    f"batch {self._training} was being trained when the loop ended, and half a step cannot be saved: "
                    "continue from the newest checkpoint"
                )
            with self.spans("trainer/checkpoint"):
                async with _in_thread(self.checkpoints.writing(self.step_n)) as path:
                    await self.team.save(path, self.step_n)
                    await self.buffer.call(roles.RolloutBuffer.save, str(path / "buffer"), self.step_n)
            return str(self.checkpoints.folder / f"step-{self.step_n}")

    # ---- endpoints -----------------------------------------------------------------------------------------------

    @concurrent_endpoint
    async def weights(self, newer_than: int, wait_s: float) -> WeightsRef | None:
        if not hasattr(self, "publisher"):  # it is still loading
            await asyncio.sleep(min(wait_s, 1.0))
            return None
        return await self.publisher.lease_newer(newer_than, wait_s)

    @concurrent_endpoint
    async def release_weights(self, lease_id: str, pulled_bytes: int = 0) -> None:
        self.publisher.release(lease_id, pulled_bytes)

    @concurrent_endpoint
    async def reports(self, life: str, after_step: int, wait_s: float) -> list[dict[str, Any]]:
        if life != self.life:  # the caller knows the steps of another trainer, from which this one may have gone back
            after_step = -1
        until = time.monotonic() + wait_s
        while True:
            found = [report for report in self._reports if report["step"] > after_step]
            left = until - time.monotonic()
            if found or left <= 0:
                return found
            try:
                await asyncio.wait_for(self._reported.wait(), left)
            except TimeoutError:
                return []

    @concurrent_endpoint
    async def checkpoint(self) -> str:
        while not self._settled:
            await asyncio.wait_for(self._reported.wait(), SAVE_LIMIT_S)
        return await self._save()


def finish_limit(longest_step_s: float) -> float:
    """Seconds that the step in work and the save after it may take, judged by the longest step so far.

    With `SAVE_LIMIT_S` on top it stays below `TrainerActor.finish_limit_s`.
    """
    return min(450.0, max(120.0, 3 * longest_step_s + 60.0))


async def _ended(task: asyncio.Task[Any] | None) -> None:
    """Cancel the task and wait until it is over, whatever it ends by."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def _in_thread(manager: AbstractContextManager[Path]) -> AsyncIterator[Path]:
    """A context manager whose beginning and end may block (they reach the disk), for the event loop."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    except BaseException as error:
        await asyncio.to_thread(manager.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(manager.__exit__, None, None, None)
