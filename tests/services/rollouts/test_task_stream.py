import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollouts.tasks import TaskStream, held_out_seeds, is_held_out


def test_the_stream_is_a_function_of_the_seed():
    first, again = TaskStream(3), TaskStream(3)
    assert [first.next() for _ in range(5)] == [again.at(index) for index in range(5)]
    assert first.at(12).id == "t000012"
    assert first.cursor == 5
    assert TaskStream(3, cursor=5).next() == first.next()


def test_streams_of_other_seeds_differ():
    assert TaskStream(1).at(0).seed != TaskStream(2).at(0).seed


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 10**8))
def test_held_out_seeds_never_train(run_seed, eval_seed, start):
    training = {TaskStream(run_seed).at(start + offset).seed for offset in range(50)}
    held_out = held_out_seeds(50, eval_seed)
    assert len(training) == len(set(held_out)) == 50
    assert not training & set(held_out)
    assert all(map(is_held_out, held_out))
    assert not any(map(is_held_out, training))


def test_seeds_fit_into_31_bits_and_do_not_repeat():
    seeds = [TaskStream(11).at(index).seed for index in range(20_000)]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 2**31


def test_a_negative_cursor_is_refused():
    with pytest.raises(ValueError, match="cannot start at -1"):
        TaskStream(0, cursor=-1)


def test_replicas_deal_one_run_s_tasks_out_among_them():
    alone = [TaskStream(7).at(index) for index in range(12)]
    dealt = [TaskStream(7, replica=replica, replicas=3).at(index) for index in range(4) for replica in range(3)]
    assert [(task.id, task.seed) for task in dealt] == [(task.id, task.seed) for task in alone]
    assert [task.index for task in dealt] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
