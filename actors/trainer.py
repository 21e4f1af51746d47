"""The actor that trains: takes batches, asks the SDPO teacher, steps, publishes, reports, saves.

    ┌───────────────────────── prepare(k+1), while step k runs ─────────────────────────┐
    │ buffer.take(k+1) ─▶ learner.plan ─▶ sdpo_teacher.logits(contexts) ─▶ LogitsRef     │
    └────────────────────────────────────────┬──────────────────────────────────────────┘
                                             ▼
    step k+1: learner.step in a thread, reading the rows chunk by chunk ─▶ release(LogitsRef)
              ─▶ publish version k+2 ─▶ buffer.trained(k+1) ─▶ report ─▶ checkpoint when due

Batch `k` trains from version `k` to version `k + 1`. It may be taken one step ahead; the buffer judges its staleness
against the version that will train it. A published version is a snapshot: the optimizer goes on while readers pull.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from monarch.actor import concurrent_endpoint
from pydantic import BaseModel, ConfigDict, Field

from mesh import roles
from mesh.actor import MeshActor
from mesh.binding import BindingError
from mesh.messages import LogitsRef, TrainBatch, WeightsRef
from services.losses.policy import PolicyConfig
from services.models import load_model, load_tokenizer
from services.runs.checkpoints import Checkpoints
from services.telemetry.spans import Spans
from services.training.hinted import HintedTeacher
from services.training.learner import Hinted, Learner, OptimizerConfig, ReplayConfig, SDPOConfig, StepPlan
from services.training.report import describe_batch
from services.training.state import load_state, save_state
from services.weights.logits import read_logits
from services.weights.region import Via
from services.weights.snapshots import SnapshotPublisher, WeightsConfig


class TrainerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    steps: int = Field(60, ge=1, description="Optimizer steps of the run.")
    prefetch: bool = Field(True, description="Take the next batch, and its teacher logits, while a step runs.")
    micro_batch_tokens: int = Field(16384, ge=16, description="Padded tokens per forward pass.")
    checkpoint_every: int = Field(20, ge=1, description="Steps between two checkpoints; one is written at the end too.")
    keep_checkpoints: int = Field(3, ge=1, description="Newest checkpoints that are kept.")
    threads: int = Field(1, ge=1, description="CPU threads of the trainer.")
    device: str = Field("cpu", description="Torch device of the trainer.")
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(), description="AdamW and its schedule.")


class TrainerActor(MeshActor):
    """Endpoints of `mesh.roles.Trainer`."""

    finish_limit_s = 120.0  # the step in work and the checkpoint after it

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
        self.step_n = 0
        self.spans = Spans()
        self.trouble = ""
        self._reports: list[dict[str, Any]] = []
        self._reported = asyncio.Event()
        self._between_steps = asyncio.Lock()  # held while a step changes the state; a checkpoint waits for it
        self._publish_failures = 0

    # ---- life ----------------------------------------------------------------------------------------------------

    async def setup(self) -> None:
        torch.manual_seed(self.seed)
        self.tokenizer = await asyncio.to_thread(load_tokenizer, self.model_path)
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", keep=self.config.keep_checkpoints)
        await asyncio.to_thread(self._load)
        self.publisher = SnapshotPublisher(self.learner.model.named_parameters(), self.weights_config)
        await self.publisher.publish(self.step_n, self.learner.model.named_parameters())
        # Before the first batch is taken, the buffer and this trainer agree on what has been trained.
        await self.bindings["rollout_buffer"].call(roles.RolloutBuffer.rewind, self.step_n)

    def _load(self) -> None:
        """The newest checkpoint of the run if there is one, else the initial model."""
        latest = self.checkpoints.latest()
        path = str(latest.path / "policy") if latest else self.model_path
        model = load_model(path, "float32", self.config.device)
        initial = load_model(self.model_path, "float32", self.config.device)
        encode = self._encode
        self.learner = Learner(
            model,
            initial,
            encode,
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
        self.inline = None
        if self.sdpo.teacher == "inline" and self.sdpo.alpha:
            self.inline = HintedTeacher(initial, initial, self.sdpo.hinted)
        if latest:
            self.step_n = load_state(latest.path, self.learner)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def run(self) -> None:
        """Train until the last step, or until the run is told to finish; then save."""
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
        await self._save()

    async def teardown(self) -> None:
        if hasattr(self, "publisher"):
            await self.publisher.close()

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
            try:
                batch = await self.bindings["rollout_buffer"].call(roles.RolloutBuffer.take, batch_id, 2.0)
            except BindingError as error:
                # A dead buffer comes back from its journal with the same batches.
                self.trouble = f"take: {error}"
                await asyncio.sleep(0.5)
                continue
            if batch is not None:
                return batch
        return None

    async def _ask_teacher(self, plan: StepPlan) -> tuple[Hinted | None, LogitsRef | None]:
        """The hinted teacher's rows for a plan; none when there is nothing to ask or nobody answers in time."""
        contexts = plan.contexts
        if not contexts:
            return None, None
        if self.inline is not None:
            rows, offsets = await asyncio.to_thread(self.inline.aligned_logits, contexts)
            return Hinted.from_rows(rows, offsets, version=self.inline.version), None
        try:
            teacher = self.bindings["sdpo_teacher"]
            ref = await asyncio.wait_for(teacher.call(roles.SDPOTeacher.logits, contexts), self.sdpo.wait_s)
        except (BindingError, TimeoutError) as error:
            # Training goes on without the channel; the report of this step says so.
            self.trouble = f"sdpo teacher: {error or f'no logits within {self.sdpo.wait_s:g} s'}"
            return None, None
        remote = _RemoteRows(ref, asyncio.get_running_loop(), self.weights_config.via)
        figures = {"accuracy": ref.hinted_accuracy, "version": ref.teacher_version}
        return Hinted.from_reader(remote, ref.row_offsets, **figures), ref

    async def _train(self, plan: StepPlan, hinted: Hinted | None, ref: LogitsRef | None) -> None:
        began = time.monotonic()
        async with self._between_steps:
            with self.spans("trainer/step"):
                try:
                    metrics = await asyncio.to_thread(self.learner.step, plan, hinted)
                finally:
                    if ref is not None:
                        await self._release(ref)
            if self.inline is not None:
                weights = dict(self.learner.model.named_parameters())
                await asyncio.to_thread(self.inline.follow, self.step_n + 1, weights)
            self.step_n += 1
            # The frontier moves before anybody can sample from the new version.
            await self.bindings["rollout_buffer"].call(roles.RolloutBuffer.trained, plan.batch.id)
        await self._publish()
        if hinted is not None and hinted.failure:
            self.trouble = f"sdpo teacher: {hinted.failure}"
        metrics["weights/publish_failures"] = float(self._publish_failures)
        figures, histograms = describe_batch(plan.batch)
        metrics |= figures
        metrics["idle/trainer"] = self.spans.idle_share("trainer")
        metrics |= {f"seconds/{name}": seconds for name, seconds in self.spans.drain().items()}
        metrics["seconds/step"] = time.monotonic() - began
        self._reports.append({"step": plan.batch.id, "metrics": metrics, "histograms": histograms})
        del self._reports[:-1000]
        self._reported.set()
        self._reported = asyncio.Event()

    async def _publish(self) -> None:
        """Make the new weights available. On failure readers stay on the old version, and the run goes on."""
        with self.spans("trainer/publish"):
            try:
                await self.publisher.publish(self.step_n, self.learner.model.named_parameters())
            except (RuntimeError, OSError) as error:
                self._publish_failures += 1
                self.trouble = f"publish of version {self.step_n}: {error}"

    async def _release(self, ref: LogitsRef) -> None:
        try:
            await self.bindings["sdpo_teacher"].call(roles.SDPOTeacher.release, ref.id)
        except BindingError as error:
            self.trouble = f"release of logits: {error}; they expire by themselves"

    async def _save(self) -> str:
        """Trainer and buffer together, between two steps."""
        async with self._between_steps:
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
    async def release_weights(self, lease_id: str) -> None:
        self.publisher.release(lease_id)

    @concurrent_endpoint
    async def reports(self, after_step: int, wait_s: float) -> list[dict[str, Any]]:
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


class _RemoteRows:
    """The teacher's rows, read over RDMA in chunks, for the learner's thread. The next chunk is under way meanwhile."""

    CHUNK = 256

    def __init__(self, ref: LogitsRef, loop: asyncio.AbstractEventLoop, via: Via) -> None:
        self._loop = loop
        self._chunks: AsyncIterator[tuple[int, torch.Tensor]] = read_logits(ref, self.CHUNK, via=via)
        self._left = torch.empty((0, ref.vocab))

    def __call__(self, count: int) -> torch.Tensor:
        parts, have = [self._left], self._left.shape[0]
        while have < count:
            _, rows = asyncio.run_coroutine_threadsafe(self._next(), self._loop).result(timeout=60.0)
            parts.append(rows.clone())  # a chunk is overwritten when the one after it is asked for
            have += rows.shape[0]
        together = torch.cat(parts) if len(parts) > 1 else self._left
        self._left = together[count:]
        return together[:count]

    async def _next(self) -> tuple[int, torch.Tensor]:
        return await anext(self._chunks)


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
