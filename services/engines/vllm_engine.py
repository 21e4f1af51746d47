"""vLLM as an engine: in this process, stepped by whoever owns it, with weights that are replaced between two steps.

A step is synchronous (no scheduling ahead), so the version in use when a token comes out is the version that made it.
An update lets the running requests go on: their keys and values are dropped with the rest of the cache and computed
again under the new weights, so every logprob is the one that a forward pass of the version in its span gives.

    load_weights:  check names and shapes ─▶ reload ─▶ keep a copy ─▶ reset the cache ─▶ raise the version
                                               └─ failed: reload the kept copy, raise ─▶ the caller

The copy, on the CPU by Hugging Face name, is what an update that broke off is rolled back to, and what completes an
update of some tensors: vLLM fuses tensors of a layer and takes all parts of one or none.

One GPU per engine: more of them would be worker processes of vLLM's, which outlive a killed actor. A generator is made
wider by more actors instead.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import set_num_threads  # by its own name: vLLM puts a function in its place that does nothing

from mesh.messages import VersionSpan
from services.engines.engine import (
    VLLM_TEMPERATURES,
    EngineConfig,
    EngineError,
    FinishReason,
    Generation,
    GenerationRequest,
    check_fits,
    check_positions,
    check_room,
    cover,
)
from services.engines.vllm_package import import_vllm
from services.engines.weight_names import WeightNames
from services.models import load_model

import_vllm()  # before the imports below: vLLM reads its environment when it is imported

from vllm import EngineArgs, SamplingParams  # noqa: E402
from vllm.inputs import tokens_input  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from services.engines import vllm_worker  # noqa: E402

CPU_BLOCK = 32  # tokens of a KV block, and the grain of prefix reuse; the CPU kernels want a multiple of 32
CPU_CACHE_BYTES = 2 << 30  # most that the KV cache takes by default


@dataclass(slots=True)
class _Row:
    """A request and what was sampled for it."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    cached: int = 0

    def generation(self, reason: FinishReason, error: str = "") -> Generation:
        return Generation(self.request.id, self.tokens, self.logprobs, self.versions, reason, self.cached, error)


