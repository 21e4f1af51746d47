import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_builders import pair, rollout

from mesh.messages import Group, Lease, Task, VersionSpan
from services.rollouts.samples import SequenceRecorder, flatten, hinted_contexts, pair_samples
from services.rollouts.validation import malformed

TASK = Task("t000000", 0, 5)


def recorded(recorder, turns=()):
    made = rollout(Lease("1.0", TASK, 0, 10.0))
    made.sequences, made.turns = recorder.sequences, list(turns)
    return made


def test_a_recorder_keeps_exact_ids_spans_and_versions():
    recorder = SequenceRecorder([1, 2])
    assert recorder.append_sampled([3, 4], [-0.1, -0.2], [VersionSpan(5, 0, 1), VersionSpan(6, 1, 2)]) == (0, 2, 4)
    recorder.append_context([7])
    assert recorder.append_sampled([8], [-0.3], [VersionSpan(6, 0, 1)]) == (0, 5, 6)
    (sequence,) = recorder.sequences
    assert sequence.token_ids == recorder.token_ids == [1, 2, 3, 4, 7, 8]
    assert sequence.logprobs == [0.0, 0.0, -0.1, -0.2, 0.0, -0.3]
    assert sequence.sampled == [(2, 4), (5, 6)]
    assert sequence.versions == [VersionSpan(5, 2, 3), VersionSpan(6, 3, 4), VersionSpan(6, 5, 6)]
    assert malformed(recorded(recorder)) is None


def test_a_fork_makes_everything_so_far_context_so_each_sampled_token_is_trained_once():
    recorder = SequenceRecorder([1])
    recorder.append_sampled([2, 3], [-0.1, -0.2], [VersionSpan(0, 0, 2)])
    recorder.fork([1, 3, 9])  # the template dropped a token of the turn
    assert recorder.append_sampled([4], [-0.3], [VersionSpan(1, 0, 1)]) == (1, 3, 4)
    samples = flatten([Group(TASK, [recorded(recorder)], [0.5], False, 0)])
    assert [list(s.token_ids[s.loss_mask]) for s in samples] == [[2, 3], [4]]
    assert [s.advantage for s in samples] == [0.5, 0.5]


def test_a_fork_without_a_sampled_token_leaves_no_empty_sequence():
    recorder = SequenceRecorder([1])
    recorder.fork([2])
    recorder.append_sampled([3], [-0.1], [VersionSpan(0, 0, 1)])
    recorder.fork([4, 5])
    assert [sequence.token_ids for sequence in recorder.sequences] == [[2, 3]]
    assert SequenceRecorder([1]).sequences[0].token_ids == [1]


@pytest.mark.parametrize("spans", [[], [VersionSpan(0, 0, 1)], [VersionSpan(0, 0, 3)], [VersionSpan(0, 1, 2)]])
def test_versions_that_do_not_cover_the_ids_are_refused(spans):
    with pytest.raises(ValueError, match="spans that cover every id once"):
        SequenceRecorder([1]).append_sampled([2, 3], [-0.1, -0.2], spans)


def test_samples_carry_masks_logprobs_and_versions_by_position():
    recorder = SequenceRecorder([1, 2])
    recorder.append_sampled([3], [-0.5], [VersionSpan(4, 0, 1)])
    recorder.append_context([0])
    made = recorded(recorder)
    made.status = "truncated"
    (sample,) = flatten([Group(TASK, [made], [-1.0], False, 0)])
    assert sample.loss_mask.tolist() == [False, False, True, False]
    assert sample.logprobs.tolist() == [0.0, 0.0, -0.5, 0.0]
    assert sample.versions.tolist() == [-1, -1, 4, -1]
    assert (sample.length, sample.truncated) == (4, True)


def test_pairs_keep_exact_ids_and_mask_the_response_only():
    chosen, rejected = pair_samples([pair("t000000/0")], encode=lambda text: [len(text)], eos_id=99)
    assert chosen[0].token_ids.tolist() == [1, 2, 3, 6, 99]
    assert rejected[0].token_ids.tolist() == [1, 2, 3, 4, 5]
    assert chosen[0].loss_mask.tolist() == rejected[0].loss_mask.tolist() == [False, False, False, True, True]


def test_a_pair_without_exact_ids_is_an_error():
    broken = pair("t000000/0")
    broken.rejected_ids = []
    with pytest.raises(ValueError, match="t000000/0#0 has no exact prompt and rejected ids"):
        pair_samples([broken], encode=lambda text: [1], eos_id=99)


def test_a_hinted_context_ends_where_the_turn_begins():
    made = rollout(Lease("1.0", TASK, 0, 10.0), error=True)
    (site,) = hinted_contexts(made)
    assert site.context.prompt_ids == [1, 2, 9, 9]
    assert site.context.turn_ids == [4, 5]
    assert site.student_positions == [2, 3]
    assert site.teacher_positions == [3, 4]
    assert site.context.actions == []


def test_an_error_without_a_hint_has_no_hinted_context():
    made = rollout(Lease("1.0", TASK, 0, 10.0), error=True)
    made.turns[0].error.hint_ids = []
    assert hinted_contexts(made) == []


episodes = st.lists(
    st.tuples(
        st.lists(st.integers(0, 50), min_size=1, max_size=4),  # sampled
        st.lists(st.integers(0, 50), max_size=3),  # observation
        st.booleans(),  # the template rewrites history afterwards
    ),
    min_size=1,
    max_size=6,
)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), episodes)
def test_every_sampled_token_is_trained_exactly_once_however_the_history_forks(prompt, turns):
    recorder, expected = SequenceRecorder(prompt), []
    for ids, observation, fork in turns:
        recorder.append_sampled(ids, [-1.0] * len(ids), [VersionSpan(0, 0, len(ids))])
        expected += ids
        if fork:
            recorder.fork([*recorder.token_ids[1:], 7, *observation])
        else:
            recorder.append_context(observation)
    made = recorded(recorder)
    assert malformed(made) is None
    samples = flatten([Group(TASK, [made], [1.0], False, 0)])
    assert np.concatenate([s.token_ids[s.loss_mask] for s in samples]).tolist() == expected
