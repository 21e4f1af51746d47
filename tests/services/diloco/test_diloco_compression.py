"""What compressing pseudo-gradients costs and saves, on a toy: replicas that pull in different directions.

Distance from the optimum after 120 syncs, of 1.0 at the start, as measured: all .011, bf16 .011; top-k with feedback
and without .07 and .31 at 30 %, .12 and .39 at 20 %, .26 and .52 at 10 %; at 5 % feedback gains nothing (.67 and .62):
what is owed is then so old when it is sent that it does not fit any more.
"""

from __future__ import annotations

import pytest
import torch

from services.diloco.compression import BF16, Compression, NoCompression, TopK

SIZE, REPLICAS, SYNCS, INNER, RATE = 400, 2, 120, 4, 0.05


def distance(compression: Compression) -> float:
    """From the optimum, relative to the start, when replicas with bowls of their own run DiLoCo with `compression`."""
    random = torch.Generator().manual_seed(0)
    steep = torch.rand(REPLICAS, SIZE, generator=random) + 0.5
    places = torch.randn(REPLICAS, SIZE, generator=random)
    optimum = (steep * places).sum(0) / steep.sum(0)
    start = optimum + torch.randn(SIZE, generator=random)
    original, momentum = start.clone(), torch.zeros(SIZE)
    each = [compression.fresh(original) for _ in range(REPLICAS)]
    for _ in range(SYNCS):
        packed = []
        for replica in range(REPLICAS):
            local = original.clone()
            for _ in range(INNER):
                local -= RATE * steep[replica] * (local - places[replica])
            packed.append(each[replica].pack(original - local))
        average = torch.empty(SIZE)
        each[0].unpack(torch.stack(packed).mean(0), average)
        for one in each:
            one.committed()
        momentum = 0.5 * momentum + average
        original = original - 0.7 * (average + 0.5 * momentum)
    return float((original - optimum).norm() / (start - optimum).norm())


def test_bf16_halves_the_bytes_and_converges_nearly_as_well() -> None:
    gradient = torch.randn(1000)
    packed = BF16().pack(gradient)
    assert packed.dtype == torch.bfloat16
    assert BF16().nbytes(packed) == NoCompression().nbytes(gradient) / 2
    assert distance(BF16()) < distance(NoCompression()) + 0.01


def test_topk_with_error_feedback_converges_and_without_it_does_not() -> None:
    fed, lossy = distance(TopK(0.2)), distance(TopK(0.2, feedback=False))
    assert fed < 0.15
    assert lossy > 2 * fed


def test_topk_sends_the_largest_and_owes_the_rest() -> None:
    topk = TopK(0.4).fresh(torch.zeros(5))
    packed = topk.pack(torch.tensor([1.0, -5.0, 2.0, 3.0, -0.5]))
    assert packed.tolist() == [0, -5, 0, 3, 0]
    topk.committed()
    assert topk.residual is not None
    assert topk.residual.tolist() == [1, 0, 2, 0, -0.5]
    assert topk.pack(torch.tensor([1.0, 0.5, 2.0, 0, 0])).tolist() == [2, 0, 4, 0, 0]
    assert topk.nbytes(packed) == 2 * (4 + 4)


def test_a_sync_that_is_tried_again_packs_the_same_and_owes_nothing_twice() -> None:
    topk = TopK(0.5).fresh(torch.zeros(4))
    topk.pack(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    topk.committed()
    first = topk.pack(torch.tensor([0.0, 0.0, 5.0, 0.0]))
    again = topk.pack(torch.tensor([0.0, 0.0, 5.0, 0.0]))
    assert torch.equal(first, again)
    topk.committed()
    assert topk.residual is not None
    assert topk.residual.tolist() == [1, 0, 0, 0] or topk.residual.tolist() == [0, 2, 0, 0]


def test_what_is_owed_is_dropped_on_request() -> None:
    topk = TopK(0.25).fresh(torch.zeros(4))
    topk.pack(torch.arange(4.0))
    topk.committed()
    topk.reset()
    assert topk.residual is not None
    assert not topk.residual.any()


@pytest.mark.parametrize("compression", [NoCompression(), BF16(), TopK(1.0)])
def test_what_is_packed_whole_comes_back(compression: Compression) -> None:
    gradient = torch.tensor([1.0, -2.0, 0.5, 0.0])
    one = compression.fresh(gradient)
    out = torch.empty(4)
    one.unpack(one.pack(gradient.clone()), out)
    assert torch.equal(out, gradient)
