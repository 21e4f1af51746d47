import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollouts.advantages import dead_fraction, group_advantages, is_dead, reward_std

rewards_with_gaps = st.lists(st.none() | st.floats(-100, 100), max_size=8)


def test_golden_row():
    assert group_advantages([1, 0, 0, 1], "group_std") == pytest.approx(
        [0.865875, -0.865875, -0.865875, 0.865875], abs=1e-6
    )
    assert group_advantages([1, 0, 0, 1], "none") == [0.5, -0.5, -0.5, 0.5]


def test_unscorable_rewards_are_outside_the_baseline_and_get_zero():
    assert group_advantages([1.0, None, 0.0, None]) == [0.5, 0.0, -0.5, 0.0]
    assert group_advantages([1.0, math.nan, 0.0]) == [0.5, 0.0, -0.5]


@pytest.mark.parametrize("scaling", ["none", "group_std", "batch_std"])
@pytest.mark.parametrize("rewards", [[], [3.0], [0.1, 0.1, 0.1], [None, 2.0], [None, None]])
def test_dead_groups_are_exactly_zero(rewards, scaling):
    assert is_dead(rewards)
    assert group_advantages(rewards, scaling, batch_std=0.3) == [0.0] * len(rewards)


def test_batch_std_divides_by_the_whole_batch():
    std = reward_std([1.0, 0.0, 4.0, None, 2.0])
    assert std == pytest.approx(1.707825)
    assert group_advantages([1.0, 0.0], "batch_std", eps=0.0, batch_std=std) == pytest.approx([0.5 / std, -0.5 / std])


def test_dead_fraction_is_the_share_of_groups_that_teach_nothing():
    assert dead_fraction([[1.0, 0.0], [1.0, 1.0], [None, 1.0], [0.0, 2.0]]) == 0.5
    assert dead_fraction([]) == 0.0


def test_a_wrong_number_of_rewards_names_the_functions():
    with pytest.raises(ValueError, match=r"group_advantages: reward function 'exact' gave 2 rewards for 3 rollouts"):
        group_advantages([1.0, 0.0], rollouts=3, function="exact")


def test_contradictory_scaling_is_refused():
    with pytest.raises(ValueError, match="group_advantages: unknown scaling 'std'"):
        group_advantages([1.0, 0.0], "std")
    with pytest.raises(ValueError, match="needs batch_std"):
        group_advantages([1.0, 0.0], "batch_std")


@given(rewards_with_gaps, st.sampled_from(["none", "group_std"]))
def test_advantages_are_centred_and_finite(rewards, scaling):
    advantages = group_advantages(rewards, scaling)
    assert len(advantages) == len(rewards)
    assert all(map(math.isfinite, advantages))
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    assert all(a == 0.0 for a, r in zip(advantages, rewards, strict=True) if r is None)
