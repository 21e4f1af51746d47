"""The actor that shows the policy a hint and hands out what it would then have done, as logits in registered memory.

    logits(contexts) ─▶ teacher.align ─▶ store.open ─▶ write, `row_chunk` rows at a time ─▶ seal ─▶ LogitsRef

Each proc of a trainer asks one question at a time, while it reads the answer to the question before. Who asks again
has given up waiting, so an older question of the same asker is not answered any more: otherwise a teacher that is
slower than the trainer's patience would work through an ever longer queue and answer nobody. Nor is one whose asker
died; and what a dead trainer was given is released as soon as its binding says that it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from monarch.actor import concurrent_endpoint

from actors.weights_follower import WeightsFollower
from mesh.actor import MeshActor
from mesh.binding import BindingError
from mesh.messages import HintedContext, LogitsRef, RegionRef
from services.environments.client import EnvironmentClient, EnvironmentFailure
from services.environments.config import EnvironmentConfig
from services.models import generation_stop_ids, load_model, load_tokenizer
from services.rollouts.chat import turn_ends
from services.training.hinted import HintedRows, HintedTeacher, HintedTeacherConfig, hinted_accuracy
from services.tuning import Merger, TuneConfig
from services.weights.config import WeightsConfig
from services.weights.logits import LogitsFull, LogitsStore, LogitsWriter
from services.weights.reader import VersionGone
from services.weights.region import RegionError

READABLE = 2  # answers to one asker: the one that is being read, and the one for the step after it


class Superseded(Exception):
    """A newer question came before this one was answered, or its asker died: nobody waits for the answer."""


@dataclass(frozen=True, slots=True)
class Life:
    """A proc of a trainer, until its place is filled anew."""

    asker: str  # "trainer-0/1"
    incarnation: int

    @property
    def trainer(self) -> str:
        return self.asker.partition("/")[0]


class SDPOTeacherActor(MeshActor):
    """Endpoints of `mesh.roles.SDPOTeacher`."""

    def __init__(
        self,
        name: str,
        config: HintedTeacherConfig,
        model_path: str,
        environment_url: str,
        environment: EnvironmentConfig,
        weights: WeightsConfig,
        tune: TuneConfig | None = None,
        replicas: int = 1,
    ) -> None:
        """`tune`: the trainer's. `replicas`: how many trainers there are; it has the weights of one of them."""
        super().__init__(name, roles=("trainer",))
        self.replicas = replicas
        self.config, self.model_path, self.tune = config, model_path, tune or TuneConfig()
        self.environment_url, self.environment, self.weights_config = environment_url, environment, weights
        self.counts = {"requests": 0, "contexts": 0, "probes": 0, "superseded": 0}
        self.accuracy: float | None = None
        self.trouble = ""
        self.store = LogitsStore(config.logits)
        self._asked: defaultdict[str, int] = defaultdict(int)  # questions, by asker
        self._readable: defaultdict[str, deque[str]] = defaultdict(deque)  # references, by asker, oldest first
        self._incarnations: dict[str, int] = {}  # by trainer, the last that was heard of
        self._one_at_a_time = asyncio.Lock()
        self._probe: asyncio.Task[None] | None = None
        self._probe_due = 0

    async def setup(self) -> None:
        initial = await asyncio.to_thread(load_model, self.model_path, self.config.dtype, self.config.device)
        self.tokenizer = await asyncio.to_thread(load_tokenizer, self.model_path)
        self.stop_ids = turn_ends(self.tokenizer, generation_stop_ids(self.model_path))
        self.teacher = HintedTeacher(initial, initial, self.config)
        self.client = EnvironmentClient(self.environment_url, self.environment)

    async def run(self) -> None:
        follows = self.config.weights != "initial"
        merge = await asyncio.to_thread(Merger.of_model, self.model_path, self.tune) if follows else None
        # Version 0 is what it starts with.
        follower = WeightsFollower(
            self.bindings["trainer"], self.weights_config, version=0, merge=merge, replicas=self.replicas
        )
        while not self.finishing.is_set():
            self.store.expire()
            if not follows:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.finishing.wait(), 2.0)
            else:
                await self._follow(follower)

    async def _follow(self, follower: WeightsFollower) -> None:
        """Take in the trainer's next version, if there is one soon."""
        try:
            tensors = await follower.newer(wait_s=2.0)
            if tensors is not None:
                async with self._one_at_a_time:
                    await asyncio.to_thread(self.teacher.follow, follower.version, tensors)
        except (BindingError, VersionGone, RegionError) as error:
            # The teacher stays as it is; the next version is tried when it comes.
            self.trouble = f"weights: {error}"
            await asyncio.sleep(0.5)

    def rebound(self, role: str) -> None:
        """Release what was given to trainers that are gone."""
        if role != "trainer":
            return
        table = self.bindings[role].table
        self._incarnations |= {member.name: member.incarnation for member in table.members} if table else {}
        for life in self.store.askers:
            if isinstance(life, Life) and self._is_over(life):
                self.store.release_asker(life)

    def _incarnation(self, trainer: str) -> int:
        """Of whoever asks in this trainer's name. A vacant place is being filled; who fills it may ask early."""
        table = self.bindings["trainer"].table
        members = {member.name: member.incarnation for member in table.members} if table else {}
        return members.get(trainer, self._incarnations.get(trainer, -1) + 1)

    def _is_over(self, life: Life) -> bool:
        return life.incarnation < self._incarnation(life.trainer)

    async def teardown(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
        await self.store.close()

    def figures(self) -> dict[str, Any]:
        version = self.teacher.version if hasattr(self, "teacher") else 0
        held = {"answers": self.store.held, "registered_bytes": self.store.nbytes}
        return {**self.counts, **held, "version": version, "hinted_accuracy": self.accuracy, "trouble": self.trouble}

    @concurrent_endpoint
    async def logits(self, contexts: list[HintedContext], asker: str) -> LogitsRef:
        self._asked[asker] += 1
        question = self._asked[asker]
        life = Life(asker, self._incarnation(asker.partition("/")[0]))
        async with self._one_at_a_time:
            self._refuse_if_given_up(question, life)
            with self.busy:
                rows = await asyncio.to_thread(self.teacher.align, contexts)
                ref = await self._answer(rows, question, life)
        self.counts["requests"] += 1
        self.counts["contexts"] += len(contexts)
        if len(rows):
            self._start_probe(contexts)
        return ref

    async def _answer(self, rows: HintedRows, question: int, life: Life) -> LogitsRef:
        """The rows in registered memory, where they are made a chunk at a time."""
        self._refuse_if_given_up(question, life)
        if not len(rows):  # every context is too long: there is nothing to keep
            nowhere = RegionRef(0, "", None, None)
            return LogitsRef("", nowhere, 0, rows.vocab, "float32", rows.row_offsets, rows.version, self.accuracy)
        # Before there is room for the new rows, because what nobody reads any more makes it.
        readable = self._readable[life.asker]
        while len(readable) >= READABLE:
            await self.store.release(readable.popleft())
        try:
            writer = await self.store.open(len(rows), rows.vocab, life)
        except LogitsFull as error:
            self.trouble = str(error)
            raise
        try:
            for start in range(0, len(rows), self.config.row_chunk):
                self._refuse_if_given_up(question, life)
                await asyncio.to_thread(self._write, writer, rows, start)
            ref = writer.seal(rows.row_offsets, teacher_version=rows.version, hinted_accuracy=self.accuracy)
        except BaseException:
            # Nobody will hear of these rows, and they would stand in the way until they expire.
            await self.store.release(writer.ref_id)
            raise
        readable.append(ref.id)
        return ref

    def _write(self, writer: LogitsWriter, rows: HintedRows, start: int) -> None:
        writer.write(rows.read(start, min(start + self.config.row_chunk, len(rows))))

    def _refuse_if_given_up(self, question: int, life: Life) -> None:
        newest = self._asked[life.asker]
        if question == newest and not self._is_over(life):
            return
        self.counts["superseded"] += 1
        why = f"its asker is at question {newest} by now" if question != newest else f"{life.trainer} died meanwhile"
        raise Superseded(f"question {question} was given up: {why}")

    @concurrent_endpoint
    async def release(self, ref_id: str) -> None:
        await self.store.release(ref_id)

    def _start_probe(self, contexts: list[HintedContext]) -> None:
        """Measure hinted accuracy every few requests, beside the work and never in its way."""
        self._probe_due -= 1
        if contexts and self._probe_due < 0 and (self._probe is None or self._probe.done()):
            self._probe_due = self.config.probe_every
            self._probe = asyncio.create_task(self._measure(contexts[: self.config.probe_contexts]))

    async def _measure(self, contexts: list[HintedContext]) -> None:
        try:
            async with self._one_at_a_time:
                actions = await asyncio.to_thread(self.teacher.act, self.tokenizer, contexts, self.stop_ids)
            measured = await hinted_accuracy(self.client, contexts, actions)
            self.accuracy = self.accuracy if measured is None else measured
            self.counts["probes"] += 1
        except EnvironmentFailure as error:
            # Without a measurement the last one stands; training does not depend on this one.
            self.trouble = f"hinted accuracy: {error}"
