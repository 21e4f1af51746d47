import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.weights import delta


def apply_of(old, packed):
    words = old.copy()
    delta.apply(words, *packed)
    return words


@settings(max_examples=80, deadline=None)
@given(
    length=st.integers(1, 5000),
    share=st.sampled_from([0.0, 0.0005, 0.003, 0.02, 0.2]),
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["u1", "u2", "u4"]),
)
def test_old_and_delta_make_exactly_the_new(length, share, seed, kind):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 200, length).astype(kind)
    new = np.where(rng.random(length) < share, old + 1, old).astype(kind)
    count, packed = delta.compare(old, new)
    assert count == (old != new).sum()
    if packed is not None:
        assert np.array_equal(apply_of(old, packed), new)


@pytest.mark.parametrize("position", [0, 1, 254, 255, 256, 509, 510, 511, 765, 9999])
def test_a_single_change_is_found_however_far_it_is(position):
    old = np.zeros(10_000, dtype="u2")
    new = old.copy()
    new[position] = 7
    count, (gaps, values) = delta.compare(old, new)
    assert (count, len(gaps), values.tolist()) == (1, position // 255 + 1, [7])
    assert np.array_equal(apply_of(old, (gaps, values)), new)


def test_equal_blocks_take_no_bytes():
    words = np.arange(1000, dtype="u2")
    assert [len(part) for part in delta.compare(words, words.copy())[1]] == [0, 0]


def test_a_block_of_which_much_changed_is_sent_whole():
    old = np.zeros(30_000, dtype="u2")
    for every, sent_whole in ((2, True), (3, True), (4, False)):
        new = old.copy()
        new[::every] = 1
        count, packed = delta.compare(old, new)
        assert count == len(new[::every])
        assert (packed is None) == sent_whole


def test_one_percent_of_bf16_words_takes_three_bytes_each():
    rng = np.random.default_rng(0)
    old = np.zeros(1_000_000, dtype="u2")
    count, (gaps, values) = delta.compare(old, (rng.random(len(old)) < 0.01).astype("u2"))
    assert 3.0 < (len(gaps) + values.nbytes) / count < 3.2


def test_a_delta_that_was_overwritten_while_it_was_read_changes_nothing():
    words = np.arange(100, dtype="u2")
    before = words.copy()
    for gaps, values in (([255, 255, 3], [1]), ([3, 3], [1]), ([99, 1], [1, 2]), ([], [5])):
        with pytest.raises(ValueError, match="no delta of 100 words"):
            delta.apply(words, np.array(gaps, dtype="u1"), np.array(values, dtype="u2"))
    assert np.array_equal(words, before)
