import numpy as np
import pytest
from rollout_builders import rollout

from mesh.messages import Lease, Task, VersionSpan
from services.rollouts.validation import malformed


def good():
    return rollout(Lease("1.0", Task("t000000", 0, 5), 1, 10.0), error=True)


def test_a_sound_rollout_has_no_fault():
    assert malformed(good()) is None


def overlap(r):
    r.sequences[0].sampled = [(3, 5), (4, 5)]


def beyond_the_end(r):
    r.sequences[0].sampled = [(3, 6)]


def first_token(r):
    r.sequences[0].sampled = [(0, 5)]


def version_gap(r):
    r.sequences[0].versions = [VersionSpan(0, 3, 4)]


def version_on_context(r):
    r.sequences[0].versions.append(VersionSpan(0, 2, 3))


def negative_version(r):
    r.sequences[0].versions = [VersionSpan(-1, 3, 5)]


def foreign_name(r):
    r.id = "t000000/0"


def odd_status(r):
    r.status = "done"


def lost_turn(r):
    r.turns[0].sequence = 3


def turn_outside(r):
    r.turns[0].start = 2


def late_cut(r):
    r.turns[0].error.cut = 4


def array_scalars(r):
    r.sequences[0].token_ids[0] = np.int64(1)


def array_reward(r):
    r.reward = np.float32(0.5)


def flags_of_numbers(r):
    r.flags = ["archives/unpack@0", 3]


def flags_in_one_text(r):
    r.flags = "archives/unpack@0"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (overlap, r"sampled span \[4, 5\) is empty, out of order or outside"),
        (beyond_the_end, r"sampled span \[3, 6\) is empty, out of order or outside \[1, 5\)"),
        (first_token, r"sampled span \[0, 5\)"),
        (version_gap, "version spans do not cover exactly the sampled tokens"),
        (version_on_context, "version spans do not cover exactly the sampled tokens"),
        (negative_version, "negative version"),
        (foreign_name, "should be called t000000/1"),
        (odd_status, "unknown status 'done'"),
        (lost_turn, "points to sequence 3 of 1"),
        (turn_outside, r"span \[2, 5\) does not lie inside one sampled span"),
        (late_cut, "the hint's cut 4 does not lie in front of the turn"),
        (array_scalars, "negative or not Python ints"),
        (array_reward, "reward is a float32"),
        (flags_of_numbers, "flags that are no list of texts"),
        (flags_in_one_text, "flags that are no list of texts"),
    ],
)
def test_each_fault_is_named(damage, sentence):
    bad = good()
    damage(bad)
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(malformed(bad))


@pytest.mark.parametrize("field", ["task", "sequences", "turns", "rewards"])
def test_a_field_of_the_wrong_type_is_a_sentence_and_no_crash(field):
    bad = good()
    setattr(bad, field, 3)
    assert "cannot be read" in malformed(bad)


def test_what_is_not_a_rollout_at_all_is_refused():
    assert "cannot be read" in malformed(None)
