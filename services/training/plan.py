"""What a step will do, laid out before it begins, so that the teacher can be asked while the previous step runs.

The number of forward and backward passes follows from the plan alone, never from what happens on the way. The procs of
a sharded trainer need that: each pass is a collective. `StepPlan.share` deals a plan out to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch

from mesh.messages import HintedContext, TrainBatch
from services.losses.topk import TopKRows
from services.rollouts.collate import empty_sample, even_micro_batches
from services.rollouts.samples import TrainSample, flatten, hinted_contexts

T = TypeVar("T")
# The next n rows of the teacher's logits, in the plan's order, whole (n, V) or cut; valid until the next call.
TeacherRows = Callable[[int], torch.Tensor | TopKRows]


@dataclass(slots=True)
class Site:
    """One failing turn: which sample of its micro-batch, where its first token is predicted, and the hinted context."""

    row: int
    position: int  # column of the logits that predict the turn's first token
    context: HintedContext


@dataclass(slots=True)
class MicroBatch:
    """One forward pass. `distills`: it has a backward pass of the SDPO channel, here or on another proc."""

    samples: list[TrainSample]
    sites: list[Site]
    distills: bool


@dataclass(slots=True)
class PairBatch:
    """One forward pass over both sides of some pairs; `chosen[i]` and `rejected[i]` are one pair."""

    chosen: list[TrainSample]
    rejected: list[TrainSample]


@dataclass(slots=True)
class StepPlan:
    """What one step will do, in order. Teacher rows are read in the order of `contexts`."""

    batch: TrainBatch
    micro_batches: list[MicroBatch]
    pair_batches: list[PairBatch]
    pairs: int  # of the whole step
    sites_left_out: int = 0

    @property
    def contexts(self) -> list[HintedContext]:
        return [site.context for micro in self.micro_batches for site in micro.sites]

    def share(self, number: int, procs: int) -> StepPlan:
        """What proc `number` of `procs` does of this plan. All have the same passes; some of those may be empty.

        Every sample, failing turn and pair is in one share. Neighbours in the plan, which are of similar size, are done
        at the same time. Each proc asks the teacher about the contexts of its own share.
        """
        micro = []
        for start in range(0, len(self.micro_batches), procs):
            together = self.micro_batches[start : start + procs]
            mine = together[number] if number < len(together) else MicroBatch([empty_sample()], [], False)
            micro.append(replace(mine, distills=any(each.distills for each in together)))
        pairs = []
        for start in range(0, len(self.pair_batches), procs):
            batches = self.pair_batches[start : start + procs]
            pairs.append(batches[number] if number < len(batches) else PairBatch([empty_sample()], [empty_sample()]))
        left_out = self.sites_left_out if number == 0 else 0  # counted once
        return StepPlan(self.batch, micro, pairs, self.pairs, left_out)


@dataclass(slots=True)
class Hinted:
    """The teacher's answer to a plan: rows per context (0: it was left out), and a way to read them in order.

    `read` may raise `TimeoutError`, `LogitsGone` or `RegionError` when the rows cannot be had (any more).
    """

    row_counts: list[int]
    read: TeacherRows
    accuracy: float | None = None
    version: int = 0
    failure: str = ""  # set by the step: why the rows could not be read, so that it went on without them

    @classmethod
    def from_rows(cls, rows: torch.Tensor, row_offsets: Sequence[int], **figures: Any) -> Hinted:
        """An answer whose rows (N, V) are here already."""
        position = 0

        def read(count: int) -> torch.Tensor:
            nonlocal position
            position += count
            return rows[position - count : position]

        return cls.from_reader(read, row_offsets, **figures)

    @classmethod
    def from_reader(cls, read: TeacherRows, row_offsets: Sequence[int], **figures: Any) -> Hinted:
        """An answer that is read piece by piece; context `i` owns rows `row_offsets[i] : row_offsets[i + 1]`."""
        return cls([stop - start for start, stop in pairwise(row_offsets)], read, **figures)

    def check(self, plan: StepPlan) -> None:
        """ValueError unless this answers that plan: rows of other tokens would silently teach the wrong thing."""
        turns = [len(context.turn_ids) for context in plan.contexts]
        if len(self.row_counts) != len(turns) or any(
            not 0 <= rows <= turn for rows, turn in zip(self.row_counts, turns, strict=True)
        ):
            raise ValueError(
                f"the teacher's rows {self.row_counts[:8]} do not fit turns of {turns[:8]} tokens: answer the contexts "
                "of this plan, in their order, with at most one row per turn token"
            )


def plan_step(
    batch: TrainBatch,
    *,
    max_tokens: int,
    max_sites: int,
    pairs: tuple[list[TrainSample], list[TrainSample]] = ([], []),
    padded: bool = False,
    procs: int = 1,
) -> StepPlan:
    """Samples in micro-batches of at most `max_tokens` tokens, each with its failing turns that have a hint.

    Of more than `max_sites` failing turns, evenly spread ones are kept; 0 leaves the distillation out. `pairs` are the
    chosen and rejected samples. `padded`: padding counts as tokens. `procs`: between how many it can be shared evenly.
    """
    samples = flatten(batch.groups)
    index_of = {(s.rollout_id, s.sequence): i for i, s in enumerate(samples)}
    sites = [
        (index_of[rollout.id, turn.sequence], turn.start - 1, turn.context)
        for group in batch.groups
        for rollout in group.rollouts
        for turn in hinted_contexts(rollout)
        if max_sites and turn.context.turn_ids
    ]
    kept = evenly(sites, max_sites)
    micro = []
    for indices in even_micro_batches([s.length for s in samples], max_tokens, procs, padded=padded):
        row_of = {index: row for row, index in enumerate(indices)}
        here = [Site(row_of[i], position, context) for i, position, context in kept if i in row_of]
        micro.append(MicroBatch([samples[i] for i in indices], here, distills=bool(here)))
    return StepPlan(
        batch, micro, _pair_batches(*pairs, max_tokens, padded, procs), len(pairs[0]), len(sites) - len(kept)
    )


def _pair_batches(
    chosen: list[TrainSample], rejected: list[TrainSample], max_tokens: int, padded: bool, procs: int
) -> list[PairBatch]:
    both = zip(chosen, rejected, strict=True)
    lengths = [2 * max(c.length, r.length) if padded else c.length + r.length for c, r in both]
    batches = even_micro_batches(lengths, max_tokens, procs, padded=padded)
    return [PairBatch([chosen[i] for i in indices], [rejected[i] for i in indices]) for indices in batches]


def evenly(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of the items, evenly spread, in their order."""
    if len(items) <= limit:
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def site_rows(sites: Sequence[Site], rows: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
    """Indices (N,) int64 of the aligned tokens' predictions among packed tokens: `rows[i]` from site `i`'s first on.

    `starts[r]` is the index of the first token of the micro-batch's sample `r`.
    """
    first = [starts[site.row] + site.position for site in sites]
    return torch.tensor([at + j for at, count in zip(first, rows, strict=True) for j in range(count)], dtype=torch.long)
