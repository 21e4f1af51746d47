"""Continuous batching over any Hugging Face decoder that uses the standard Cache API.

A step gives every request in the engine one more token. For a running request that is a forward pass over one new
token, for one that has just joined over its whole prompt, or over the part of it that no retained slot has seen; the
engine makes no other difference between the two. Rows with about as many new tokens share a forward pass, and all
rows of the step are sampled together.

Prefix reuse: a finished request leaves its keys and values in its slot until the slot is needed. The next turn of an
episode, whose prompt is the earlier prompt, the sampled tokens and the tool's answer, goes on from there. An update of
the weights forgets them all, since they belong to the old ones. A request that is running then keeps its own (its spans
name both versions) and leaves nothing to reuse.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mesh.messages import VersionSpan
from services.engines.engine import (
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
from services.engines.kv_slots import KVSlots
from services.engines.weight_names import WeightNames

PADDING = 128  # positions a forward pass may waste on padding; a second pass over a tiny model costs about as much
PREFILL_TOKENS = 16384  # positions of one forward pass, padding included, so that long prompts do not exhaust memory


@dataclass(slots=True)
class _Row:
    """A request and the slot that holds its sequence. Retained for reuse after it has finished."""

    request: GenerationRequest
    slot: int
    tokens: list[int]  # the prompt and what was sampled
    cached: int  # leading tokens whose keys and values are in the slot
    reused: int  # of these, what an earlier request had computed
    rng: random.Random
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    reusable: bool = True  # every key and value in the slot was computed by the weights in use

    def generation(self, reason: FinishReason, error: str = "") -> Generation:
        sampled = self.tokens[len(self.request.prompt_ids) :]
        return Generation(self.request.id, sampled, self.logprobs, self.spans, reason, self.reused, error)


class TransformersEngine:
    """`services.engines.Engine` over a transformers model, on CPU or one GPU.

    `model` is a folder (or name) for `from_pretrained`, or a model, which the engine then owns: it is moved, put into
    evaluation mode and overwritten by `load_weights`, so it must not be the one that a trainer trains. ValueError for a
    model whose attention is not plain causal attention up to `max_length`.
    """

    def __init__(self, model: Any, config: EngineConfig, version: int = 0) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        dtype = getattr(torch, config.dtype)
        if isinstance(model, str):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
        self._model: Any = model.to(device=config.device, dtype=dtype).eval()
        _check_attention(self._model.config, config.max_length)
        self._config = config
        self._device = torch.device(config.device)
        self._version = version
        self._layers: int = self._model.config.get_text_config().num_hidden_layers
        self._vocab_size: int = self._model.get_input_embeddings().num_embeddings
        self._names = WeightNames(self._model)
        self._released = False
        self._rng = random.Random(config.seed)
        self._cache = self._new_cache()
        self._running: dict[str, _Row] = {}
        self._retained: dict[int, _Row] = {}  # by slot, the one finished first at the front
        self._free = set(range(config.max_batch))

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
        check_room(request, self._running, self.capacity)
        slot, cached = self._take_slot(request.prompt_ids)
        rng = self._rng if request.seed is None else random.Random(request.seed)
        self._running[request.id] = _Row(request, slot, list(request.prompt_ids), cached, cached, rng)

    def abort(self, request_id: str) -> Generation | None:
        row = self._running.pop(request_id, None)
        if row is None:
            return None
        self._leave(row)
        return row.generation("abort")

    def _take_slot(self, prompt: list[int]) -> tuple[int, int]:
        """A slot, and how many tokens of the prompt it holds already.

        Best the one with the longest retained sequence that the prompt extends, then an empty one, then the one that
        was retained longest. At least one token of the prompt is left to compute: its logits are needed.
        """
        best: _Row | None = None
        for row in self._retained.values():
            n = row.cached
            if n < len(prompt) and row.tokens[n - 1] == prompt[n - 1] and (best is None or n > best.cached):
                best = row if row.tokens[:n] == prompt[:n] else best
        if best is not None:
            del self._retained[best.slot]
            return best.slot, best.cached
        if self._free:
            slot = min(self._free)  # low slots first keeps the running ones together, to be read in place
            self._free.remove(slot)
            return slot, 0
        slot = next(iter(self._retained))
        del self._retained[slot]
        return slot, 0

    def _leave(self, row: _Row) -> None:
        if row.reusable and row.cached and self._config.reuse_prefixes:
            self._retained[row.slot] = row
        else:
            self._free.add(row.slot)

    def reset_cache(self) -> None:
        self._free.update(self._retained)
        self._retained.clear()
        for row in self._running.values():
            if row.logprobs:
                row.reusable = False
            else:  # not started: what it was going to reuse is forgotten as well
                row.cached = row.reused = 0

    # -- one step ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        self._need_weights()
        if not self._running:
            return []
        groups = _group(list(self._running.values()))
        logits = torch.cat([self._forward(group) for group in groups])
        rows = [row for group in groups for row in group]
        tokens, logprobs = _sample(logits, rows)
        finished = []
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            generation = self._append(row, token, logprob)
            if generation is not None:
                finished.append(generation)
                del self._running[row.request.id]
                self._leave(row)
        return finished

    def _forward(self, rows: list[_Row]) -> torch.Tensor:
        """Feed the tokens that the rows' slots lack. Next-token logits `(rows, vocab)`, in the model's dtype."""
        width = max(len(row.tokens) - row.cached for row in rows)
        low, high = rows[0].slot, rows[-1].slot + 1
        idle = high - low - len(rows)
        by_slot: Mapping[int, _Row | None] = {row.slot: row for row in rows}
        if idle * width <= len(rows):
            # Reading consecutive slots in place beats gathering them, even with idle ones between as padding.
            by_slot = {slot: by_slot.get(slot) for slot in range(low, high)}
        starts = [row.cached if row else 0 for row in by_slot.values()]
        new = [row.tokens[row.cached :] if row else [] for row in by_slot.values()]
        positions, visible = self._cache.open(list(by_slot), starts, [len(ids) for ids in new])
        ids = torch.tensor([[0] * (width - len(tail)) + tail for tail in new], device=self._device)
        dtype = self._model.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=self._device)
        mask.masked_fill_(~visible, torch.finfo(dtype).min)
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        for row in rows:
            row.cached = len(row.tokens)
        logits = output.logits[:, -1]
        return logits if len(by_slot) == len(rows) else logits[[row.slot - low for row in rows]]

    def _append(self, row: _Row, token: int, logprob: float) -> Generation | None:
        """Add a sampled token to its row; the generation if that finished it."""
        if not math.isfinite(logprob):
            # The slot may hold NaN, which would leak through the mask into the next sequence there.
            row.reusable = False
            self._cache.clear(row.slot)
            return row.generation("error", f"weights of version {self._version} gave logits that are not finite")
        row.tokens.append(token)
        row.logprobs.append(logprob)
        cover(row.spans, self._version, len(row.logprobs))
        if token in row.request.stop_ids:
            return row.generation("stop")
        if len(row.logprobs) == row.request.max_tokens or len(row.tokens) == self._config.max_length:
            return row.generation("length")
        return None

    # -- weights -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor], *, partial: bool = False) -> None:
        """As the interface says; while it runs, both the old and the new tensors are in memory.

        Everything that can fail (the check, the copying) comes before the first tensor is replaced.
        """
        given = self._names.fit(tensors, partial)
        if partial:
            self._need_weights()
        targets: dict[str, torch.Tensor] = self._model.state_dict(keep_vars=True)
        copies = {
            name: tensor.to(device=self._device, dtype=targets[name].dtype, copy=True) for name, tensor in given.items()
        }
        for name, copied in copies.items():
            targets[name].data = copied
        self._released = False
        # After the last tensor landed and before the next request comes in: what is retained is the old weights'.
        self.reset_cache()
        self._version = version

    def release_weights(self) -> None:
        if self._running:
            raise EngineError(f"{self.running} requests are running: let them finish or abort them, then release")
        self._released = True
        for parameter in self._model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)
        self.reset_cache()
        self._cache = self._new_cache()

    def _need_weights(self) -> None:
        if self._released:
            raise EngineError("the engine has no weights: they were released; call load_weights with all of them first")

    def _new_cache(self) -> KVSlots:
        return KVSlots(self._layers, self._config.max_batch, self._config.max_length, self._device)


def _check_attention(config: Any, max_length: int) -> None:
    """ValueError for a model that the masks of the slots do not describe: it would generate, but not as trained."""
    text = config.get_text_config()
    if text._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"the engine masks attention with a 4-D tensor, which {text._attn_implementation!r} does not take; load "
            'the model with attn_implementation="sdpa"'
        )
    check_positions(config, max_length)
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if window and window >= max_length:
        kinds.discard("sliding_attention")
    if kinds - {"full_attention"}:
        raise ValueError(
            f"the model has layers of {sorted(kinds - {'full_attention'})}; this engine serves full attention only "
            "(a sliding window is fine if max_length fits into it): lower max_length or use another engine"
        )


def _group(rows: list[_Row]) -> list[list[_Row]]:
    """Split the rows into forward passes of similarly many new tokens; each group is sorted by slot.

    Rows of a pass are padded to its longest, so a row is put into a pass of its own kind when joining the shorter ones
    would pad more than `PADDING` positions, or would make the pass longer than `PREFILL_TOKENS`.
    """
    groups: list[list[_Row]] = []
    padding = width = 0
    for row in sorted(rows, key=lambda row: len(row.tokens) - row.cached):
        count = len(row.tokens) - row.cached
        if groups:
            padding += len(groups[-1]) * (count - width)
        if not groups or padding > PADDING or (len(groups[-1]) + 1) * count > PREFILL_TOKENS:
            groups.append([])
            padding = 0
        groups[-1].append(row)
        width = count
    return [sorted(group, key=lambda row: row.slot) for group in groups]


def _sample(logits: torch.Tensor, rows: list[_Row]) -> tuple[list[int], list[float]]:
    """A token and its log-probability for each row of `logits` `(rows, vocab)`, over the full vocabulary.

    By inversion of the cumulative distribution (Devroye 1986, III.2): one uniform number decides a token, so a request
    with its own random stream draws the same tokens in any batch. Sums are float64, where rounding is far below any
    probability that matters.
    """
    greedy = torch.tensor([row.request.greedy for row in rows], device=logits.device)
    temperatures = [1.0 if row.request.greedy else row.request.temperature for row in rows]
    scaled = logits.float() / torch.tensor(temperatures, device=logits.device)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    uniform = [0.0 if row.request.greedy else row.rng.random() for row in rows]
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    target = torch.tensor(uniform, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy[:, None], logprobs.argmax(dim=-1, keepdim=True), drawn)
    return tokens[:, 0].tolist(), logprobs.gather(-1, tokens)[:, 0].tolist()
