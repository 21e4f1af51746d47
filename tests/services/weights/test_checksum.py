import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.weights.checksum import _factors, checksum


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_golden_values_are_the_same_on_every_machine():
    # Computed with plain Python integers from the definition.
    assert checksum(torch.zeros(0, dtype=torch.uint8)) == 0
    assert checksum(torch.arange(1_000_003).to(torch.uint8)) == 297708328095750677869591198447245275983


@settings(max_examples=60, deadline=None)
@given(nbytes=st.integers(1, 300_000), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_seen(nbytes, place, bit):
    data = random_bytes(nbytes)
    before = checksum(data)
    data[int(place * nbytes)] ^= 1 << bit
    assert checksum(data) != before


@settings(max_examples=60, deadline=None)
@given(
    first=st.integers(0, 39_999),
    second=st.integers(0, 39_999),
    one=st.integers(-(2**63), 2**63 - 1),
    other=st.integers(-(2**63), 2**63 - 1),
)
def test_two_swapped_words_are_seen(first, second, one, other):
    words = torch.zeros(40_000, dtype=torch.int64)
    words[first], words[second] = one, other
    swapped = words.clone()
    swapped[first], swapped[second] = words[second].clone(), words[first].clone()
    same = torch.equal(words, swapped)
    assert (checksum(words.view(torch.uint8)) == checksum(swapped.view(torch.uint8))) == same


@pytest.mark.parametrize("distance", [1, 2, 1024, 8192, 16384])
def test_words_that_differ_in_the_sign_bit_alone_may_not_be_swapped(distance):
    words = random_bytes(8 * 20_000).view(torch.int64)
    swapped = words.clone()
    words[distance] = words[0] ^ -(2**63)
    swapped[0], swapped[distance] = words[distance].clone(), words[0].clone()
    assert checksum(words.view(torch.uint8)) != checksum(swapped.view(torch.uint8))


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(1, 599_999))
def test_a_torn_mix_of_two_versions_is_seen(cut):
    old, new = random_bytes(600_000, 1), random_bytes(600_000, 2)
    mixed = torch.cat([new[:cut], old[cut:]])
    assert checksum(mixed) not in (checksum(old), checksum(new))


@pytest.mark.parametrize("block", [64, 4096, 65_536])
def test_swapped_blocks_are_seen(block):
    data = random_bytes(4 * 65_536)
    swapped = data.clone()
    swapped[:block], swapped[2 * block : 3 * block] = data[2 * block : 3 * block], data[:block]
    assert checksum(swapped) != checksum(data)


def test_length_counts():
    data = random_bytes(100)
    assert len({checksum(torch.cat([data, torch.zeros(n, dtype=torch.uint8)])) for n in range(20)}) == 20


def test_alignment_and_thread_count_do_not_matter():
    data = random_bytes(1 << 20)
    shifted = torch.empty(len(data) + 3, dtype=torch.uint8)[3:]
    shifted.copy_(data)
    expected = checksum(data)
    torch.set_num_threads(2)
    assert checksum(shifted) == checksum(data) == expected


def test_factors_differ_in_their_low_halves():
    # What makes two swapped words of a row visible: differences of factors have fewer than 32 low zero bits.
    low = _factors() & 0xFFFFFFFF
    assert low.unique().numel() == low.numel()
    assert bool((low & 1).all())


def test_other_tensors_are_refused():
    with pytest.raises(ValueError, match="uint8"):
        checksum(torch.zeros(4))
    with pytest.raises(ValueError, match="contiguous"):
        checksum(torch.zeros(8, dtype=torch.uint8)[::2])
