import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_builders import rollout

from mesh.messages import ErrorSite, Group, Lease, Rollout, Task, Turn, VersionSpan
from services.rollouts.collate import collate, even_micro_batches, micro_batches
from services.rollouts.samples import SequenceRecorder, flatten, hinted_contexts
from services.rollouts.validation import malformed

torch.set_num_threads(1)
TASK = Task("t000000", 0, 5)


def samples_of(*lengths):
    made = []
    for member, sampled in enumerate(lengths):
        recorder = SequenceRecorder([1, 2])
        recorder.append_sampled(range(10, 10 + sampled), [-0.5] * sampled, [VersionSpan(0, 0, sampled)])
        one = rollout(Lease("1.0", TASK, member, 10.0))
        one.sequences, one.turns = recorder.sequences, []
        made.append(one)
    return flatten([Group(TASK, made, [float(n) for n in range(len(made))], False, 0)])


def test_masks_and_logprobs_stand_in_the_column_that_predicts_them():
    batch = collate(samples_of(3, 1))
    assert batch["loss_mask"].tolist() == [[False, True, True, True], [False, True, False, False]]
    assert batch["behaviour_logprobs"].tolist() == [[0.0, -0.5, -0.5, -0.5], [0.0, -0.5, 0.0, 0.0]]
    assert batch["advantages"].tolist() == [0.0, 1.0]
    assert batch["truncated"].tolist() == [False, False]


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="leave the channel out"):
        collate([])


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 100))
def test_micro_batches_hold_every_sequence_once_within_the_budget(lengths, budget):
    for padded in (False, True):
        groups = micro_batches(lengths, budget, padded=padded)
        assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
        for group in groups:
            inside = [lengths[index] for index in group]
            assert (len(group) * max(inside) if padded else sum(inside)) <= budget or len(group) == 1
    assert len(micro_batches(lengths, budget)) <= len(micro_batches(lengths, budget, padded=True))


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 100), st.integers(2, 4))
def test_for_several_procs_there_are_as_many_micro_batches_for_each_as_sequences_allow(lengths, budget, procs):
    for padded in (False, True):
        groups = even_micro_batches(lengths, budget, procs, padded=padded)
        assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
        assert len(groups) % procs == 0 or len(groups) == len(lengths)
        for group in groups:
            inside = [lengths[index] for index in group]
            assert (len(group) * max(inside) if padded else sum(inside)) <= budget or len(group) == 1


def test_micro_batches_for_several_procs_are_of_similar_size():
    groups = even_micro_batches([30, 30, 20, 20, 10, 10], 1000, 2)
    assert [sum([30, 30, 20, 20, 10, 10][index] for index in group) for group in groups] == [60, 60]
    assert even_micro_batches([30, 30, 20, 20, 10, 10], 1000, 1) == [[0, 1, 2, 3, 4, 5]]


def test_a_budget_below_one_token_is_refused():
    with pytest.raises(ValueError, match="max_tokens is 0"):
        micro_batches([1], 0)


ids = st.lists(st.integers(0, 30), min_size=1, max_size=4)
turns_with_hints = st.lists(
    st.tuples(ids, st.lists(st.integers(0, 30), max_size=3), st.none() | ids, st.floats(0, 1), st.booleans()),
    min_size=1,
    max_size=5,
)


def hinted_rollout(prompt, turns) -> Rollout:
    recorder, recorded = SequenceRecorder(prompt), []
    for sampled, observation, hint, cut, fork in turns:
        sequence, start, stop = recorder.append_sampled(
            sampled, [-1.0] * len(sampled), [VersionSpan(0, 0, len(sampled))]
        )
        site = ErrorSite("type_error", "no", "hint", "template", int(cut * start), hint) if hint else None
        recorded.append(Turn(sequence, start, stop, f"turn {len(recorded)}", "", None, site))
        if fork:
            recorder.fork([5, *recorder.token_ids[2:], *observation])
        else:
            recorder.append_context(observation)
    made = rollout(Lease("1.0", TASK, 0, 10.0))
    made.sequences, made.turns = recorder.sequences, recorded
    return made


@given(ids, turns_with_hints)
def test_student_and_teacher_positions_predict_the_same_tokens(prompt, turns):
    made = hinted_rollout(prompt, turns)
    assert malformed(made) is None
    sites = hinted_contexts(made)
    sequence_of = {(s.rollout_id, s.sequence): s.token_ids for s in flatten([Group(TASK, [made], [1.0], False, 0)])}
    hinted_turns = [turn for turn in made.turns if turn.error]
    assert len(sites) == len(hinted_turns)
    for site, turn in zip(sites, hinted_turns, strict=True):
        student = sequence_of[site.rollout_id, site.sequence].tolist()
        teacher = site.context.prompt_ids + site.context.turn_ids
        sampled = made.sequences[turn.sequence].token_ids[turn.start : turn.stop]
        assert [student[position + 1] for position in site.student_positions] == sampled
        assert [teacher[position + 1] for position in site.teacher_positions] == sampled
        # The hint is the last thing that the teacher sees before it predicts the turn's first token.
        assert teacher[: site.teacher_positions[0] + 1][-len(turn.error.hint_ids) :] == turn.error.hint_ids
        assert site.context.actions == [t.text for t in made.turns[: made.turns.index(turn)]]


def test_the_buffer_does_not_need_torch():
    code = "import sys, services.rollouts.buffer, services.rollouts.samples; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
