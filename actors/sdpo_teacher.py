"""The actor that shows the policy a hint and hands out what it would then have done, as full-vocabulary logits.

One trainer asks, one question at a time, while it reads the answer to the question before. Who asks again has given up
waiting, so an older question is not answered any more: otherwise a teacher that is slower than the trainer's patience
would work through an ever longer queue and answer nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from monarch.actor import concurrent_endpoint

from actors.weights_follower import WeightsFollower
from mesh.actor import MeshActor
from mesh.binding import BindingError
from mesh.messages import HintedContext, LogitsRef, RegionRef
from services.environments.client import EnvironmentClient, EnvironmentFailure
from services.environments.config import EnvironmentConfig
from services.models import load_model, load_tokenizer
from services.training.hinted import HintedTeacher, HintedTeacherConfig, hinted_accuracy
from services.weights.logits import LogitsStore
from services.weights.region import RegionError
from services.weights.snapshots import VersionGone, WeightsConfig

READABLE = 2  # answers: the one that is being read, and the one for the step after it


class Superseded(Exception):
    """A newer question came before this one was answered, so that nobody waits for the answer."""


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
    ) -> None:
        super().__init__(name, roles=("trainer",))
        self.config, self.model_path = config, model_path
        self.environment_url, self.environment, self.weights_config = environment_url, environment, weights
        self.counts = {"requests": 0, "contexts": 0, "probes": 0, "superseded": 0}
        self.accuracy: float | None = None
        self.trouble = ""
        self._asked = 0
        self._readable: deque[str] = deque()
        self._one_at_a_time = asyncio.Lock()
        self._probe: asyncio.Task[None] | None = None
        self._probe_due = 0

    async def setup(self) -> None:
        initial = await asyncio.to_thread(load_model, self.model_path, self.config.dtype, self.config.device)
        self.tokenizer = await asyncio.to_thread(load_tokenizer, self.model_path)
        self.teacher = HintedTeacher(initial, initial, self.config)
        self.store = LogitsStore(self.config.logits)
        self.client = EnvironmentClient(self.environment_url, self.environment)

    async def run(self) -> None:
        if self.config.weights == "initial":
            await self.finishing.wait()
            return
        # Version 0 is what it starts with.
        follower = WeightsFollower(self.bindings["trainer"], self.weights_config, version=0)
        while not self.finishing.is_set():
            try:
                tensors = await follower.newer(wait_s=2.0)
                if tensors is not None:
                    async with self._one_at_a_time:
                        await asyncio.to_thread(self.teacher.follow, follower.version, tensors)
            except (BindingError, VersionGone, RegionError) as error:
                # The teacher stays as it is; the next version is tried when it comes.
                self.trouble = f"weights: {error}"
                await asyncio.sleep(0.5)

    async def teardown(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
        if hasattr(self, "store"):
            await self.store.close()

    def figures(self) -> dict[str, Any]:
        version = self.teacher.version if hasattr(self, "teacher") else 0
        return {**self.counts, "version": version, "hinted_accuracy": self.accuracy, "trouble": self.trouble}

    @concurrent_endpoint
    async def logits(self, contexts: list[HintedContext]) -> LogitsRef:
        self._asked += 1
        question = self._asked
        async with self._one_at_a_time:
            self._refuse_if_superseded(question)
            with self.busy:
                rows, row_offsets = await asyncio.to_thread(self.teacher.aligned_logits, contexts)
            version = self.teacher.version
        self._refuse_if_superseded(question)
        self.counts["requests"] += 1
        self.counts["contexts"] += len(contexts)
        if not len(rows):  # every context is too long: there is nothing to keep in registered memory
            nowhere = RegionRef(0, "", None, None)
            return LogitsRef("", nowhere, 0, rows.shape[1], "float32", row_offsets, version, self.accuracy)
        # Before the new rows are put, because what nobody reads any more makes room for them.
        while len(self._readable) >= READABLE:
            await self.store.release(self._readable.popleft())
        ref = await self.store.put(rows, row_offsets, teacher_version=version, hinted_accuracy=self.accuracy)
        self._readable.append(ref.id)
        self._start_probe(contexts)
        return ref

    def _refuse_if_superseded(self, question: int) -> None:
        if question != self._asked:
            self.counts["superseded"] += 1
            raise Superseded(f"question {question} was given up: its asker is at question {self._asked} by now")

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
                actions = await asyncio.to_thread(self.teacher.act, self.tokenizer, contexts)
            self.accuracy = await hinted_accuracy(self.client, contexts, actions)
            self.counts["probes"] += 1
        except EnvironmentFailure as error:
            # Without a measurement the last one stands; training does not depend on this one.
            self.trouble = f"hinted accuracy: {error}"
