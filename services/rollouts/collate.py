"""From samples to the losses' tensors, and which samples share a forward pass. The only module here with torch.

Columns. Position t predicts token t + 1, so what belongs to token t (`loss_mask`, `behaviour_logprobs`) stands in
column t - 1 of T - 1, as in `services.losses.logprobs.token_logprobs`. Padding is on the right and in no mask. The ids
themselves go into the model packed (`services.training.packing`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.rollouts.samples import TrainSample


def collate(samples: Sequence[TrainSample]) -> dict[str, Tensor]:
    """What the losses need to know of B samples of at most T tokens, beside the model's log-probabilities.

    loss_mask (B, T - 1) bool, the token that column t predicts was sampled; behaviour_logprobs (B, T - 1) float32, 0
    where not in the mask; advantages (B,) float32; truncated (B,) bool. ValueError for no samples.
    """
    if not samples:
        raise ValueError("collate: there are no samples; leave the channel out when nothing is to be trained")
    rows, longest = len(samples), max(sample.length for sample in samples)
    sampled = torch.zeros(rows, longest, dtype=torch.bool)
    logprobs = torch.zeros(rows, longest, dtype=torch.float32)
    for row, sample in enumerate(samples):
        sampled[row, : sample.length] = torch.from_numpy(sample.loss_mask)
        logprobs[row, : sample.length] = torch.from_numpy(sample.logprobs)
    loss_mask = sampled[:, 1:]
    return {
        "loss_mask": loss_mask,
        "behaviour_logprobs": logprobs[:, 1:].masked_fill(~loss_mask, 0.0),
        "advantages": torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        "truncated": torch.tensor([sample.truncated for sample in samples], dtype=torch.bool),
    }


def micro_batches(lengths: Sequence[int], max_tokens: int, *, padded: bool = False) -> list[list[int]]:
    """Indices of sequences, in groups of at most `max_tokens` tokens; `padded` to their longest if so.

    Every index is in exactly one group, and groups hold sequences of similar length, the longest first. A sequence
    that is longer than the budget gets a group of its own. ValueError for a budget below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"micro_batches: max_tokens is {max_tokens}; give the tokens that fit into one forward pass")
    groups: list[list[int]] = []
    tokens = 0  # of the last group
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # The first of a group is its longest, so it sets the padded width.
        grown = (len(groups[-1]) + 1) * lengths[groups[-1][0]] if padded and groups else tokens + lengths[index]
        if groups and grown <= max_tokens:
            groups[-1].append(index)
            tokens = grown
        else:
            groups.append([index])
            tokens = lengths[index]
    return groups


def even_micro_batches(lengths: Sequence[int], max_tokens: int, procs: int, *, padded: bool = False) -> list[list[int]]:
    """As `micro_batches`, for `procs` procs that take turns in order and wait for each other after each round.

    So that all have as much to do, the groups are of similar size, and a multiple of `procs` in number wherever there
    are enough sequences.
    """
    fewest = micro_batches(lengths, max_tokens, padded=padded)
    if procs == 1:
        return fewest
    for count in range(-(-len(fewest) // procs) * procs, len(lengths), procs):
        groups = _spread(lengths, count)
        sizes = [len(g) * max(lengths[i] for i in g) if padded else sum(lengths[i] for i in g) for g in groups]
        if all(size <= max_tokens or len(group) == 1 for group, size in zip(groups, sizes, strict=True)):
            return groups
    return _spread(lengths, len(lengths))


def _spread(lengths: Sequence[int], count: int) -> list[list[int]]:
    """All indices in `count` groups, each index, the longest first, in the group with the fewest tokens so far."""
    groups: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = min(range(count), key=tokens.__getitem__)
        groups[least].append(index)
        tokens[least] += lengths[index]
    return groups


def empty_sample() -> TrainSample:
    """Two tokens of which none is in a loss: for a forward pass that has to be made although there is nothing to do."""
    nothing = np.zeros(2, dtype=np.int64)
    return TrainSample("", 0, nothing, nothing > 0, np.zeros(2, dtype=np.float32), nothing - 1, advantage=0.0)
