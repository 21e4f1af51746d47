"""Sequences in one row: which token stands where, and what belongs to it."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.rollouts.collate import collate, empty_sample
from services.rollouts.samples import TrainSample
from services.training.packing import Boundaries, pack, pack_ids


def samples_of(lengths: list[int], seed: int = 0) -> list[TrainSample]:
    """Random ids, of which some were sampled, with a logprob that tells each token from every other one."""
    rng = random.Random(seed)
    made = []
    for number, length in enumerate(lengths):
        mask = np.array([t > 0 and rng.random() < 0.5 for t in range(length)])
        ids = np.array([rng.randrange(100) for _ in range(length)], dtype=np.int64)
        logprobs = np.where(mask, -(1000 * number + np.arange(length)), 0).astype(np.float32)
        made.append(TrainSample(str(number), 0, ids, mask, logprobs, np.zeros(length, dtype=np.int64), 1.0))
    return made


def test_positions_restart_and_rows_predict_the_sampled_tokens():
    first, second = pack_ids([[5, 6, 7, 8], [9, 10]]), pack_ids([[9, 10], [5, 6, 7, 8]])
    assert first.ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert first.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert first.starts == [0, 4]
    assert first.rows.tolist() == [0, 1, 2, 4]  # not 3, whose next neighbour is of another sequence
    assert first.labels.tolist() == [6, 7, 8, 10]
    assert first.boundaries.offsets.tolist() == [0, 4, 6]
    assert second.labels.tolist() == [10, 6, 7, 8]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(0, 100))
def test_values_of_rows_return_to_the_columns_that_the_losses_know(lengths, seed):
    samples = samples_of(lengths, seed)
    packed, columns = pack(samples), collate(samples)
    assert torch.equal(packed.mask, columns["loss_mask"])
    # Each token's behaviour logprob names it: carried through the rows it must end up where it was.
    flat = torch.cat([torch.from_numpy(sample.logprobs) for sample in samples])
    assert torch.equal(packed.spread(flat[packed.rows + 1]), columns["behaviour_logprobs"])
    assert torch.equal(packed.labels, packed.ids[packed.rows + 1])


def test_spread_values_keep_their_gradient():
    packed = pack_ids([[1, 2, 3], [4, 5]])
    values = torch.arange(1.0, 4.0, requires_grad=True)
    packed.spread(values)[0, 1].backward()
    assert values.grad.tolist() == [0, 1, 0]
    none = pack([empty_sample()])
    assert none.rows.tolist() == []
    empty = torch.zeros(0, requires_grad=True)
    none.spread(empty).sum().backward()  # an empty micro-batch has a backward pass all the same
    assert empty.grad.shape == (0,)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_runs_cover_every_token_once_in_order(lengths):
    runs = Boundaries.of(lengths).runs()
    assert [length for count, length in runs for _ in range(count)] == lengths
    assert all(a[1] != b[1] for a, b in pairwise(runs))  # neighbours of equal length share a run


def test_the_padded_form_holds_the_same_tokens_whatever_their_ids():
    ids, attended = pack_ids([[0, 7, 0], [0]]).padded()
    assert ids.tolist() == [[0, 7, 0], [0, 0, 0]]
    assert attended.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_nothing_to_pack_is_an_error():
    with pytest.raises(ValueError, match="leave the forward pass out"):
        pack([])
    with pytest.raises(ValueError, match="leave the forward pass out"):
        pack_ids([[1], []])
