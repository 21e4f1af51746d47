"""The policy as its own teacher: shown a hint, what would it have done at the turn that failed?

The teacher's weights are `initial` (frozen), `ema`, `trust_region` (its logits lie between the initial and the live
policy's) or `live`. A live teacher collapses with its student: the student drifts, and its hinted self drifts along, so
it is for experiments only. Beyond the first token that the hinted teacher rejects, the rest of the turn is off its own
distribution; `align = "prefix"` ends there.

Logits of all aligned tokens never exist at once. What is kept of a forward pass is the last hidden states of the
aligned tokens; logits are made of them a few rows at a time, by whoever wants them, in the order that they are wanted:

    contexts ─▶ trunk ─▶ hidden states of the turns ─▶ where does alignment end? (`row_chunk` rows of logits at a time)
                                                     └▶ HintedRows ─▶ read(start, stop) ─▶ logits
"""

from __future__ import annotations

import asyncio
import copy
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mesh.messages import HintedContext
from services.environments.client import EnvironmentClient, EnvironmentFailure
from services.training.trunk_and_head import TrunkAndHead
from services.weights.logits import LogitsConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class HintedTeacherConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    weights: Literal["initial", "ema", "trust_region", "live"] = Field(
        "initial", description="Whose weights the teacher has; live collapses and is for experiments only."
    )
    ema: float = Field(
        0.99,
        ge=0,
        lt=1,
        description="ema: what is kept of the teacher at each new version; versions that it missed count as often. No "
        "checkpoint holds the average: a teacher that starts (again), or whose trainer went back, begins at the "
        "initial weights and has ema^version of them left when it takes in its first version.",
    )
    trust: float = Field(
        0.1, ge=0, le=1, description="trust_region: share of the live policy in the teacher's logits (log-linear)."
    )
    align: Literal["prefix", "turn"] = Field(
        "prefix", description="Tokens of a failing turn that are distilled: up to the first rejected one, or all."
    )
    reject_below: float = Field(
        0.1, gt=0, lt=1, description="A token that the hinted teacher gives less probability than this is rejected."
    )
    max_context: int = Field(4096, ge=8, description="The teacher's own limit; longer contexts are left out, counted.")
    batch_tokens: int = Field(16384, ge=1, description="Padded tokens per forward pass.")
    row_chunk: int = Field(
        128, ge=1, description="Tokens whose logits the teacher has in memory at a time, in float32."
    )
    probe_every: int = Field(5, ge=1, description="Requests between two measurements of the hinted accuracy.")
    probe_contexts: int = Field(16, ge=1, description="Failing turns that one measurement tries again with the hint.")
    probe_tokens: int = Field(32, ge=1, description="Most tokens of an action that a measurement tries.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type of the teacher's weights.")
    device: str = Field("cpu", description="Torch device of the teacher.")
    threads: int = Field(1, ge=1, description="CPU threads of the teacher's process.")
    logits: LogitsConfig = Field(
        default_factory=lambda: LogitsConfig(), description="How long and how much the teacher keeps for the trainer."
    )

    @model_validator(mode="after")
    def _average_in_full_precision(self) -> HintedTeacherConfig:
        if self.weights == "ema" and self.dtype != "float32":
            raise ValueError(
                f"an average in {self.dtype} stands still, its steps are smaller than the type resolves: set "
                "dtype = 'float32', or weights = 'initial'"
            )
        return self


