"""Tiny random decoders, and the plain forward pass that an engine's logprobs are compared with."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.engines.engine import Generation, GenerationRequest

VOCAB = 58


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
        "head_dim": 8,
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


@pytest.fixture
def tiny() -> Callable[..., Any]:
    return make_model


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    rng = random.Random(0)
    return lambda length: [rng.randrange(6, VOCAB) for _ in range(length)]


@pytest.fixture
def expect_logprobs() -> Callable[..., None]:
    return assert_logprobs_of


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


def assert_logprobs_of(model: Any, request: GenerationRequest, generation: Generation) -> None:
    difference = worst_difference(model, request, generation)
    assert difference < 1e-4, f"{request.id}: logprobs differ by {difference}"


@pytest.fixture
def logprob_error() -> Callable[..., float]:
    return worst_difference
