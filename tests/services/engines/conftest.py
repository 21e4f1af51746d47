"""Both kinds of engine over tiny random decoders."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_builders import VOCAB, VLLMEngines, make_model

from services.engines.engine import Engine, EngineConfig
from services.engines.transformers_engine import TransformersEngine


@pytest.fixture
def prompt() -> Callable[[int], list[int]]:
    """Random ids, the same ones in every run of a test."""
    rng = random.Random(0)
    return lambda length: [rng.randrange(6, VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def vllm_engines() -> Iterator[VLLMEngines]:
    engines = VLLMEngines()
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def saved(architecture: str) -> Path:
        if architecture not in folders:
            folders[architecture] = tmp_path_factory.mktemp(architecture)
            make_model(architecture).save_pretrained(folders[architecture])
        return folders[architecture]

    return saved


@pytest.fixture(params=["transformers", "vllm"])
def make_engine(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Callable[..., Engine]:
    """A new engine over `make_model(architecture)`, of either kind. vLLM's is one and the same: use one at a time."""

    def make(architecture: str = "qwen3-tied", **settings: Any) -> Engine:
        if request.param == "vllm":
            return request.getfixturevalue("vllm_engines").fresh(model_folder(architecture), **settings)
        config = EngineConfig(**{"max_batch": 8, "max_length": 400, "seed": 0, **settings})
        return TransformersEngine(make_model(architecture), config)

    return make
