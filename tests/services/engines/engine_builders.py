"""Tiny random decoders, a vLLM engine that is started once, and the forward pass that logprobs are compared with."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.engines.engine import Engine, EngineConfig, Generation, GenerationRequest

VOCAB = 58
ARCHITECTURES = ["qwen3-tied", "llama-tied", "llama-untied"]


def make_model(architecture: str = "qwen3-tied", seed: int = 0, **overrides: Any) -> Any:
    """ "qwen3-tied", "llama-tied" or "llama-untied" (the last two with grouped-query attention); weights far from 0."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 32,  # the smallest that vLLM has a kernel for on CPU
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": None,
        "bos_token_id": None,
        "tie_word_embeddings": architecture.endswith("-tied"),
        **overrides,
    }
    if architecture.startswith("qwen3"):
        return Qwen3ForCausalLM(Qwen3Config(num_key_value_heads=4, **shape)).eval()
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **shape)).eval()


def worst_difference(model: Any, request: GenerationRequest, generation: Generation) -> float:
    """The largest difference from log_softmax(logits / temperature) of one forward pass over the same ids."""
    ids = request.prompt_ids + generation.token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].float()
    logprobs = torch.log_softmax(logits / (1.0 if request.greedy else request.temperature), dim=-1)
    start = len(request.prompt_ids)
    wanted = [logprobs[start - 1 + i, token].item() for i, token in enumerate(generation.token_ids)]
    assert len(generation.logprobs) == len(wanted) > 0
    return max(abs(a - b) for a, b in zip(generation.logprobs, wanted, strict=True))


def expect_logprobs(model: Any, request: GenerationRequest, generation: Generation) -> None:
    difference = worst_difference(model, request, generation)
    assert difference < 1e-4, f"{request.id}: logprobs differ by {difference}"


def finish(engine: Engine) -> dict[str, Generation]:
    """Step until nothing runs any more."""
    done: dict[str, Generation] = {}
    while engine.running:
        done.update((generation.id, generation) for generation in engine.step())
    return done


def generate(engine: Engine, *requests: GenerationRequest) -> dict[str, Generation]:
    for request in requests:
        engine.submit(request)
    return finish(engine)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  what is waited for happens in the loop's thread
            await asyncio.sleep(0.001)


class VLLMEngines:
    """vLLM engines over folders, each started once: starting one takes seconds.

    `fresh` sets one back to its beginning under another configuration, of which everything is this side of vLLM.
    """

    def __init__(self) -> None:
        self._engines: dict[str, Any] = {}

    def fresh(self, folder: Path | str, **settings: Any) -> Any:
        from services.engines.vllm_engine import VLLMEngine

        if str(folder) not in self._engines:
            started = EngineConfig(engine="vllm", max_batch=64, max_length=400, threads=1)
            engine = self._engines[str(folder)] = VLLMEngine(str(folder), started)
            engine.at_the_start = {name: tensor.clone() for name, tensor in engine._weights.items()}
        engine = self._engines[str(folder)]
        for request_id in list(engine._running):
            engine.abort(request_id)
        engine.load_weights(0, engine.at_the_start)
        engine._config = EngineConfig(**{"engine": "vllm", "max_batch": 8, "max_length": 400, "seed": 0, **settings})
        engine._rng = random.Random(engine._config.seed)
        return engine

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
