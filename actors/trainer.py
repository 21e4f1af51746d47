"""The actor that trains: takes batches, asks the SDPO teacher, steps, publishes, reports, saves.

    ┌───────────────────────── prepare(k+1), while step k runs ─────────────────────────┐
    │ buffer.take(k+1) ─▶ learner.plan ─▶ sdpo_teacher.logits(contexts) ─▶ LogitsRef     │
    └────────────────────────────────────────┬──────────────────────────────────────────┘
                                             ▼
    step k+1: learner.step in a thread, reading the rows chunk by chunk ─▶ release(LogitsRef), not waited for
              ─▶ buffer.trained(k+1) ─▶ copy version k+2 ─▶ report ─▶ checkpoint when due
                                             └─▶ sealed and published while the next step runs

Batch `k` trains from version `k` to version `k + 1`. It may be taken one step ahead; the buffer judges its staleness
against the version that will train it. A published version is a snapshot: the optimizer goes on while readers pull.
A publish that failed is tried again while the next batch is waited for, because that batch may need the version.
The teacher is never waited for when it is dead: the step goes without it, counted in `sdpo/missing`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from monarch.actor import concurrent_endpoint
from pydantic import BaseModel, ConfigDict, Field

from actors.remote_rows import RemoteRows
from mesh import roles
from mesh.actor import MeshActor
from mesh.binding import NO_ANSWER, BindingError
from mesh.messages import LogitsRef, TrainBatch, WeightsRef
from services.losses.policy import PolicyConfig
from services.models import load_model, load_tokenizer
from services.runs.checkpoints import Checkpoints
from services.telemetry.spans import Spans
from services.training.hinted import HintedTeacher
from services.training.learner import (
    Hinted,
    Learner,
    OptimizerConfig,
    ReplayConfig,
    SDPOConfig,
    StepPlan,
    needs_reference,
)
from services.training.policy_model import PolicyModel
from services.training.report import describe_batch
from services.training.state import load_state, save_state
from services.weights.config import WeightsConfig
from services.weights.plane import open_writer
from services.weights.publishing import Publishing
from services.weights.snapshots import SnapshotPublisher

TEACHER_PATIENCE_S = 2.0  # a step does not wait until a dead SDPO teacher is placed again
SAVE_LIMIT_S = 120.0  # for the checkpoint of a loop that was cancelled


class TrainerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    steps: int = Field(60, ge=1, description="Optimizer steps of the run.")
    prefetch: bool = Field(True, description="Take the next batch, and its teacher logits, while a step runs.")
    micro_batch_tokens: int = Field(
        16384, ge=16, description="Tokens per forward pass; padding counts, if there is any."
    )
    packing: bool = Field(
        True, description="Sequences end to end without padding. false: padded, for models that cannot be packed."
    )
    logits_chunk: int = Field(512, ge=1, description="Rows of logits (tokens x vocabulary) in memory at a time.")
    gradient_checkpointing: bool = Field(
        False, description="Compute each layer's activations again in backward: less memory, a third more time."
    )
    checkpoint_every: int = Field(20, ge=1, description="Steps between two checkpoints; one is written at the end too.")
    keep_checkpoints: int = Field(3, ge=1, description="Newest checkpoints that are kept.")
    threads: int = Field(1, ge=1, description="CPU threads of the trainer.")
    device: str = Field("cpu", description="Torch device of the trainer.")
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(), description="AdamW and its schedule.")


class TrainerActor(MeshActor):
    """Endpoints of `mesh.roles.Trainer`."""

    # What a caller of `finish` must allow for. Each trainer ends by itself before that: see `finish_limit`.
    finish_limit_s = 600.0

    def __init__(
        self,
        name: str,
        config: TrainerConfig,
        policy: PolicyConfig,
        sdpo: SDPOConfig,
        replay: ReplayConfig,
        weights: WeightsConfig,
        model_path: str,
        run_dir: str,
        temperature: float,
        advantage_scaling: str,
        seed: int,
    ) -> None:
        super().__init__(name, roles=("rollout_buffer", "sdpo_teacher"))
        self.config, self.policy, self.sdpo, self.replay = config, policy, sdpo, replay
        self.weights_config, self.model_path, self.run_dir = weights, model_path, Path(run_dir)
        self.temperature, self.advantage_scaling, self.seed = temperature, advantage_scaling, seed
        self.bindings["sdpo_teacher"].patience_s = TEACHER_PATIENCE_S
        self.step_n = 0
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

    # ---- life ----------------------------------------------------------------------------------------------------

    async def setup(self) -> None:
        torch.manual_seed(self.seed)
        self.tokenizer = await asyncio.to_thread(load_tokenizer, self.model_path)
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", keep=self.config.keep_checkpoints)
        await asyncio.to_thread(self._load)
        writer, store = await open_writer(self._published, self.weights_config)
        self.publisher = SnapshotPublisher([writer], self.weights_config, store)
        self.publishing = Publishing(self.publisher, self.spans, self._note)
        await self.publisher.publish(self.step_n)
        # Before the first batch is taken, the buffer and this trainer agree on what has been trained.
        await self.bindings["rollout_buffer"].call(roles.RolloutBuffer.rewind, self.step_n)

    def _load(self) -> None:
        """The newest checkpoint of the run if there is one, else the initial model."""
        latest = self.checkpoints.latest()
        path = str(latest.path / "policy") if latest else self.model_path
        model = load_model(path, "float32", self.config.device)
        inline = self.sdpo.teacher == "inline" and self.sdpo.alpha > 0
        initial = None
        if inline or needs_reference(self.policy, self.replay):
            initial = load_model(self.model_path, "float32", self.config.device)
        packing, chunk = self.config.packing, self.config.logits_chunk
        self.learner = Learner(
            PolicyModel(model, packing=packing, logits_chunk=chunk, checkpointing=self.config.gradient_checkpointing),
            None if initial is None else PolicyModel(initial, packing=packing, logits_chunk=chunk),
            self._encode,
            self.tokenizer.eos_token_id,
            steps=self.config.steps,
            optimizer=self.config.optimizer,
            policy=self.policy,
            sdpo=self.sdpo,
            replay=self.replay,
            temperature=self.temperature,
            max_tokens=self.config.micro_batch_tokens,
            spans=self.spans,
            advantage_scaling=self.advantage_scaling,
        )
        self.inline = HintedTeacher(initial, initial, self.sdpo.hinted) if inline and initial is not None else None
        if latest:
            self.step_n = load_state(latest.path, self.learner)

    def _published(self) -> dict[str, torch.nn.Parameter]:
        """What readers get: the parameters that are trained; they have the others."""
        return {name: p for name, p in self.learner.model.named_parameters() if p.requires_grad}

    def _note(self, trouble: str) -> None:
        self.trouble = trouble

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def run(self) -> None:
        """Train until the last step, or until the run is told to finish; then save."""
        try:
            await self._train_steps()
        except asyncio.CancelledError:
            # `finish` waited its time for whatever this loop waits for. What was trained is saved all the same.
            await self._save()
            raise
        await self.publishing.settled()  # the last version is the one that the run is judged by
        await self._save()

    async def _train_steps(self) -> None:
        upcoming: asyncio.Task[tuple[StepPlan, Hinted | None, LogitsRef | None] | None] | None = None
        try:
            while self.step_n < self.config.steps and not self.finishing.is_set():
                with self.spans("trainer/wait_batch", waiting=True):
                    prepared = await (upcoming or asyncio.create_task(self._prepare(self.step_n)))
                upcoming = None
                if prepared is None:  # told to finish while waiting
                    break
                if self.config.prefetch and self.step_n + 1 < self.config.steps:
                    upcoming = asyncio.create_task(self._prepare(self.step_n + 1))
                await self._train(*prepared)
                if self.step_n % self.config.checkpoint_every == 0 and self.step_n < self.config.steps:
                    await self._save()
        finally:
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.gather(upcoming, return_exceptions=True)

    async def teardown(self) -> None:
        if self._loop_task is not None:  # a cancelled loop still saves
            await asyncio.wait({self._loop_task}, timeout=SAVE_LIMIT_S)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if hasattr(self, "publishing"):
            await self.publishing.close()

    def figures(self) -> dict[str, Any]:
        return {"step": self.step_n, "steps": self.config.steps, "trouble": self.trouble,
                "done": self._loop_task is not None and self._loop_task.done()}  # fmt: skip

    # ---- one step ------------------------------------------------------------------------------------------------

    async def _prepare(self, batch_id: int) -> tuple[StepPlan, Hinted | None, LogitsRef | None] | None:
        """Take the batch, plan it, and ask the teacher about its failing turns."""
        batch = await self._take(batch_id)
        if batch is None:
            return None
        plan = await asyncio.to_thread(self.learner.plan, batch)
        hinted, ref = await self._ask_teacher(plan)
        return plan, hinted, ref

    async def _take(self, batch_id: int) -> TrainBatch | None:
        """The batch, however long the generators need for it; None once the run is told to finish."""
        while not self.finishing.is_set():
            if batch_id == self.step_n:
                # No step is running. Without staleness nobody can make this batch before they have this version.
                await self._publish()
            try:
                batch = await self.bindings["rollout_buffer"].call(roles.RolloutBuffer.take, batch_id, 2.0)
            except NO_ANSWER as error:
                # A dead buffer comes back from its journal with the same batches. One that refuses (RemoteFailure)
                # would for ever: that ends this trainer, and the next one and the buffer agree on a step again.
                self.trouble = f"take: {error}"
                await asyncio.sleep(0.5)
                continue
            if batch is not None:
                return batch
        return None

    async def _ask_teacher(self, plan: StepPlan) -> tuple[Hinted | None, LogitsRef | None]:
        """The hinted teacher's rows for a plan; none when there is nothing to ask or nobody answers in time."""
        contexts = plan.contexts
        if not contexts or self.inline is not None:
            return None, None
        teacher = self.bindings["sdpo_teacher"]
        if not teacher.bound:
            self.trouble = "sdpo teacher: it is dead and not placed again yet"
            return None, None
        try:
            asking = teacher.call(roles.SDPOTeacher.logits, contexts, f"{self.name}/{self.rank}")
            ref = await asyncio.wait_for(asking, self.sdpo.wait_s)
        except (BindingError, TimeoutError) as error:
            # Training goes on without the channel; the report of this step says so.
            self.trouble = f"sdpo teacher: {error or f'no logits within {self.sdpo.wait_s:g} s'}"
            return None, None
        remote = RemoteRows.of_plan(
            ref, plan, asyncio.get_running_loop(), chunk_rows=self.config.logits_chunk, via=self.weights_config.via
        )
        figures = {"accuracy": ref.hinted_accuracy, "version": ref.teacher_version}
        return Hinted.from_reader(remote, ref.row_offsets, **figures), ref

    async def _train(self, plan: StepPlan, hinted: Hinted | None, ref: LogitsRef | None) -> None:
        began = time.monotonic()
        async with self._between_steps:
            self._training = plan.batch.id
            if self.inline is not None and plan.contexts:
                # Only now: what it says of the contexts holds as long as it has the weights that it has now.
                with self.spans("trainer/teacher"):
                    rows = await asyncio.to_thread(self.inline.align, plan.contexts)
                hinted = Hinted.from_reader(rows.in_order(), rows.row_offsets, version=rows.version)
            # `waiting`: the spans inside it tell the learner's work from its waiting for logits.
            with self.spans("trainer/step", waiting=True):
                try:
                    metrics = await asyncio.to_thread(self.learner.step, plan, hinted)
                finally:
                    if ref is not None:
                        self._release_later(ref)
            if self.inline is not None:
                weights = dict(self.learner.model.named_parameters())
                with self.spans("trainer/teacher"):
                    await asyncio.to_thread(self.inline.follow, self.step_n + 1, weights)
            self.step_n += 1
            # The frontier moves before anybody can sample from the new version.
            await self.bindings["rollout_buffer"].call(roles.RolloutBuffer.trained, plan.batch.id)
            self._training = None
        await self._publish()
        if hinted is not None and hinted.failure:
            self.trouble = f"sdpo teacher: {hinted.failure}"
        metrics |= self.publishing.metrics()
        figures, histograms = describe_batch(plan.batch)
        metrics |= figures
        metrics["idle/trainer"] = self.spans.idle_share("trainer")
        metrics |= {f"seconds/{name}": seconds for name, seconds in self.spans.drain().items()}
        metrics["seconds/step"] = time.monotonic() - began
        self._longest_step_s = max(self._longest_step_s, metrics["seconds/step"])
        self.finish_limit_s = finish_limit(self._longest_step_s)
        report = {"step": plan.batch.id, "metrics": metrics, "histograms": histograms}
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
                    await asyncio.to_thread(save_state, path, self.learner, self.tokenizer, self.step_n)
                    buffer = self.bindings["rollout_buffer"]
                    await buffer.call(roles.RolloutBuffer.save, str(path / "buffer"), self.step_n)
            return str(self.checkpoints.folder / f"step-{self.step_n}")

    # ---- endpoints -----------------------------------------------------------------------------------------------

    @concurrent_endpoint
    async def weights(self, newer_than: int, wait_s: float) -> WeightsRef | None:
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
        return await self._save()


def finish_limit(longest_step_s: float) -> float:
    """Seconds that the step in work and the save after it may take, judged by the longest step so far.

    With `SAVE_LIMIT_S` on top it stays below `TrainerActor.finish_limit_s`.
    """
    return min(450.0, max(120.0, 3 * longest_step_s + 60.0))


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
