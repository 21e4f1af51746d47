"""vLLM against a transformers forward of the same weights, on the demo's model and on a real small one."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_builders import expect_logprobs, generate, until, worst_difference

from mesh.messages import VersionSpan
from services.bundled import SMOLLM2, bundled_model
from services.demo.warm_start import demo_model
from services.engines.engine import Generation, GenerationRequest
from services.engines.loop import EngineLoop
from services.engines.vllm_engine import VLLMEngine
from services.models import load_model

MODELS: dict[str, Callable[[], Path]] = {"demo": lambda: demo_model("easy"), "smollm2": lambda: bundled_model(SMOLLM2)}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest) -> Path:
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def old(folder: Path) -> Any:
    return load_model(str(folder))


@pytest.fixture(scope="module")
def new(old: Any) -> Any:
    """The weights after an update that one sees: every matrix moved by a tenth of its spread."""
    model, generator = copy.deepcopy(old), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.1 * parameter.std() * noise
    return model


@pytest.fixture
def engine(vllm_engines: Any, folder: Path) -> VLLMEngine:
    return vllm_engines.fresh(folder)


def requests(prompt: Callable, max_tokens: int = 6) -> list[GenerationRequest]:
    shapes = [(3, 1.0), (40, 0.7), (70, 1.6), (20, 1.0)]
    asked = [GenerationRequest(f"r{n}", prompt(n), max_tokens, temperature, seed=n) for n, temperature in shapes]
    return [*asked, GenerationRequest("greedy", prompt(33), max_tokens, greedy=True)]


def test_logprobs_equal_a_forward_before_and_after_an_update(
    engine: VLLMEngine, old: Any, new: Any, prompt: Callable
) -> None:
    for version, model in enumerate((old, new)):
        engine.load_weights(version, model.state_dict())
        asked = requests(prompt)
        done = generate(engine, *asked)
        for request in asked:
            assert done[request.id].versions == [VersionSpan(version, 0, 6)]
            expect_logprobs(model, request, done[request.id])


@pytest.mark.parametrize("reset", [True, False], ids=["with the reset", "without the reset"])
def test_a_prefix_cache_that_outlived_an_update_would_show(
    engine: VLLMEngine, new: Any, prompt: Callable, monkeypatch: pytest.MonkeyPatch, reset: bool
) -> None:
    if not reset:
        monkeypatch.setattr(VLLMEngine, "reset_cache", lambda self: None)
    ids = prompt(100)
    generate(engine, GenerationRequest("before", ids, 2))
    engine.load_weights(1, new.state_dict())
    request = GenerationRequest("after", [*ids, 7], 6)
    difference = worst_difference(new, request, generate(engine, request)["after"])
    assert difference < 1e-4 if reset else difference > 1e-2


class Held:
    """An engine that stands still before its sixth step until it is let go."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine, self._steps = engine, 0
        self.reached, self.go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Generation]:
        if self.running:
            self._steps += 1
            if self._steps == 6:
                self.reached.set()
                assert self.go.wait(60), "the test did not let the engine go on"
        return self._engine.step()


@pytest.mark.parametrize("update", ["in_flight", "drain"])
def test_requests_run_on_through_an_update_and_later_ones_start_after_it(
    update: str, vllm_engines: Any, folder: Path, old: Any, new: Any, prompt: Callable
) -> None:
    engine = vllm_engines.fresh(folder, update=update)
    asked = requests(prompt, max_tokens=12)
    late = GenerationRequest("late", asked[2].prompt_ids, 6)  # a prefix that the old weights have computed
    held = Held(engine)

    async def scenario() -> dict[str, Generation]:
        loop = EngineLoop(held, engine._config)
        tasks = [asyncio.create_task(loop.generate(request)) for request in asked]
        assert await asyncio.to_thread(held.reached.wait, 60)
        change = asyncio.create_task(loop.update(1, new.state_dict()))
        await until(lambda: len(loop._changes) == 1)
        tasks.append(asyncio.create_task(loop.generate(late)))
        await until(lambda: loop.stats().waiting == 1)
        held.go.set()
        await change
        done = await asyncio.gather(*tasks)
        await loop.stop()
        return {generation.id: generation for generation in done}

    done = asyncio.run(asyncio.wait_for(scenario(), 120))
    assert done["late"].versions == [VersionSpan(1, 0, 6)]
    expect_logprobs(new, late, done["late"])
    models = [old, new]
    for request in asked:
        spans = done[request.id].versions
        assert [span.version for span in spans] == ([0, 1] if update == "in_flight" else [0])
        for span in spans:
            stem = request.prompt_ids + done[request.id].token_ids[: span.start]
            part = GenerationRequest(request.id, stem, 12, request.temperature, greedy=request.greedy)
            tokens, logprobs = done[request.id].token_ids, done[request.id].logprobs
            made = Generation(request.id, tokens[span.start : span.stop], logprobs[span.start : span.stop], [], "stop")
            expect_logprobs(models[span.version], part, made)
