"""The actor that replays finished rollouts to outside teachers and sends what they said as delayed rewards.

Never on the hot path: it pulls rollouts when it has time, and a training step waits for none of it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

from monarch.actor import concurrent_endpoint
from pydantic import BaseModel, ConfigDict, Field, model_validator

from actors.following import buffer_name
from mesh import roles
from mesh.actor import MeshActor
from mesh.binding import NO_ANSWER, Binding
from mesh.messages import DelayedReward, Rollout, TraceState
from services.engines import EngineLoop
from services.teachers.budget import Budget
from services.teachers.client import ChatClient
from services.teachers.config import TeacherConfig, TeachersConfig, default_teachers
from services.teachers.engine_teacher import EngineTeacher, VLLMTeacherConfig
from services.teachers.ledger import Ledger
from services.teachers.pairs import extract_preference_pairs
from services.teachers.replay import replay_trace
from services.teachers.rollout_states import attach_exact_ids, replay_states

ROLLOUTS_AT_ONCE = 16
ASK_LIMIT_S = 50.0  # below the contract of `ask`, so that a silent teacher is named and the others' answers arrive


class LocalTeachersConfig(BaseModel):
    """The bundled teachers: oracles of the toolbox task behind a real HTTP server on loopback."""

    model_config = ConfigDict(extra="forbid")

    count: int = Field(3, ge=1, description="How many teachers.")
    error_rate: float = Field(0.2, ge=0, le=1, description="Share of wrong answers.")
    delay_s: float = Field(0.05, ge=0, description="Seconds that each answer takes.")
    usd_per_million: float = Field(1.0, ge=0, description="A made-up price, so that budget and ledger are exercised.")


class TeacherPoolConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    backend: Literal["local", "http", "vllm", "none"] = Field(
        "local",
        description="local: bundled oracles of the toolbox; http: pool.teachers, any OpenAI-compatible servers; "
        "vllm: a model of one's own in an engine on the pool's proc; none: no teachers.",
    )
    local: LocalTeachersConfig = Field(default_factory=lambda: LocalTeachersConfig(), description="The bundled ones.")
    vllm: VLLMTeacherConfig = Field(
        default_factory=lambda: VLLMTeacherConfig(), description="The model of backend vllm."
    )
    pool: TeachersConfig = Field(
        default_factory=lambda: TeachersConfig(), description="Who is asked, and on what terms."
    )

    @model_validator(mode="after")
    def _one_set_of_teachers(self) -> TeacherPoolConfig:
        votes = {"local": ("local.count", self.local.count), "vllm": ("vllm.samples", self.vllm.samples)}
        if self.backend not in votes:
            return self
        if self.pool.teachers != default_teachers():
            raise ValueError('teachers.pool.teachers are for backend "http": set teachers.backend = "http" to ask them')
        setting, most = votes[self.backend]
        if self.pool.agreement_threshold > most:
            raise ValueError(
                f"teachers.pool.agreement_threshold {self.pool.agreement_threshold} exceeds teachers.{setting} "
                f"({most}), so no pair could ever be made: lower the first or raise the second"
            )
        if self.backend == "vllm":
            self._check_vllm()
        return self

    def _check_vllm(self) -> None:
        if self.vllm.path is None:
            raise ValueError('teachers.backend "vllm" needs a model: set teachers.vllm.path to a Hugging Face folder')
        if self.vllm.engine.engine != "vllm":
            raise ValueError('teachers.vllm.engine.engine must be "vllm" (or unset): remove it')
        if self.pool.temperature == 0 and self.vllm.samples > 1:
            raise ValueError(
                f"teachers.pool.temperature 0 makes all {self.vllm.samples} samples alike: raise it, or set "
                "teachers.vllm.samples = 1 and teachers.pool.agreement_threshold = 1"
            )

    def asked(self, local_url: str | None) -> TeachersConfig:
        """The pool's settings with the teachers that this backend asks; `local_url` is the bundled server's."""
        if self.backend == "vllm":
            return self.pool.model_copy(update={"teachers": self.vllm.voices()})
        if self.backend != "local":
            return self.pool
        price = self.local.usd_per_million
        teachers = [
            TeacherConfig(
                name=f"oracle-{i}", base_url=f"{local_url}/v1", model=f"oracle-{i}",
                usd_per_million_prompt=price, usd_per_million_completion=price,
            )
            for i in range(self.local.count)
        ]  # fmt: skip
        return self.pool.model_copy(update={"teachers": teachers})


class TeacherPoolActor(MeshActor):
    """Endpoints of `mesh.roles.TeacherPool`."""

    def __init__(
        self,
        name: str,
        config: TeachersConfig,
        ledger_path: str,
        vllm: VLLMTeacherConfig | None = None,
        replicas: int = 1,
    ) -> None:
        """`vllm`: the model in this process that gives all answers; None asks the teachers over HTTP.

        `replicas`: trainers, whose rollout buffers it serves alike.
        """
        super().__init__(name, roles=("rollout_buffer",))
        self.replicas = replicas
        self.config, self.ledger_path, self.vllm = config, Path(ledger_path), vllm
        self.engine: EngineLoop | None = None
        self.counts = {"rollouts": 0, "states": 0, "answers": 0, "errors": 0, "pairs": 0, "from_ledger": 0}
        self.trouble = ""

    async def setup(self) -> None:
        self.budget = Budget(self.config.max_total_usd)
        self.ledger = await asyncio.to_thread(Ledger, self.ledger_path, self.budget)
        send = await self._engine_teacher(self.vllm) if self.vllm else None
        self.client = ChatClient(self.config, self.ledger, send)

    async def _engine_teacher(self, config: VLLMTeacherConfig) -> EngineTeacher:
        from services.engines import make_engine  # here: only this kind of pool needs torch
        from services.models import generation_stop_ids, load_tokenizer
        from services.rollouts.chat import turn_ends

        path = str(config.path)
        tokenizer = await asyncio.to_thread(load_tokenizer, path)
        engine = await asyncio.to_thread(make_engine, path, config.engine)
        self.engine = EngineLoop(engine, config.engine, name=self.name)
        return EngineTeacher(self.engine, tokenizer, turn_ends(tokenizer, generation_stop_ids(path)))

    async def teardown(self) -> None:
        if self.engine is not None:
            await self.engine.stop()
        if hasattr(self, "client"):
            await self.client.aclose()
            self.ledger.close()

    def figures(self) -> dict[str, Any]:
        spent = {"spent_usd": self.budget.spent_usd} if hasattr(self, "budget") else {}
        return {**self.counts, **spent, "trouble": self.trouble}

    async def run(self) -> None:
        """Replay until told to finish; what is under way then is brought to its end, since its calls are paid for."""
        try:
            async with asyncio.TaskGroup() as tasks:
                buffers = [self.bindings["rollout_buffer"].only(buffer_name(r)) for r in range(self.replicas)]
                await asyncio.gather(*[self._refill(tasks, buffer) for buffer in buffers])
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _refill(self, tasks: asyncio.TaskGroup, buffer: Binding[Any]) -> None:
        """Keep every place filled: a rollout that waits for a slow teacher keeps its own place, not the others'."""
        replays: set[asyncio.Task[None]] = set()
        while not self.finishing.is_set():
            free = max(1, ROLLOUTS_AT_ONCE // self.replicas) - len(replays)
            if free == 0:
                await asyncio.wait(replays, return_when=asyncio.FIRST_COMPLETED)
                continue
            try:
                rollouts = await buffer.call(roles.RolloutBuffer.to_replay, free, 1.0)
            except NO_ANSWER as error:
                self.trouble = f"to_replay: {error}"
                await asyncio.sleep(0.5)
                continue
            for rollout in rollouts:
                replay = tasks.create_task(self._replay(rollout, buffer))
                replays.add(replay)
                replay.add_done_callback(replays.discard)

    async def _replay(self, rollout: Rollout, buffer: Binding[Any]) -> None:
        """Ask about every failing turn of one rollout, and deliver the pairs to the buffer that it came from."""
        states = replay_states(rollout)
        with self.busy:
            results = await replay_trace(states, self.config.teachers, client=self.client)
        pairs = extract_preference_pairs(states, results, self.config.agreement_threshold, self.config.weights)
        answered = [result for result in results if result.error is None]
        failed = [result for result in results if result.error is not None]
        self.counts["rollouts"] += 1
        self.counts["states"] += len(states)
        self.counts["answers"] += len(answered)
        self.counts["errors"] += len(failed)
        self.counts["from_ledger"] += sum(result.from_ledger for result in results)
        self.counts["pairs"] += len(pairs)
        if failed:
            self.trouble = f"{failed[-1].teacher}: {failed[-1].error}"
        delayed = DelayedReward(
            rollout_id=rollout.id,
            states=len(states),
            answered=len(answered),
            pairs=attach_exact_ids(pairs, rollout),
            cost_usd=sum(result.cost_usd for result in results),
        )
        await self._deliver(delayed, buffer)

    async def _deliver(self, delayed: DelayedReward, buffer: Binding[Any]) -> None:
        """Tell the buffer, however long it is away: a rollout is lent for replay only a few times."""
        while True:
            try:
                await buffer.call(roles.RolloutBuffer.delayed, delayed)
                return
            except NO_ANSWER as error:
                self.trouble = f"{delayed.rollout_id}: {error}"
                await asyncio.sleep(0.5)

    @concurrent_endpoint
    async def ask(self, messages: list[dict[str, str]]) -> dict[str, str]:
        state = TraceState("ask#0", messages, "")
        results = await replay_trace([state], self.config.teachers, client=self.client, limit_s=ASK_LIMIT_S)
        return {result.teacher: result.text if result.text is not None else f"({result.error})" for result in results}
