"""The policy as its own teacher: shown a hint, what would it have done at the turn that failed?

The teacher's weights are `initial` (frozen), `ema`, `trust_region` (its logits lie between the initial and the live
policy's) or `live`. A live teacher collapses with its student: the student drifts, and its hinted self drifts along, so
it is for experiments only. Beyond the first token that the hinted teacher rejects, the rest of the turn is off its own
distribution; `align = "prefix"` ends there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from mesh.messages import HintedContext
from services.environments.client import EnvironmentClient


class HintedTeacherConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    weights: Literal["initial", "ema", "trust_region", "live"] = Field(
        "initial", description="Whose weights the teacher has; live collapses and is for experiments only."
    )
    ema: float = Field(0.99, ge=0, lt=1, description="ema: what is kept of the teacher at each new version.")
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


class HintedTeacher:
    """Aligned logits, and actions, of the policy with a hint in its context. `live` may be None for `initial`."""

    def __init__(self, initial: Any, live: Any | None, config: HintedTeacherConfig) -> None:
        if config.weights != "initial" and live is None:
            raise ValueError(f"a teacher with weights {config.weights!r} needs the live model beside the initial one")
        self.config = config
        self.version = 0
        self._initial, self._live = initial, live
        self._model = initial if config.weights == "initial" or live is None else live
        self._followed = False

    @torch.no_grad()
    def follow(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take in the policy's weights of `version`, as the configured kind of teacher does."""
        if self._live is None:
            return
        # A teacher that joins later than version 1 has no average yet: it starts at what it is given.
        averages = self.config.weights == "ema" and (self._followed or version == 1)
        kept = self.config.ema if averages else 0.0
        for name, parameter in self._live.named_parameters():
            new = tensors[name].to(parameter)
            parameter.copy_(new if kept == 0.0 else torch.lerp(new.float(), parameter.float(), kept).to(parameter))
        self.version, self._followed = version, True

    @torch.no_grad()
    def aligned_logits(self, contexts: Sequence[HintedContext]) -> tuple[torch.Tensor, list[int]]:
        """Logits (N, V) float32 of the aligned turn tokens, and each context's row offsets (len(contexts) + 1).

        Row `row_offsets[i] + j` predicts turn token `j` of context `i`; the number of rows is where alignment ends. A
        context over `max_context` has no row.
        """
        rows: list[torch.Tensor] = [torch.empty(0)] * len(contexts)
        for indices in self._batches(contexts):
            batch = [contexts[i].prompt_ids + contexts[i].turn_ids for i in indices]
            logits = self._logits(batch)
            for row, index in enumerate(indices):
                first = len(contexts[index].prompt_ids) - 1
                turn = logits[row, first : first + len(contexts[index].turn_ids)].float().cpu()
                rows[index] = turn[: self._aligned(turn, contexts[index].turn_ids)]
        offsets = [0]
        for part in rows:
            offsets.append(offsets[-1] + (part.shape[0] if part.dim() == 2 else 0))
        return torch.cat([part for part in rows if part.dim() == 2]), offsets

    def _aligned(self, logits: torch.Tensor, turn_ids: Sequence[int]) -> int:
        """How many tokens of the turn are distilled: all, or up to and including the first that is rejected."""
        if self.config.align == "turn":
            return len(turn_ids)
        picked = logits.softmax(-1)[torch.arange(len(turn_ids)), torch.tensor(turn_ids)]
        rejected = (picked < self.config.reject_below).nonzero()
        return int(rejected[0]) + 1 if len(rejected) else len(turn_ids)

    @torch.no_grad()
    def act(self, tokenizer: Any, contexts: Sequence[HintedContext], max_new_tokens: int = 32) -> list[str]:
        """What the hinted teacher does, greedily: one text per context."""
        sequences = [list(context.prompt_ids) for context in contexts]
        actions: list[list[int]] = [[] for _ in contexts]
        open_ = [i for i, s in enumerate(sequences) if len(s) + max_new_tokens <= self.config.max_context]
        for _ in range(max_new_tokens):
            if not open_:
                break
            logits = self._logits([sequences[i] for i in open_])
            ends = torch.tensor([len(sequences[i]) - 1 for i in open_], device=logits.device)
            picked = logits[torch.arange(len(open_), device=logits.device), ends].argmax(-1).tolist()
            for i, token in zip(open_, picked, strict=True):
                sequences[i].append(token)
                actions[i].append(token)
            open_ = [i for i in open_ if actions[i][-1] != tokenizer.eos_token_id]
        return [
            tokenizer.decode(a[:-1] if a and a[-1] == tokenizer.eos_token_id else a, skip_special_tokens=False)
            for a in actions
        ]

    def _logits(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits (B, T, V) of right-padded sequences, from the configured weights."""
        ids, mask = _padded(sequences, self._model.device)
        logits = self._model(input_ids=ids, attention_mask=mask).logits
        if self.config.weights == "trust_region":
            # Log-linear: renormalizing is left to the softmax of whoever reads the rows.
            logits = torch.lerp(self._initial(input_ids=ids, attention_mask=mask).logits, logits, self.config.trust)
        return logits

    def _batches(self, contexts: Sequence[HintedContext]) -> Iterator[list[int]]:
        """Indices of contexts of similar length, each batch within `batch_tokens` padded tokens."""
        length = [len(c.prompt_ids) + len(c.turn_ids) for c in contexts]
        batch: list[int] = []
        for index in sorted(range(len(contexts)), key=length.__getitem__):
            if length[index] > self.config.max_context:
                continue
            if batch and length[index] * (len(batch) + 1) > self.config.batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch


async def hinted_accuracy(
    client: EnvironmentClient, contexts: Sequence[HintedContext], actions: Sequence[str]
) -> float:
    """Share of failing turns at which the environment accepts the hinted teacher's action instead.

    Each is tried in a session of its own that is brought to the turn by the actions before it. EnvironmentFailure
    when the environment does not answer.
    """

    async def accepted(context: HintedContext, action: str) -> bool:
        async with client.session() as session:
            await session.reset(context.task.seed)
            for earlier in context.actions:
                await session.step(earlier)
            return (await session.step(action)).error_kind is None

    outcomes = await asyncio.gather(*[accepted(c, a) for c, a in zip(contexts, actions, strict=True)])
    return sum(outcomes) / len(outcomes)


def _padded(sequences: Sequence[Sequence[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and attention mask (B, T); the mask comes from lengths, never from the pad id."""
    longest = max(len(sequence) for sequence in sequences)
    ids = torch.zeros((len(sequences), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    return ids.to(device), mask.to(device)
