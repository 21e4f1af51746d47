"""The actor that plays episodes: many at once on one engine, with new weights loaded between engine steps.

Two loops, neither of which waits for the other:

    follow:   trainer.weights(newer than mine) ──pull──▶ engine.update ──▶ release the read lease
    episodes: buffer.claim(free places) ──▶ episode ──▶ rewarder.score ──▶ buffer.put

An engine that died ends both, and the actor with them, so that it is placed again; the leases go back to the buffer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace
from typing import Any

from monarch.actor import concurrent_endpoint
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from actors.following import buffer_of, trainer_name
from actors.weights_follower import WeightsFollower
from mesh import roles
from mesh.actor import MeshActor
from mesh.binding import NO_ANSWER, Binding, BindingError
from mesh.messages import Lease, Rollout, Task
from services.engines.engine import (
    VLLM_TEMPERATURES,
    EngineConfig,
    EngineError,
    Generation,
    GenerationRequest,
    WeightsError,
)
from services.engines.factory import make_engine
from services.engines.loop import EngineLoop
from services.environments.client import EnvironmentClient
from services.environments.config import EnvironmentConfig
from services.environments.hints import load_hint_modules
from services.models import generation_stop_ids, load_tokenizer
from services.rollouts.episode import EpisodeConfig, EpisodeRunner, evaluation_lease
from services.safety.monitor import ActionMonitor, MonitorConfig
from services.tuning import Merger, TuneConfig
from services.weights.config import WeightsConfig
from services.weights.reader import Pulled, VersionGone
from services.weights.region import RegionError

HOLD_LIMIT_S = 8.0  # for a hold to begin, behind the engine step or the load in work
GIVE_BACK_S = 5.0  # leases expire by themselves, so returning them is worth only this long


class GeneratorConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: int = Field(2, ge=1, description="Generator actors, each with an engine of its own.")
    episodes: int = Field(32, ge=1, description="Episodes at once per generator.")
    threads: int = Field(1, ge=1, description="CPU threads per generator.")
    devices: tuple[str, ...] = Field(
        (),
        description="The GPU of each generator, as CUDA_VISIBLE_DEVICES names it (two may share one); empty: every "
        "generator sees all of them.",
    )
    engine: EngineConfig = Field(
        default_factory=EngineConfig, description="The engine that generates; its name alone is short for the section."
    )
    episode: EpisodeConfig = Field(default_factory=EpisodeConfig, description="Limits and form of an episode.")

    @field_validator("engine", mode="before")
    @classmethod
    def _by_its_name(cls, value: Any) -> Any:
        return {"engine": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _a_device_for_each(self) -> GeneratorConfig:
        if self.devices and self.engine.device == "cpu":
            raise ValueError(
                'devices names GPUs and engine.device is "cpu": set engine.device = "cuda", or leave it out'
            )
        if self.devices and len(self.devices) != self.count:
            raise ValueError(
                f"devices has {len(self.devices)} entries for count = {self.count}: name one per generator"
            )
        return self

    @model_validator(mode="after")
    def _a_temperature_of_the_engine_s(self) -> GeneratorConfig:
        low, high = VLLM_TEMPERATURES
        if self.engine.engine == "vllm" and not low <= self.episode.temperature <= high:
            raise ValueError(
                f"episode.temperature is {self.episode.temperature:g}, but vLLM samples at {low:g} to {high:g}: choose "
                'one of these, or engine = "transformers"'
            )
        return self


class GeneratorActor(MeshActor):
    """Endpoints of `mesh.roles.Generator`."""

    def __init__(
        self,
        name: str,
        config: GeneratorConfig,
        model_path: str,
        environment_url: str,
        environment: EnvironmentConfig,
        weights: WeightsConfig,
        seed: int,
        score_limit_s: float = 60.0,
        tune: TuneConfig | None = None,
        number: int = 0,
        replicas: int = 1,
        monitor: MonitorConfig | None = None,
    ) -> None:
        """`seed` and `tune` are the run's. `score_limit_s`: longest wait for a rewarder, its queue included.

        `number`: which generator it is, of those of `replicas` trainers.
        """
        super().__init__(name, roles=("rollout_buffer", "rewarder", "trainer"))
        self.number, self.replicas = number, replicas
        self.trainer = trainer_name(number % replicas)  # whose weights it has, and for whose buffer it plays
        self.config, self.model_path = config, model_path
        self.environment_url, self.environment, self.weights_config = environment_url, environment, weights
        self.seed = config.engine.seed if config.engine.seed is not None else seed
        self.score_limit_s, self.tune = score_limit_s, tune or TuneConfig()
        self.engine: EngineLoop | None = None
        self.monitor = ActionMonitor(monitor or MonitorConfig())
        self.counts = {"finished": 0, "truncated": 0, "failed": 0, "flagged": 0, "refused": 0, "lost": 0, "tokens": 0}
        self.update_s = 0.0  # of the last update
        self.pulled = Pulled()  # what the last pull cost
        self.trouble = ""
        self._have_weights = asyncio.Event()
        self._episodes: set[asyncio.Task[None]] = set()
        self._leases: set[str] = set()  # ids of those that no rollout answered yet
        self._held_out = itertools.count()  # numbers the requests of held-out episodes
        self._held_out_playing = 0
        # They take sessions that no training episode needs, if there are any.
        self._held_out_places = asyncio.Semaphore(max(1, environment.max_sessions - config.episodes))

    async def setup(self) -> None:
        load_hint_modules(self.environment.hint_modules)
        self.tokenizer = await asyncio.to_thread(load_tokenizer, self.model_path)
        # A chat template that does not fit is refused before the engine is made, which takes longer.
        self.config.episode.hint_role_for(self.tokenizer)
        engine = await asyncio.to_thread(make_engine, self.model_path, self.config.engine)
        self.engine = EngineLoop(engine, self.config.engine, name=self.name)
        client = EnvironmentClient(self.environment_url, self.environment)
        playing = client, self.config.episode, self.name, self.seed, generation_stop_ids(self.model_path)
        self.runner = EpisodeRunner(self.tokenizer, self.engine.generate, *playing)
        self.held_out_runner = EpisodeRunner(self.tokenizer, self._generate_held_out, *playing)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [tasks.create_task(self._follow()), tasks.create_task(self._play(tasks))]
                await self.finishing.wait()
                for task in (*loops, *self._episodes):
                    task.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await self._give_back(sorted(self._leases))

    async def teardown(self) -> None:
        if self.engine is not None:
            await self.engine.stop()

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"episodes": len(self._episodes), "held_out": self._held_out_playing}
        figures |= {"trainer": self.trainer, "trouble": self.trouble}
        figures |= self.counts
        if self.engine is not None:
            stats = self.engine.stats()
            figures |= {
                "version": stats.version,
                "busy_s": stats.busy_s,
                "idle_s": stats.idle_s,
                "sampled_tokens": stats.tokens,
                "cached_tokens": stats.cached_tokens,
                "updates": stats.updates,
                "failed_updates": stats.failed_updates,
                "update_s": self.update_s,  # between two engine steps; the rest goes beside generation
                "pull_s": self.pulled.seconds,
                "pulled_bytes": self.pulled.nbytes,
            }
        return figures

    # ---- weights -------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Keep the engine at the newest version of the trainer it follows. A failed update keeps the old one in use."""
        assert self.engine is not None
        merge = await asyncio.to_thread(Merger.of_model, self.model_path, self.tune)
        follower = WeightsFollower(
            self.bindings["trainer"], self.weights_config, merge=merge, number=self.number, replicas=self.replicas
        )
        partial = self.tune.kind != "full"  # what is not trained the engine has from the initial model
        while True:
            try:
                tensors = await follower.newer(wait_s=2.0)
                if tensors is None:
                    continue
                self.pulled = follower.last
                if follower.trainer != self.trainer:
                    await self._leave()
                began = time.monotonic()
                await self.engine.update(follower.version, tensors, partial=partial)
                self.update_s = time.monotonic() - began
                self.trainer = follower.trainer
                self._have_weights.set()
            except (BindingError, VersionGone, RegionError, WeightsError, TimeoutError) as error:
                # Tried again, until a version is loaded; until then episodes go on with the weights in use. A newer
                # one may never come: the trainer waits for rollouts, perhaps for those of this very version.
                follower.not_loaded()
                self.trouble = f"weights: {error}"
                await asyncio.sleep(0.5)

    async def _leave(self) -> None:
        """End what is played for the trainer followed so far: a rollout has tokens of one trainer's versions only."""
        assert self.engine is not None
        self._have_weights.clear()
        await self.engine.hold(0)  # training comes before an evaluation, which notices that its weights are gone
        episodes = list(self._episodes)
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        await self._give_back(sorted(self._leases))
        self._leases.clear()

    # ---- episodes ------------------------------------------------------------------------------------------------

    async def _play(self, tasks: asyncio.TaskGroup) -> None:
        """Keep every place filled with an episode. EngineError once the engine is dead."""
        assert self.engine is not None
        while True:
            await self._have_weights.wait()
            trainer, buffer = self.trainer, self._buffer
            free = self.config.episodes - len(self._episodes)
            if free == 0:
                await asyncio.wait(self._episodes, return_when=asyncio.FIRST_COMPLETED)
                continue
            engine = self.engine.stats()
            if engine.dead:
                raise EngineError(f"the engine died ({engine.dead})")
            try:
                claim, holding = roles.RolloutBuffer.claim, sorted(self._leases)
                leases = await buffer.call(claim, self.name, engine.version, free, holding, 1.0)
            except NO_ANSWER as error:  # an answer that says what is broken ends the actor: it would come again
                self.trouble = f"claim: {error}"
                await asyncio.sleep(0.5)
                continue
            if trainer != self.trainer or not self._have_weights.is_set():  # it left that trainer meanwhile
                await self._give_back([lease.id for lease in leases], buffer)
                continue
            for lease in leases:
                self._leases.add(lease.id)
                episode = tasks.create_task(self._episode(lease, buffer))
                self._episodes.add(episode)
                episode.add_done_callback(self._episodes.discard)

    @property
    def _buffer(self) -> Binding[Any]:
        """The rollout buffer of the trainer that is followed."""
        return self.bindings["rollout_buffer"].only(buffer_of(self.trainer))

    async def _episode(self, lease: Lease, buffer: Binding[Any]) -> None:
        """One rollout, from its lease to the buffer that gave it. What the runner raises ends the actor."""
        rollout = await self.runner.run(lease)
        self.counts[rollout.status] += 1
        self.counts["tokens"] += rollout.sampled_tokens
        if rollout.status != "failed":
            rollout = await self._score(rollout)
        self.counts["flagged"] += bool(rollout.flags)
        try:
            taken = await buffer.call(roles.RolloutBuffer.put, rollout)
            self.counts["refused"] += not taken
        except NO_ANSWER as error:
            # No longer held, the lease is free again with the next claim, so nothing but this work is lost.
            self.counts["lost"] += 1
            self.trouble = f"{lease.rollout_id}: {error}"
        self._leases.discard(lease.id)

    async def _give_back(self, leases: list[str], buffer: Binding[Any] | None = None) -> None:
        """Return the leases of episodes that ended early: their tasks need not wait for the leases to expire."""
        if not leases:
            return
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await (buffer or self._buffer).call(roles.RolloutBuffer.abandon, leases, f"{self.name} ended them")
        except (BindingError, TimeoutError) as error:
            self.trouble = f"giving back {len(leases)} leases: {error or f'no answer in {GIVE_BACK_S:g} s'}"

    async def _score(self, rollout: Rollout) -> Rollout:
        self.monitor.inspect(rollout)  # before the reward functions, which may look at the flags
        try:
            scored = await self.bindings["rewarder"].call_within(self.score_limit_s, roles.Rewarder.score, rollout)
        except BindingError as error:
            rollout.reason = f"unscorable: {error}"
            return rollout
        return self.monitor.settle(scored)

    # ---- held-out episodes ---------------------------------------------------------------------------------------

    @concurrent_endpoint
    async def hold(self, seconds: float) -> tuple[str, int]:
        if self.engine is None or not self._have_weights.is_set():
            return self.trainer, roles.NO_VERSION
        async with asyncio.timeout(HOLD_LIMIT_S):  # then it is withdrawn: nobody would end it
            return self.trainer, await self.engine.hold(seconds)

    @concurrent_endpoint
    async def evaluate(self, seeds: list[int], greedy: bool, limit_s: float | None = None) -> list[Rollout]:
        await self._have_weights.wait()
        trainer = self.trainer
        episodes = [asyncio.create_task(self._held_out_episode(seed, greedy)) for seed in seeds]
        try:
            done, _ = await asyncio.wait(episodes, timeout=limit_s) if episodes else (set(), None)
            # The versions of two trainers may have the same number, and are not the same weights.
            return [task.result() for task in episodes if task in done] if self.trainer == trainer else []
        finally:
            for task in episodes:
                task.cancel()

    async def _held_out_episode(self, seed: int, greedy: bool) -> Rollout:
        async with self._held_out_places:
            # The same random numbers at every evaluation: two of them differ by their weights alone.
            lease = evaluation_lease(Task(f"held-out-{seed}", -1, seed))
            self._held_out_playing += 1
            try:
                return await self._score(await self.held_out_runner.run(lease, greedy=greedy))
            finally:
                self._held_out_playing -= 1

    async def _generate_held_out(self, request: GenerationRequest) -> Generation:
        """Under an id of its own: an evaluation that nobody waits for any more may still play the same task."""
        assert self.engine is not None
        return await self.engine.generate(replace(request, id=f"{request.id}@{next(self._held_out)}"))