class VLLMEngine:
    """`services.engines.Engine` over vLLM's LLMEngine, on CPU or one GPU.

    `model_path` is a Hugging Face folder. EngineError when vLLM is missing or built for another device; ValueError when
    the model or `config` does not suit it (vLLM's own messages).
    """

    def __init__(self, model_path: str, config: EngineConfig, version: int = 0) -> None:
        self._threads = config.threads or torch.get_num_threads()
        set_num_threads(self._threads)
        if current_platform.device_type != config.device:
            raise EngineError(
                f'device is "{config.device}", but the vLLM here runs on "{current_platform.device_type}": set '
                "generator.engine.device to that, or install the extra for the other kind of machine"
            )
        model = load_model(model_path, config.dtype)
        check_positions(model.config, config.max_length)
        self._config = config
        self._dtype = getattr(torch, config.dtype)
        self._version = version
        self._vocab_size: int = model.get_input_embeddings().num_embeddings
        self._names = WeightNames(model)
        self._weights: dict[str, torch.Tensor] = {
            name: tensor for name, tensor in model.state_dict().items() if self._names.first[name] == name
        }
        self._weights_missing = ""  # why there are no usable weights
        self._rng = random.Random(config.seed)
        self._running: dict[str, _Row] = {}
        # The engine core runs in this process: its worker processes would outlive a killed actor.
        with _environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", LD_PRELOAD=None, LOCAL_WORLD_SIZE=None):
            self._vllm = LLMEngine.from_engine_args(_engine_args(model_path, model.config, config))
        # It warns of each layer that a reload gives nothing to, at every update; here `vllm_worker.load` checks that.
        # After the engine was made: making one sets all levels anew.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        self._storage_sizes = self._rpc(vllm_worker.storage_sizes)

    def close(self) -> None:
        """Free what vLLM holds, in a process that goes on without it. The engine is of no use any more."""
        self._weights_missing = "it was closed"
        self._vllm.engine_core.shutdown()

    @property
    def version(self) -> int:
        return self._version

    @property
    def capacity(self) -> int:
        return self._config.max_batch

    @property
    def running(self) -> int:
        return len(self._running)

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        self._need_weights()
        check_fits(request, self._config.max_length, self._vocab_size)
        low, high = VLLM_TEMPERATURES
        if not (request.greedy or low <= request.temperature <= high):
            raise ValueError(
                f"request {request.id}: temperature is {request.temperature}, but vLLM samples at {low} to {high}"
            )
        check_room(request, self._running, self.capacity)
        self._vllm.add_request(request.id, tokens_input(list(request.prompt_ids)), self._sampling(request))
        self._running[request.id] = _Row(request)

    def _sampling(self, request: GenerationRequest) -> SamplingParams:
        # Without a seed of its own a request gets one from the engine's stream: vLLM's is the whole process's.
        seed = self._rng.getrandbits(63) if request.seed is None else request.seed % 2**63
        return SamplingParams(
            max_tokens=min(request.max_tokens, self._config.max_length - len(request.prompt_ids)),
            temperature=0.0 if request.greedy else request.temperature,
            seed=seed,
            # What is no token can never stop it; vLLM refuses such ids.
            stop_token_ids=[token for token in request.stop_ids if 0 <= token < self._vocab_size],
            ignore_eos=True,  # only the request says what stops it
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def abort(self, request_id: str) -> Generation | None:
        row = self._running.pop(request_id, None)
        if row is None:
            return None
        self._vllm.abort_request([request_id])
        return row.generation("abort")

    def step(self) -> list[Generation]:
        self._need_weights()
        if not self._running:
            return []
        # Every thread has a number of OpenMP threads of its own. vLLM plans a step's attention before the first kernel
        # of the step would set it, and then refuses to run with another.
        set_num_threads(self._threads)
        finished = []
        for output in self._vllm.step():
            row, (completion,) = self._running[output.request_id], output.outputs
            row.cached = output.num_cached_tokens or 0
            generation = self._append(row, completion)
            if generation is not None:
                finished.append(generation)
                del self._running[output.request_id]
        if any(generation.finish_reason == "error" for generation in finished):
            # What they leave in the cache may not be finite, and would leak through the mask into whoever comes next.
            self.reset_cache()
            self._rpc(vllm_worker.zero_cache)
        return finished

    def _append(self, row: _Row, completion: Any) -> Generation | None:
        """Add what was sampled to its row; the generation if that finished it."""
        for token, logprob in zip(completion.token_ids, completion.logprobs.logprobs, strict=True):
            if not math.isfinite(logprob):
                self._vllm.abort_request([row.request.id])
                return row.generation("error", f"weights of version {self._version} gave logits that are not finite")
            row.tokens.append(token)
            row.logprobs.append(logprob)
            cover(row.versions, self._version, len(row.tokens))
        if completion.finish_reason in (None, "stop", "length"):
            return row.generation(completion.finish_reason) if completion.finish_reason else None
        return row.generation("error", f"vLLM ended the request: {completion.finish_reason}")

    def reset_cache(self) -> None:
        # With requests running vLLM keeps the cache unless it may compute theirs again.
        self._vllm.reset_prefix_cache(reset_running_requests=True)

    # -- weights -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor], *, partial: bool = False) -> None:
        """As the interface says. The tensors are read twice: by vLLM, and into the copy."""
        given = self._names.fit(tensors, partial)
        if partial:
            self._need_weights()
        if not self._weights:  # released
            self._rpc(vllm_worker.take_back, self._storage_sizes)
        try:
            self._reload(self._completed(given) if partial else self._weights | given, everything=not partial)
        except Exception:
            self._roll_back(version)
            raise
        for name, tensor in given.items():
            if name in self._weights:
                self._weights[name].copy_(tensor)
            else:
                self._weights[name] = tensor.to("cpu", self._dtype, copy=True)
        self._weights_missing = ""
        # After the last tensor landed and before the next request comes in: what is cached is the old weights'.
        self.reset_cache()
        self._version = version

    def _completed(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The given tensors and all others of their layers, since vLLM fuses some of those."""
        layers = {layer for name in given if (layer := _layer(name))}
        return {name: tensor for name, tensor in self._weights.items() if _layer(name) in layers} | given

    def _reload(self, tensors: dict[str, torch.Tensor], everything: bool) -> None:
        self._rpc(vllm_worker.load, tensors, everything)

    def _roll_back(self, version: int) -> None:
        """Return to the weights before a load of `version` that broke off."""
        if not self._weights:  # there were none
            self._rpc(vllm_worker.release)
            return
        try:
            self._reload(self._weights, everything=True)
        except Exception as error:
            # Whoever sent the version learns why it could not be loaded; requests learn this, and the engine ends.
            self._weights_missing = f"loading version {version} broke off, and so did the way back ({error})"

    def release_weights(self) -> None:
        if self._running:
            raise EngineError(f"{self.running} requests are running: let them finish or abort them, then release")
        if not self._vllm.vllm_config.model_config.enforce_eager:
            raise EngineError(
                "CUDA graphs hold the addresses of the weights: to release them set generator.engine.vllm.enforce_eager"
            )
        self.reset_cache()
        self._weights_missing = "they were released"
        self._weights.clear()
        self._rpc(vllm_worker.release)

    def _need_weights(self) -> None:
        if self._weights_missing:
            raise EngineError(
                f"the engine has no weights: {self._weights_missing}; call load_weights with all of them first"
            )

    def _rpc(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of `vllm_worker` returns for the one worker there is."""
        return self._vllm.collective_rpc(call, args=arguments)[0]


@contextmanager
def _environment(**variables: str | None) -> Iterator[None]:
    """Set these variables, unless None, and leave all as they were: other processes are started with what stays.

    vLLM changes some for processes of its own, which are not started here.
    """
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        for name in before:
            os.environ.pop(name, None)
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    os.environ.update({name: value for name, value in variables.items() if value is not None})


def _layer(name: str) -> str:
    """The layer of a tensor, "model.layers.3.", from its name; empty for the embedding and the like."""
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else ""


def _engine_args(model_path: str, model_config: Any, config: EngineConfig) -> EngineArgs:
    on_cpu, vllm = config.device == "cpu", config.vllm
    settings: dict[str, Any] = {}
    if vllm.kv_cache_gb is not None:
        settings["kv_cache_memory_bytes"] = int(vllm.kv_cache_gb * 2**30)
    elif on_cpu:
        settings["kv_cache_memory_bytes"] = _cpu_cache_bytes(model_config.get_text_config(), config)
    elif vllm.gpu_memory_utilization is not None:
        settings["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    if on_cpu:
        settings["block_size"] = CPU_BLOCK
    return EngineArgs(
        model=model_path,
        skip_tokenizer_init=True,
        generation_config="vllm",  # not the model's: sampling and stopping are the request's alone
        dtype=config.dtype,  # named, because the one that vLLM picks by itself is not the checkpoint's
        max_model_len=config.max_length,
        max_num_seqs=config.max_batch,
        enable_prefix_caching=config.reuse_prefixes,
        logprobs_mode="processed_logprobs",  # log_softmax(logits / temperature)
        enforce_eager=on_cpu if vllm.enforce_eager is None else vllm.enforce_eager,
        # A step that is scheduled ahead would run under one version and come out under the next.
        async_scheduling=False,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **settings,
    )


def _cpu_cache_bytes(model_config: Any, config: EngineConfig) -> int:
    """What `max_batch` requests of `max_length` take, up to CPU_CACHE_BYTES. `model_config`: of the text model."""
    heads = getattr(model_config, "num_key_value_heads", None) or model_config.num_attention_heads
    width = getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads
    itemsize = getattr(torch, config.dtype).itemsize
    token = 2 * model_config.num_hidden_layers * heads * width * itemsize
    blocks = config.max_batch * -(-config.max_length // CPU_BLOCK) + 1  # vLLM keeps one for itself
    return min(blocks * CPU_BLOCK * token, CPU_CACHE_BYTES)
