"""The loop over an engine that is all script: what it was asked, in which order, and under which version."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest
import torch
from engine_builders import expect_logprobs, make_model, until

from mesh.messages import VersionSpan
from services.engines.engine import EngineConfig, EngineError, Generation, GenerationRequest
from services.engines.loop import EngineLoop
from services.engines.transformers_engine import TransformersEngine


class ScriptedEngine:
    """Samples the version as token; a step waits for the gate and then for `hold`, if they are closed."""

    def __init__(self, capacity: int = 8) -> None:
        self.version, self.capacity = 0, capacity
        self.requests: dict[str, GenerationRequest] = {}
        self.done: dict[str, list[int]] = {}
        self.log: list[str] = []
        self.most = 0
        self.gate = threading.Event()
        self.gate.set()
        self.in_step = threading.Event()
        self.fault: Exception | None = None

    @property
    def running(self) -> int:
        return len(self.requests)

    def submit(self, request: GenerationRequest) -> None:
        if len(request.prompt_ids) > 100:
            raise ValueError(f"{request.id} is too long")
        self.log.append(f"submit {request.id} v{self.version}")
        self.requests[request.id] = request
        self.done[request.id] = []

    def step(self) -> list[Generation]:
        if not self.requests:
            return []
        self.in_step.set()
        assert self.gate.wait(20), "a test left the gate closed"
        if self.fault:
            raise self.fault
        self.most = max(self.most, self.running)
        finished = []
        for key, request in list(self.requests.items()):
            self.done[key].append(self.version)
            if len(self.done[key]) == request.max_tokens:
                finished.append(self._finish(key, "length"))
        return finished

    def _finish(self, key: str, reason: Any) -> Generation:
        tokens = self.done.pop(key)
        del self.requests[key]
        spans = [VersionSpan(v, tokens.index(v), tokens.index(v) + tokens.count(v)) for v in sorted(set(tokens))]
        return Generation(key, tokens, [0.0] * len(tokens), spans, reason)

    def abort(self, request_id: str) -> Generation | None:
        return self._finish(request_id, "abort") if request_id in self.requests else None

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor], *, partial: bool = False) -> None:
        if "bad" in tensors:
            raise ValueError("tensor bad is unexpected")
        self.log.append(f"load {'part of ' if partial else ''}v{version}")
        self.version = version

    def release_weights(self) -> None:
        self.log.append("release")

    def reset_cache(self) -> None:
        self.log.append("reset")


def ask(name: str, max_tokens: int = 3, length: int = 2) -> GenerationRequest:
    return GenerationRequest(name, [1] * length, max_tokens)


def drive(
    body: Callable[[EngineLoop, ScriptedEngine], Coroutine[Any, Any, None]], capacity: int = 8, **settings: Any
) -> ScriptedEngine:
    """Run `body(loop, engine)` under asyncio, and stop the loop after it."""
    engine = ScriptedEngine(capacity)

    async def main() -> None:
        loop = EngineLoop(engine, EngineConfig(max_batch=capacity, **settings))
        try:
            await asyncio.wait_for(body(loop, engine), 30)
        finally:
            engine.gate.set()
            await loop.stop()

    asyncio.run(main())
    return engine


async def inside_a_step(engine: ScriptedEngine) -> None:
    """Return when the engine is held in a step by the closed gate."""
    engine.in_step.clear()
    assert await asyncio.to_thread(engine.in_step.wait, 20)


def test_requests_awaited_together_are_generated_together_up_to_the_capacity() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        engine.gate.clear()
        tasks = [asyncio.create_task(loop.generate(ask(f"r{i}"))) for i in range(20)]
        await until(lambda: loop.stats().running + loop.stats().waiting == 20)
        engine.gate.set()
        done = await asyncio.gather(*tasks)
        assert [generation.id for generation in done] == [f"r{i}" for i in range(20)]
        stats = loop.stats()
        assert (stats.tokens, stats.prompt_tokens, stats.running, stats.waiting, stats.dead) == (60, 40, 0, 0, None)
        assert stats.busy_s > 0
        assert stats.idle_s > 0

    assert drive(body).most == 8


@pytest.mark.parametrize("update", ["in_flight", "drain"])
def test_no_request_starts_between_the_asking_for_an_update_and_its_landing(update: str) -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        engine.gate.clear()
        running = asyncio.create_task(loop.generate(ask("running", 5)))
        await inside_a_step(engine)
        queued = asyncio.create_task(loop.generate(ask("queued before")))
        await until(lambda: loop.stats().waiting == 1)
        change = asyncio.create_task(loop.update(1, {}))
        await until(lambda: len(loop._changes) == 1)
        late = asyncio.create_task(loop.generate(ask("queued after")))
        await until(lambda: loop.stats().waiting == 2)
        engine.gate.set()
        await change
        spans = (await running).versions
        if update == "drain":
            assert spans == [VersionSpan(0, 0, 5)]
        else:
            assert spans == [VersionSpan(0, 0, 1), VersionSpan(1, 1, 5)]
        assert (await queued).versions == (await late).versions == [VersionSpan(1, 0, 3)]
        assert loop.stats().version == 1
        assert loop.stats().updates == 1

    engine = drive(body, update=update)
    assert engine.log == ["submit running v0", "load v1", "submit queued before v1", "submit queued after v1"]


def test_a_failed_load_raises_to_its_caller_and_everything_else_goes_on_with_the_old_version() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        engine.gate.clear()
        running = asyncio.create_task(loop.generate(ask("running", 5)))
        await inside_a_step(engine)
        change = asyncio.create_task(loop.update(1, {"bad": torch.zeros(1)}))
        await until(lambda: len(loop._changes) == 1)
        engine.gate.set()
        with pytest.raises(ValueError, match="tensor bad is unexpected"):
            await change
        assert (await running).versions == [VersionSpan(0, 0, 5)]
        assert (await loop.generate(ask("next"))).versions == [VersionSpan(0, 0, 3)]
        stats = loop.stats()
        assert (stats.version, stats.updates, stats.failed_updates, stats.dead) == (0, 0, 1, None)
        await loop.update(2, {})
        assert loop.stats().version == 2

    drive(body)


def test_a_drain_that_takes_too_long_is_withdrawn_and_names_who_was_running() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        engine.gate.clear()
        running = asyncio.create_task(loop.generate(ask("endless", 5)))
        await inside_a_step(engine)
        with pytest.raises(TimeoutError, match=r"update to version 1 took longer.*withdrawn.*running: endless"):
            await loop.update(1, {})
        engine.gate.set()
        assert (await running).versions == [VersionSpan(0, 0, 5)]
        assert (await loop.generate(ask("next"))).versions == [VersionSpan(0, 0, 3)]
        assert (loop.stats().version, loop.stats().failed_updates) == (0, 1)

    engine = drive(body, update="drain", update_limit_s=0.1)
    assert engine.log == ["submit endless v0", "submit next v0"]


def test_releasing_the_weights_waits_for_running_requests_in_either_mode() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        engine.gate.clear()
        running = asyncio.create_task(loop.generate(ask("running", 5)))
        await inside_a_step(engine)
        release = asyncio.create_task(loop.release_weights())
        await until(lambda: len(loop._changes) == 1)
        engine.gate.set()
        await release
        assert (await running).finish_reason == "length"

    assert drive(body, update="in_flight").log == ["submit running v0", "release"]


@pytest.mark.parametrize("update", ["in_flight", "drain"])
def test_an_update_waits_for_the_end_of_a_hold_and_requests_do_not(update: str) -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        assert await loop.hold(1000.0) == 0
        change = asyncio.create_task(loop.update(1, {}))
        await until(lambda: len(loop._changes) == 1)
        assert (await loop.generate(ask("held", 5))).versions == [VersionSpan(0, 0, 5)]
        assert not change.done()
        assert await loop.hold(0) == 0
        await change
        assert (await loop.generate(ask("after"))).versions == [VersionSpan(1, 0, 3)]

    assert drive(body, update=update).log == ["submit held v0", "load v1", "submit after v1"]


def test_a_hold_that_nobody_ends_ends_by_itself_in_a_loop_that_has_nothing_else_to_do() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        await loop.hold(0.2)
        await loop.update(1, {})
        assert loop.stats().version == 1

    drive(body)


def test_a_hold_comes_before_an_update_that_waits_for_running_requests() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        engine.gate.clear()
        running = asyncio.create_task(loop.generate(ask("running", 5)))
        await inside_a_step(engine)
        change = asyncio.create_task(loop.update(1, {}))
        await until(lambda: len(loop._changes) == 1)
        holding = asyncio.create_task(loop.hold(1000.0))
        await until(lambda: len(loop._changes) == 2)
        engine.gate.set()
        assert await holding == 0
        await running
        assert (await loop.generate(ask("held"))).versions == [VersionSpan(0, 0, 3)]
        assert not change.done()
        await loop.hold(0)
        await change

    drive(body, update="drain")


def test_a_loop_that_is_stopped_waits_for_no_hold() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        await loop.hold(1000.0)
        change = asyncio.create_task(loop.update(1, {}))
        await until(lambda: len(loop._changes) == 1)
        await loop.stop()
        with pytest.raises(EngineError, match="the engine loop was stopped"):
            await change

    drive(body)


def test_a_request_that_does_not_fit_fails_alone() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        requests = [ask("a"), ask("b", length=101), ask("c")]
        results = await asyncio.gather(*map(loop.generate, requests), return_exceptions=True)
        assert isinstance(results[0], Generation)
        assert isinstance(results[2], Generation)
        assert isinstance(results[1], ValueError)
        assert str(results[1]) == "b is too long"
        assert loop.stats().running == 0

    drive(body)


def test_an_id_in_use_is_refused() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        engine.gate.clear()
        first = asyncio.create_task(loop.generate(ask("a")))
        await inside_a_step(engine)
        with pytest.raises(ValueError, match="a is in the engine already"):
            await loop.generate(ask("a"))
        engine.gate.set()
        assert (await first).id == "a"

    drive(body)


def test_aborting_answers_running_and_waiting_requests_with_what_they_have() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        engine.gate.clear()
        running = asyncio.create_task(loop.generate(ask("running", 50)))
        await inside_a_step(engine)
        waiting = asyncio.create_task(loop.generate(ask("waiting")))
        await until(lambda: loop.stats().waiting == 1)
        for key in ("running", "waiting", "unknown"):
            loop.abort(key)
        engine.gate.set()
        assert ((await waiting).finish_reason, (await waiting).token_ids) == ("abort", [])
        assert ((await running).finish_reason, (await running).token_ids) == ("abort", [0])

    assert drive(body, capacity=1).log == ["submit running v0"]


def test_a_caller_that_is_cancelled_takes_its_request_out_of_the_engine() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        engine.gate.clear()
        task = asyncio.create_task(loop.generate(ask("unwanted", 10_000_000)))
        await inside_a_step(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.gate.set()
        await until(lambda: loop.stats().running == 0)
        assert engine.requests == {}

    drive(body)


def test_a_request_over_its_time_limit_names_where_it_was_and_is_taken_out() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        engine.gate.clear()
        message = (
            r"request slow took longer than request_limit_s=0.2 s: it is (running|waiting).*the engine has been at '"
        )
        with pytest.raises(TimeoutError, match=message):
            await loop.generate(ask("slow", 10_000_000))
        engine.gate.set()
        await until(lambda: loop.stats().running == 0)
        assert engine.requests == {}

    drive(body, request_limit_s=0.2)


def test_an_engine_that_raises_fails_everything_pending_with_the_cause() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        engine.gate.clear()
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(loop.generate(ask(f"r{i}"))) for i in range(3)]
        await until(lambda: loop.stats().running + loop.stats().waiting == 3)
        tasks.append(asyncio.create_task(loop.update(1, {})))
        await until(lambda: len(loop._changes) == 1)
        engine.fault = RuntimeError("out of memory")
        engine.gate.set()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert "the engine died (RuntimeError: out of memory)" in str(result)
            assert result.__cause__ is engine.fault
        assert loop.stats().dead == "RuntimeError: out of memory"
        with pytest.raises(EngineError, match="out of memory"):
            await loop.generate(ask("later"))
        with pytest.raises(EngineError, match="out of memory"):
            await loop.update(2, {})

    drive(body, capacity=1, update="drain")


def test_stopping_fails_what_is_pending_and_ends_the_thread() -> None:
    async def body(loop: EngineLoop, engine: ScriptedEngine) -> None:
        engine.gate.clear()
        task = asyncio.create_task(loop.generate(ask("unfinished", 10_000_000)))
        await inside_a_step(engine)
        with pytest.raises(TimeoutError, match=r"did not stop within 0.05 s: the engine has been at 'step'"):
            await loop.stop(0.05)
        engine.gate.set()
        await loop.stop()
        assert not loop._thread.is_alive()
        with pytest.raises(EngineError, match="the engine loop was stopped"):
            await task
        with pytest.raises(EngineError, match="the engine loop was stopped"):
            await loop.generate(ask("late"))
        assert loop.stats().dead is None

    drive(body)


@pytest.mark.parametrize("update", ["in_flight", "drain"])
def test_episodes_over_a_real_engine_survive_updates_with_exact_logprobs(update: str, prompt: Callable) -> None:
    models = [make_model(seed=seed) for seed in range(3)]
    config = EngineConfig(max_batch=6, max_length=400, seed=0, update=update)
    answered: list[tuple[GenerationRequest, Generation]] = []
    due = {version: asyncio.Event() for version in (1, 2)}

    async def episode(loop: EngineLoop, name: str) -> None:
        ids = prompt(20)
        for turn in range(6):
            request = GenerationRequest(f"{name}/{turn}", ids, 8)
            generation = await loop.generate(request)
            answered.append((request, generation))
            for version in due:
                if len(answered) >= 12 * version:
                    due[version].set()
            ids = ids + generation.token_ids + prompt(4)

    async def updates(loop: EngineLoop) -> None:
        for version in due:
            await due[version].wait()
            await loop.update(version, models[version].state_dict())

    async def main() -> None:
        loop = EngineLoop(TransformersEngine(make_model(seed=0), config), config)
        await asyncio.gather(updates(loop), *(episode(loop, f"e{i}") for i in range(6)))
        stats = loop.stats()
        assert (stats.version, stats.updates, stats.tokens) == (2, 2, 6 * 6 * 8)
        assert stats.cached_tokens > 0
        await loop.stop()

    asyncio.run(main())
    whole = [(request, generation) for request, generation in answered if len(generation.versions) == 1]
    assert {generation.versions[0].version for _, generation in whole} == {0, 1, 2}
    for request, generation in whole:
        expect_logprobs(models[generation.versions[0].version], request, generation)
    if update == "drain":
        assert len(whole) == len(answered)
