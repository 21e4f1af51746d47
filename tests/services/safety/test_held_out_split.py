"""No task on both sides, whatever it is called and however it is written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollouts.tasks import TaskStream, held_out_seeds
from services.safety import HeldoutSplit, LeakedTaskError, content_hash


def test_disjoint_sets_are_accepted_and_may_grow():
    split = HeldoutSplit(train=[("a", "3+4"), ("b", {"q": "5*6"})], held_out=[("c", "7-1")])
    split.train("d", "8/2")
    split.train("d", "8/2")
    split.hold_out("e")
    assert (split.count("train"), split.count("held_out")) == (3, 2)


def test_an_id_on_both_sides_is_refused_even_with_another_content():
    with pytest.raises(LeakedTaskError, match="task 'a' is in both the train and the held_out set"):
        HeldoutSplit(train=[("a", "3+4")], held_out=[("a", "9-9")])


@pytest.mark.parametrize(
    ("trained", "held_out"),
    [
        ("3 + 4", " 3 +\n4 "),
        ("caf\u00e9", "cafe\u0301"),
        ({"q": "3+4", "a": 7}, {"a": 7, "q": "3+4 "}),
        (["x", {"y": (1, 2)}], ["x", {"y": [1, 2]}]),
    ],
)
def test_the_same_content_under_another_id_is_refused_and_both_are_named(trained, held_out):
    with pytest.raises(LeakedTaskError, match="'b' of the held_out set has the same content as 'a' of the train set"):
        HeldoutSplit(train=[("a", trained)], held_out=[("b", held_out)])


def test_what_is_refused_changes_nothing():
    split = HeldoutSplit(train=[("a", "3+4")])
    with pytest.raises(LeakedTaskError):
        split.hold_out("b", "3+4")
    assert split.count("held_out") == 0
    split.train("b", "3+4")


def test_contents_that_differ_are_not_taken_for_the_same():
    texts = ["3+4", "3+5", "34", ["3+4"], {"q": "3+4"}, {"q": "3+4", "n": None}, 3, True, None]
    assert len({content_hash(text) for text in texts}) == len(texts)


tasks = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["1", "2", "3", None])), max_size=6)


@given(tasks, tasks)
def test_it_raises_exactly_when_an_id_or_a_content_is_on_both_sides(train, held_out):
    ids = {i for i, _ in train} & {i for i, _ in held_out}
    contents = {c for _, c in train if c} & {c for _, c in held_out if c}
    if ids or contents:
        with pytest.raises(LeakedTaskError):
            HeldoutSplit(train, held_out)
    else:
        HeldoutSplit(train, held_out)


def test_the_seeds_that_runs_train_and_evaluate_on_are_a_split():
    split = HeldoutSplit(held_out=[(str(seed), None) for seed in held_out_seeds(64, seed=3)])
    for index in range(2000):
        split.train(str(TaskStream(3).at(index).seed))
    assert (split.count("train"), split.count("held_out")) == (2000, 64)
