"""The policy as its own teacher: shown a hint, what would it have done at the turn that failed?

The teacher's weights are `initial` (frozen), `ema`, `trust_region` (its logits lie between the initial and the live
policy's) or `live`. A live teacher collapses with its student: the student drifts, and its hinted self drifts along, so
it is for experiments only. Beyond the first token that the hinted teacher rejects, the rest of the turn is off its own
distribution; `align = "prefix"` ends there.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mesh.messages import HintedContext
from services.environments.client import EnvironmentClient, EnvironmentFailure
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
    probe_every: int = Field(5, ge=1, description="Requests between two measurements of the hinted accuracy.")
    probe_contexts: int = Field(16, ge=1, description="Failing turns that one measurement tries again with the hint.")
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
        self._model = initial if self._own is None else self._own
        self._lock = threading.Lock()

    @torch.no_grad()
    def follow(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take in the policy's weights of `version`, by parameter name, as the configured kind of teacher does."""
        if self._own is None:
            return
        with self._lock:
            # A version that does not follow the last one begins another course: the trainer stands at its checkpoint
            # again. The average begins anew with it, as it would in a teacher that was started there.
            follows = version > self.version
            since, base = (self.version, self._own) if follows else (0, self._initial)
            # Versions that it missed count as often as if it had seen them: the average does not depend on its speed.
            kept = self.config.ema ** (version - since) if self.config.weights == "ema" else 0.0
            before = dict(base.named_parameters())
            for name, parameter in self._own.named_parameters():
                new = tensors[name].to(parameter)
                parameter.copy_(new.lerp(before[name].to(parameter), kept) if kept else new)
            self.version = version

    @torch.no_grad()
    def aligned_logits(self, contexts: Sequence[HintedContext]) -> tuple[torch.Tensor, list[int]]:
        """Logits (N, V) float32 of the aligned turn tokens, and each context's row offsets (len(contexts) + 1).

        Row `row_offsets[i] + j` predicts turn token `j` of context `i`; the number of rows is where alignment ends. A
        context over `max_context` has no row, with a warning; N may be 0.
        """
        rows = [self._no_rows()] * len(contexts)
        lengths = [len(context.prompt_ids) + len(context.turn_ids) for context in contexts]
        with self._lock:
            for indices in self._batches(lengths):
                firsts = [len(contexts[i].prompt_ids) - 1 for i in indices]
                logits = self._logits([contexts[i].prompt_ids + contexts[i].turn_ids for i in indices], min(firsts))
                for row, index, first in zip(logits, indices, firsts, strict=True):
                    turn_ids = contexts[index].turn_ids
                    turn = row[first - min(firsts) :][: len(turn_ids)].cpu()
                    rows[index] = turn[: self._aligned(turn, turn_ids)]
        offsets = [0]
        for part in rows:
            offsets.append(offsets[-1] + len(part))
        return torch.cat([self._no_rows(), *rows]), offsets

    def _aligned(self, logits: torch.Tensor, turn_ids: Sequence[int]) -> int:
        """How many tokens of the turn are distilled: all, or up to and including the first that is rejected."""
        if self.config.align == "turn":
            return len(turn_ids)
        picked = logits.softmax(-1)[torch.arange(len(turn_ids)), torch.tensor(turn_ids)]
        rejected = (picked < self.config.reject_below).nonzero()
        return int(rejected[0]) + 1 if len(rejected) else len(turn_ids)

    @torch.no_grad()
    def act(
        self, tokenizer: PreTrainedTokenizerBase, contexts: Sequence[HintedContext], max_new_tokens: int = 32
    ) -> list[str | None]:
        """What the hinted teacher does, greedily: one text per context, without the end-of-turn token.

        None for a context that has no room for an action within `max_context`.
        """
        actions: list[str | None] = [None] * len(contexts)
        with self._lock:
            for indices in self._batches([len(context.prompt_ids) + max_new_tokens for context in contexts]):
                prompts = [list(contexts[i].prompt_ids) for i in indices]
                for index, ids in zip(
                    indices, self._greedy(prompts, tokenizer.eos_token_id, max_new_tokens), strict=True
                ):
                    actions[index] = str(tokenizer.decode(ids, skip_special_tokens=False))
        return actions

    def _greedy(self, sequences: list[list[int]], eos_id: int, max_new_tokens: int) -> list[list[int]]:
        """The most probable continuation of each sequence, up to `eos_id`, which is left out."""
        actions: list[list[int]] = [[] for _ in sequences]
        running = list(range(len(sequences)))
        for _ in range(max_new_tokens):
            if not running:
                break
            ends = [len(sequences[i]) + len(actions[i]) - 1 for i in running]
            logits = self._logits([sequences[i] + actions[i] for i in running], min(ends))
            picked = [int(row[end - min(ends)].argmax()) for row, end in zip(logits, ends, strict=True)]
            for i, token in zip(running, picked, strict=True):
                if token != eos_id:
                    actions[i].append(token)
            running = [i for i, token in zip(running, picked, strict=True) if token != eos_id]
        return actions

    def _logits(self, sequences: Sequence[Sequence[int]], first: int) -> torch.Tensor:
        """Logits (B, T - first, V) float32 of right-padded sequences from column `first` on, from the kind's weights.

        The columns before are prompt: left out of the vocabulary projection, they cost no memory.
        """
        ids, mask = _padded(sequences, self._model.device)
        keep = ids.shape[1] - first
        logits = self._model(input_ids=ids, attention_mask=mask, logits_to_keep=keep).logits.float()
        if self.config.weights == "trust_region":
            # Log-linear: renormalizing is left to the softmax of whoever reads the rows.
            initial = self._initial(input_ids=ids, attention_mask=mask, logits_to_keep=keep).logits.float()
            logits = torch.lerp(initial, logits, self.config.trust)
        return logits

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

    def _no_rows(self) -> torch.Tensor:
        return torch.empty(0, self._model.get_output_embeddings().weight.shape[0])


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
