"""The interface of a generation engine: token ids in; sampled ids, behaviour logprobs and version spans out.

An engine is synchronous and belongs to one thread (`services.engines.loop.EngineLoop`): whatever changes it, weights
above all, happens between two steps. That is what makes "every token records the version that made it" true without
a lock: a step runs under one version from its first kernel to its last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mesh.messages import VersionSpan

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineError(RuntimeError):
    """The engine cannot do what was asked in the state it is in."""


class WeightsError(ValueError):
    """The offered tensors do not fit the model. Nothing was loaded."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Sample up to `max_tokens` ids after `prompt_ids`.

    A token of `stop_ids` ends the generation and is part of it. `greedy` takes the most likely token and ignores
    `temperature` and `seed`. With a `seed` the random numbers are the request's own, so the same request under the
    same weights is the same text in whatever batch it runs (up to rounding in the logits); without one they come from
    the engine's stream. ValueError for a request that no engine could serve.
    """

    id: str
    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    greedy: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"request {self.id}: the prompt is empty; give at least one token id")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.id}: max_tokens is {self.max_tokens}; ask for at least 1")
        if not self.greedy and not self.temperature > 0.0:
            raise ValueError(f"request {self.id}: temperature is {self.temperature}; use greedy=True for no sampling")


@dataclass(slots=True)
class Generation:
    """What was sampled for one request.

    `logprobs[i]` is the log-probability of `token_ids[i]` over the full vocabulary at the sampling temperature (1 for
    greedy). `versions` covers `[0, len(token_ids))`, ascending: indices are relative to the sampled tokens.
    """

    id: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    finish_reason: FinishReason
    cached_tokens: int = 0  # prompt tokens whose keys and values were taken from an earlier request
    error: str = ""  # why, when finish_reason is "error"


class Engine(Protocol):
    """One model that generates for many requests at once. Not thread-safe."""

    @property
    def version(self) -> int:
        """The version of the weights in use."""
        ...

    @property
    def capacity(self) -> int:
        """How many requests may be in the engine at a time."""
        ...

    @property
    def running(self) -> int:
        """How many requests are in the engine."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; it starts with the next step.

        ValueError when this request does not fit the model (too long, unknown id); EngineError when there is no room
        or the weights are released. Neither disturbs the other requests.
        """
        ...

    def step(self) -> list[Generation]:
        """One more token for every request in the engine; returns the requests that are finished by it."""
        ...

    def abort(self, request_id: str) -> Generation | None:
        """Take a request out and return what it has so far; None when the engine does not have it."""
        ...

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights, drop the cache, then raise the version. Requests in the engine go on.

        WeightsError when a tensor is missing, unexpected or of another shape: the old weights stay in use.
        """
        ...

    def release_weights(self) -> None:
        """Free the memory of weights and cache. Until `load_weights`, `submit` and `step` raise EngineError."""
        ...

    def reset_cache(self) -> None:
        """Forget the keys and values of finished requests, so that nothing computed so far is reused."""
        ...


def check_fits(request: GenerationRequest, max_length: int, vocab_size: int) -> None:
    """ValueError when the prompt leaves no room below `max_length` tokens or holds ids outside the vocabulary."""
    length = len(request.prompt_ids)
    if length >= max_length:
        raise ValueError(
            f"request {request.id}: its prompt of {length} tokens leaves no room for a new one within max_length "
            f"{max_length}; shorten the prompt or raise max_length"
        )
    low, high = min(request.prompt_ids), max(request.prompt_ids)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"request {request.id}: token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}; "
            "was the prompt made by another model's tokenizer?"
        )


class EngineConfig(BaseModel):
    """How a generator generates."""

    model_config = ConfigDict(extra="forbid")

    engine: Literal["transformers"] = Field("transformers", description="Which engine generates.")
    max_batch: int = Field(
        64, ge=1, description="Requests generated at once, and slots of the KV cache; at best the episodes at a time."
    )
    max_length: int = Field(2048, ge=2, description="Longest prompt plus generation of a request, in tokens.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Type of weights and KV cache; logprobs are computed in float32 in any case."
    )
    device: str = Field("cpu", description='Torch device of the engine: "cpu", "cuda", "cuda:1".')
    update: Literal["in_flight", "drain"] = Field(
        "in_flight",
        description="New weights while requests run: in_flight loads between two steps and the requests go on (their "
        "spans name both versions, keys and values of earlier tokens stay those of the old one); drain lets them "
        "finish first.",
    )
    threads: int | None = Field(
        None, ge=1, description="Torch threads of the process; a tiny model is fastest with 1. None leaves them alone."
    )
    seed: int | None = Field(
        None,
        description="Seed of the sampling. None: in a run its run.seed; for requests outside of one, from the OS.",
    )
    request_limit_s: float = Field(600.0, gt=0, description="Longest a request may take, its waiting included.")
    update_limit_s: float = Field(120.0, gt=0, description="Longest an update may take, the draining included.")

    @model_validator(mode="after")
    def _no_half_on_cpu(self) -> EngineConfig:
        if self.dtype == "float16" and self.device == "cpu":
            raise ValueError('dtype "float16" is for GPUs: on device "cpu" use "bfloat16" or "float32"')
        return self
