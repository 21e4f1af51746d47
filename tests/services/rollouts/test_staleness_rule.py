import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollouts.staleness import admissible, lease_admissible, predicted_batch, staleness

versions = st.integers(0, 1000)


def test_staleness_counts_steps_from_the_oldest_version():
    assert staleness(now=7, oldest=4) == 3
    assert staleness(now=4, oldest=4) == 0


def test_a_rollout_of_the_future_is_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match="rewind the buffer"):
        staleness(now=3, oldest=4)


@given(versions, versions, st.integers(0, 20))
def test_admissible_is_exactly_the_bound(now, oldest, bound):
    if oldest <= now:
        assert admissible(now, oldest, bound) == (now - oldest <= bound)


@given(versions, versions, st.integers(0, 500), st.integers(1, 16), st.integers(0, 8))
def test_a_lease_is_granted_only_if_the_batch_that_trains_it_is_within_the_bound(
    version, next_batch, ahead, per, bound
):
    batch = predicted_batch(next_batch, ahead, per)
    granted = lease_admissible(version, next_batch, ahead, per, bound)
    assert granted == (version <= next_batch and batch - version <= bound)


@given(versions, st.integers(1, 16), st.integers(0, 8))
def test_leases_bound_the_groups_that_wait(version, per, bound):
    most = sum(lease_admissible(version, version, ahead, per, bound) for ahead in range(per * (bound + 3)))
    assert most == per * (bound + 1)


def test_lock_step_grants_nothing_beyond_the_next_batch():
    assert lease_admissible(version=5, next_batch=5, groups_ahead=3, groups_per_batch=4, max_staleness=0)
    assert not lease_admissible(version=5, next_batch=5, groups_ahead=4, groups_per_batch=4, max_staleness=0)
    assert not lease_admissible(version=5, next_batch=6, groups_ahead=0, groups_per_batch=4, max_staleness=0)