class HintedTeacher:
    """Aligned logits, and actions, of the policy with a hint in its context.

    `live` is where the teacher's own weights start, for every kind but `initial`. They are a copy, so that the model
    that is passed may go on training while the teacher answers, and a new version is taken in between two answers only.
    ModelError for a model whose logits cannot be made a few rows at a time.

    The average of an `ema` teacher is a function of the versions it saw, with no other state. At its first version `v`
    it is `ema^v` initial weights and for the rest that version's: an average that missed the ones before, never the
    live policy. After a restart it so lies nearer to the initial policy than one that saw every version.
    """

    def __init__(self, initial: PreTrainedModel, live: PreTrainedModel | None, config: HintedTeacherConfig) -> None:
        if config.weights != "initial" and live is None:
            raise ValueError(f"a teacher with weights {config.weights!r} needs the live model beside the initial one")
        self.config = config
        self.version = 0
        self._initial = initial.eval()
        self._own = None if config.weights == "initial" or live is None else copy.deepcopy(live).eval()
        # Each has hidden states of its own.
        self._models = [TrunkAndHead(initial if self._own is None else self._own)]
        if config.weights == "trust_region":
            self._models.insert(0, TrunkAndHead(initial))
        self._lock = threading.Lock()
        self._weights = 0  # grows whenever they change

    @property
    def vocab(self) -> int:
        return self._models[0].vocab

    @torch.no_grad()
    def follow(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take in the policy's weights of `version`, by parameter name, as the configured kind of teacher does.

        Parameters that are not named stay as they are: they are not trained. ValueError, before anything changed, for
        names that the model does not have or tensors of another shape.
        """
        if self._own is None:
            return
        with self._lock:
            given = _fitting(self._own, tensors)
            # A version that does not follow the last one begins another course: the trainer stands at its checkpoint
            # again. The average begins anew with it, as it would in a teacher that was started there.
            follows = version > self.version
            since, base = (self.version, self._own) if follows else (0, self._initial)
            # Versions that it missed count as often as if it had seen them: the average does not depend on its speed.
            kept = self.config.ema ** (version - since) if self.config.weights == "ema" else 0.0
            before = dict(base.named_parameters(remove_duplicate=False))
            for name, (parameter, tensor) in given.items():
                new = tensor.to(parameter)
                parameter.copy_(new.lerp(before[name].to(parameter), kept) if kept else new)
            self.version = version
            self._weights += 1

    @torch.no_grad()
    def align(self, contexts: Sequence[HintedContext]) -> HintedRows:
        """The rows of the aligned turn tokens of every context, in order.

        Row `row_offsets[i] + j` predicts turn token `j` of context `i`; the number of rows is where alignment ends. A
        context over `max_context` has no row, with a warning; there may be none at all.
        """
        aligned: list[list[torch.Tensor]] = [[] for _ in contexts]  # per context, (n, H) of each model
        lengths = [len(context.prompt_ids) + len(context.turn_ids) for context in contexts]
        with self._lock:
            for indices in self._batches(lengths):
                batch = [contexts[i] for i in indices]
                turns = self._turns(batch)
                counts = self._aligned(turns, batch)
                ends = accumulate(len(context.turn_ids) for context in batch)
                for index, count, end in zip(indices, counts, ends, strict=True):
                    start = end - len(contexts[index].turn_ids)
                    # A copy: the states of the whole batch are not needed any more.
                    aligned[index] = [states[start : start + count].clone() for states in turns]
            weights, version = self._weights, self.version
        counted = [parts for parts in aligned if parts]
        hidden = [torch.cat(parts) for parts in zip(*counted, strict=True)]
        offsets = list(accumulate((len(parts[0]) if parts else 0 for parts in aligned), initial=0))

        def read(start: int, stop: int) -> torch.Tensor:
            with self._lock:
                if weights != self._weights:
                    raise RuntimeError(
                        f"the hinted teacher took in version {self.version} since it looked at these contexts, at "
                        f"version {version}: read what it said before it follows"
                    )
                if start == stop:
                    return torch.empty(0, self.vocab)
                return self._logits([states[start:stop] for states in hidden])

        return HintedRows(offsets, self.vocab, version, read)

    def _turns(self, batch: Sequence[HintedContext]) -> list[torch.Tensor]:
        """The hidden states (n, H) that predict the turn tokens of all these contexts, one tensor per model."""
        ids, attended = _padded([context.prompt_ids + context.turn_ids for context in batch], self._models[0].device)
        where = [
            (row, len(context.prompt_ids) - 1 + j)
            for row, context in enumerate(batch)
            for j in range(len(context.turn_ids))
        ]
        rows, columns = torch.tensor(where, dtype=torch.long, device=ids.device).reshape(-1, 2).unbind(1)
        return [model.hidden(ids, attended)[rows, columns] for model in self._models]

    def _aligned(self, turns: list[torch.Tensor], batch: Sequence[HintedContext]) -> list[int]:
        """How many tokens of each turn are distilled: all, or up to and including the first that is rejected."""
        if self.config.align == "turn":
            return [len(context.turn_ids) for context in batch]
        picked = torch.tensor([token for context in batch for token in context.turn_ids], device=turns[0].device)
        rejected = []
        for start in range(0, len(picked), self.config.row_chunk):
            part = slice(start, start + self.config.row_chunk)
            logits = self._logits([states[part] for states in turns])
            logprobs = logits.gather(1, picked[part, None]).squeeze(1) - logits.logsumexp(-1)
            rejected.append(logprobs.exp() < self.config.reject_below)
        by_turn = torch.cat(rejected).cpu().split([len(context.turn_ids) for context in batch])
        return [int(turn.nonzero()[0]) + 1 if turn.any() else len(turn) for turn in by_turn]

    @torch.no_grad()
    def _logits(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits (n, V) float32 of hidden states (n, H), one tensor per model."""
        logits = [model.logits(states).float() for model, states in zip(self._models, hidden, strict=True)]
        if self.config.weights != "trust_region":
            return logits[0]
        # Log-linear: renormalizing is left to the softmax of whoever reads the rows.
        initial, own = logits
        return torch.lerp(initial, own, self.config.trust)

    @torch.no_grad()
    def act(
        self,
        tokenizer: PreTrainedTokenizerBase,
        contexts: Sequence[HintedContext],
        stop_ids: Collection[int] | None = None,
    ) -> list[str | None]:
        """What the hinted teacher does, greedily: one text per context, without the token of `stop_ids` that ended it.

        `stop_ids` None: the tokenizer's end-of-sequence token, which need not be the one that ends a turn.
        None for a context that has no room for an action of `probe_tokens` within `max_context`.
        """
        limit, stop_ids = self.config.probe_tokens, {tokenizer.eos_token_id} if stop_ids is None else stop_ids
        actions: list[str | None] = [None] * len(contexts)
        with self._lock:
            for indices in self._batches([len(context.prompt_ids) + limit for context in contexts]):
                prompts = [list(contexts[i].prompt_ids) for i in indices]
                for index, ids in zip(indices, self._greedy(prompts, stop_ids, limit), strict=True):
                    actions[index] = str(tokenizer.decode(ids, skip_special_tokens=False))
        return actions

    def _greedy(self, sequences: list[list[int]], stop_ids: Collection[int], max_new_tokens: int) -> list[list[int]]:
        """The most probable continuation of each sequence, up to the first of `stop_ids`, which is left out."""
        actions: list[list[int]] = [[] for _ in sequences]
        running = list(range(len(sequences)))
        for _ in range(max_new_tokens):
            if not running:
                break
            texts = [sequences[i] + actions[i] for i in running]
            ids, attended = _padded(texts, self._models[0].device)
            last = torch.tensor([len(text) - 1 for text in texts], device=ids.device)
            rows = torch.arange(len(texts), device=ids.device)
            picked = self._logits([m.hidden(ids, attended)[rows, last] for m in self._models]).argmax(-1).tolist()
            for i, token in zip(running, picked, strict=True):
                if token not in stop_ids:
                    actions[i].append(token)
            running = [i for i, token in zip(running, picked, strict=True) if token not in stop_ids]
        return actions

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Indices of contexts of similar length, within `batch_tokens` padded tokens; those over the limit in none."""
        limit = self.config.max_context
        fitting = [index for index, length in enumerate(lengths) if length <= limit]
        if len(fitting) < len(lengths):
            warnings.warn(
                f"{len(lengths) - len(fitting)} of {len(lengths)} hinted contexts are longer than max_context {limit}, "
                f"the longest {max(lengths)} tokens, and are left out: raise sdpo.hinted.max_context",
                stacklevel=3,
            )
        batch: list[int] = []
        for index in sorted(fitting, key=lengths.__getitem__):
            if batch and lengths[index] * (len(batch) + 1) > self.config.batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch


@dataclass(frozen=True, slots=True)
class HintedRows:
    """What a teacher says of some contexts; context `i` owns rows `row_offsets[i] : row_offsets[i + 1]`.

    `read(start, stop)` makes the logits (stop - start, vocab) float32 of these rows, anew each time and without a
    gradient; RuntimeError once the teacher's weights have changed. `version` is that of the weights.
    """

    row_offsets: list[int]
    vocab: int
    version: int
    read: Callable[[int, int], torch.Tensor]

    def __len__(self) -> int:
        return self.row_offsets[-1]

    def in_order(self) -> Callable[[int], torch.Tensor]:
        """A function that makes the next `count` rows, from the first on."""
        position = 0

        def following(count: int) -> torch.Tensor:
            nonlocal position
            position += count
            return self.read(position - count, position)

        return following


async def hinted_accuracy(
    client: EnvironmentClient, contexts: Sequence[HintedContext], actions: Sequence[str | None]
) -> float | None:
    """Share of failing turns at which the environment accepts the hinted teacher's action instead.

    Each is tried in a session of its own that is brought to the turn by the actions before it. A turn without an action
    or whose environment failed says nothing of the teacher and stays out; None when no action is left to try.
    EnvironmentFailure when the environment failed every time.
    """

    async def accepted(context: HintedContext, action: str) -> bool | EnvironmentFailure:
        try:
            async with client.session() as session:
                await session.reset(context.task.seed)
                for earlier in context.actions:
                    await session.step(earlier)
                return (await session.step(action)).error_kind is None
        except EnvironmentFailure as failure:
            return failure

    tried = [(context, action) for context, action in zip(contexts, actions, strict=True) if action is not None]
    outcomes = await asyncio.gather(*[accepted(context, action) for context, action in tried])
    answers = [outcome for outcome in outcomes if isinstance(outcome, bool)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, EnvironmentFailure)]
    if failures and not answers:
        raise failures[0]
    return sum(answers) / len(answers) if answers else None


def _padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and attention mask (B, T); the mask comes from lengths, never from the pad id."""
    longest = max(len(sequence) for sequence in sequences)
    ids = torch.zeros((len(sequences), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    return ids.to(device), mask.to(device)


def _fitting(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.nn.Parameter, torch.Tensor]]:
    """The parameters that are named, each with its tensor. ValueError when one does not fit."""
    parameters = dict(model.named_parameters(remove_duplicate=False))  # tied ones go by either name
    unexpected = [name for name in tensors if name not in parameters]
    if unexpected:
        raise ValueError(
            f"{len(unexpected)} of {len(tensors)} tensors are no parameters of the hinted teacher's model, e.g. "
            f"{', '.join(unexpected[:3])}: send the policy's parameters by the names that they have in the initial "
            "model, adapters merged into them"
        )
    given = {name: (parameters[name], tensor) for name, tensor in tensors.items()}
    for name, (parameter, tensor) in given.items():
        if parameter.shape != tensor.shape:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}, and {tuple(parameter.shape)} in the hinted teacher's model: send "
                "tensors of the initial model's shapes"
            )
    return given
