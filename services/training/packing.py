"""Sequences end to end in one row: what one forward pass of the policy is given, with nothing padded.

    ids        a a a a b b b c c c c c        three sequences, T = 12 tokens
    positions  0 1 2 3 0 1 2 0 1 2 3 4        restart with each
    rows           ^     ^ ^       ^ ^        where a token is predicted that the policy sampled: N = 5

Only the N rows meet the vocabulary. What belongs to the loss (masks, behaviour logprobs) stays in (B, T - 1) tensors,
which cost next to nothing without a vocabulary; `spread` brings the N values there. The rows are in the order of that
mask's True entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from services.rollouts.samples import TrainSample


@dataclass(slots=True)
class Boundaries:
    """Where each sequence of a row begins and ends; passed through the model to its attention."""

    lengths: list[int]
    offsets: Tensor  # (B + 1,) int32 on the row's device, from 0 to T
    windows: set[int] = field(default_factory=set)  # sliding windows that the attention layers asked for

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Boundaries:
        return cls(list(lengths), torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device))

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def runs(self) -> list[tuple[int, int]]:
        """`(count, length)` of each run of neighbours of equal length: one attention call serves a run."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths)]


@dataclass(slots=True)
class Packed:
    """B sequences in one row. Tensors are on one device."""

    ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, from 0 in each sequence
    boundaries: Boundaries
    rows: Tensor  # (N,) int64, indices into T: the token after each is in the loss
    labels: Tensor  # (N,) int64, those tokens
    mask: Tensor  # (B, longest - 1) bool, True in the columns that the rows belong to

    @property
    def starts(self) -> list[int]:
        """Index of each sequence's first token."""
        return [0, *accumulate(self.boundaries.lengths)][:-1]

    def spread(self, values: Tensor) -> Tensor:
        """Values of the rows (N,) in the columns that they belong to, (B, longest - 1), 0 elsewhere."""
        return values.new_zeros(self.mask.shape).index_put((self.mask,), values)

    def padded(self) -> tuple[Tensor, Tensor]:
        """`(ids, attention mask)`, each (B, longest) int64, right-padded with 0: for models that cannot pack."""
        lengths = torch.tensor(self.boundaries.lengths, device=self.ids.device)
        attended = torch.arange(self.boundaries.longest, device=self.ids.device) < lengths[:, None]
        ids = torch.zeros_like(attended, dtype=torch.int64).index_put((attended,), self.ids)
        return ids, attended.long()


def pack(samples: Sequence[TrainSample], device: torch.device | str = "cpu") -> Packed:
    """The samples in one row, in their order. ValueError for no samples or one without a token."""
    lengths = [sample.length for sample in samples]
    if not lengths or min(lengths) < 1:
        raise ValueError("pack: there is nothing to pack; leave the forward pass out when nothing is to be trained")
    ids = torch.from_numpy(np.concatenate([sample.token_ids for sample in samples]))
    # A token in the loss is predicted one position before it stands; the first of a sequence by nothing.
    predicts = np.concatenate([np.append(sample.loss_mask[1:], False) for sample in samples])
    rows = torch.from_numpy(predicts.nonzero()[0])
    mask = torch.zeros(len(samples), max(lengths) - 1, dtype=torch.bool)
    for row, sample in enumerate(samples):
        mask[row, : sample.length - 1] = torch.from_numpy(sample.loss_mask[1:])
    return Packed(
        ids=ids.to(device),
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        boundaries=Boundaries.of(lengths, device),
        rows=rows.to(device),
        labels=ids[(rows + 1).clamp(max=len(ids) - 1)].to(device),
        mask=mask.to(device),
    )


def pack_ids(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Packed:
    """Plain sequences of ids, every token but the first of each in the loss."""
    return pack([_sample(ids) for ids in sequences], device)


def _sample(ids: Sequence[int]) -> TrainSample:
    number = len(ids)
    return TrainSample(
        rollout_id="",
        sequence=0,
        token_ids=np.asarray(ids, dtype=np.int64),
        loss_mask=np.arange(number) > 0,
        logprobs=np.zeros(number, dtype=np.float32),
        versions=np.full(number, -1, dtype=np.int64),
        advantage=0.0,
    )
