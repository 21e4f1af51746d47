"""The plan of a step: which tokens of the student meet which rows of the teacher."""

from __future__ import annotations

import random

import pytest
import torch
from training_builders import answer, batch, learner, rollout, step, tiny_model, whole_turn_teacher, without_advantages

from mesh.messages import Group, Task, TrainBatch
from services.training.plan import evenly, plan_step


def several_failures() -> TrainBatch:
    """Rollouts of different lengths with failing turns at different places, also two in one rollout."""
    rng, task = random.Random(3), Task("t", 0, 0)
    failing = [(0,), (0, 2), (), (1,)]
    rollouts = [rollout(rng, task, n, 0.0, turns=3 + n % 2, failing=f, hinted=False) for n, f in enumerate(failing)]
    return TrainBatch(0, [Group(task, rollouts, [0.0] * 4, dead=True, staleness=0)], [])


@pytest.mark.parametrize("max_tokens", [10_000, 50])
def test_a_teacher_that_sees_what_the_student_saw_agrees_with_it_at_every_row(max_tokens):
    model = tiny_model()
    of = learner(model, alpha=1.0, max_tokens=max_tokens)
    plan = of.plan(several_failures())
    metrics = of.step(plan, answer(whole_turn_teacher(model), plan))
    assert metrics["sdpo/sites"] == 4
    assert metrics["sdpo/divergence"] == pytest.approx(0.0, abs=1e-6)

    # The same with each site one position off: that agreement is no accident.
    for off in (-1, 1):
        of = learner(model, alpha=1.0, max_tokens=max_tokens)
        plan = of.plan(several_failures())
        for site in (site for micro in plan.micro_batches for site in micro.sites):
            site.position += off
        assert of.step(plan, answer(whole_turn_teacher(model), plan))["sdpo/divergence"] > 0.1


def test_a_hint_changes_what_the_teacher_says():
    model = tiny_model()
    metrics = step(learner(model, alpha=1.0), without_advantages(batch(model)), whole_turn_teacher(model))
    assert metrics["sdpo/divergence"] > 0.01


def test_sites_stay_with_their_sample_in_whichever_micro_batch():
    made = several_failures()
    plan = plan_step(made, max_tokens=50, max_sites=64)
    assert len(plan.micro_batches) > 1
    seen = []
    for micro in plan.micro_batches:
        for site in micro.sites:
            ids = micro.samples[site.row].token_ids.tolist()
            turn = site.context.turn_ids
            assert ids[site.position + 1 : site.position + 1 + len(turn)] == turn
            seen.append(tuple(turn))
    turns = [
        tuple(r.sequences[0].token_ids[turn.start : turn.stop])
        for r in made.groups[0].rollouts
        for turn in r.turns
        if turn.error
    ]
    assert sorted(seen) == sorted(turns)


def test_of_too_many_failing_turns_evenly_spread_ones_are_kept_and_the_rest_counted():
    made = batch(turns=3, failing=(0, 1, 2))
    plan = plan_step(made, max_tokens=10_000, max_sites=4)
    assert (len(plan.contexts), plan.sites_left_out) == (4, 14)
    assert evenly(range(10), 4) == [0, 2, 5, 7]
    assert evenly([1, 2], 4) == [1, 2]
    model = tiny_model()
    metrics = step(learner(model, alpha=1.0, sdpo={"max_sites": 4}), batch(model, turns=3, failing=(0, 1, 2)))
    assert (metrics["sdpo/sites"], metrics["sdpo/sites_left_out"]) == (4.0, 14.0)


def test_a_channel_that_is_off_has_no_sites_and_none_left_out():
    plan = plan_step(batch(), max_tokens=10_000, max_sites=0)
    assert (plan.contexts, plan.sites_left_out) == ([], 0)


def test_a_failing_turn_without_tokens_or_hint_is_no_site():
    made = batch()
    first, second = made.groups[0].rollouts[0], made.groups[0].rollouts[1]
    first.turns[0].stop = first.turns[0].start
    assert second.turns[0].error is not None
    second.turns[0].error.hint_ids = []
    assert len(plan_step(made, max_tokens=10_000, max_sites=64).contexts) == 4


def test_no_site_and_sites_without_a_row_train_like_no_teacher():
    model = tiny_model()
    made = without_advantages(batch(model, pairs=0))
    lengths = sorted(len(c.prompt_ids) + len(c.turn_ids) for c in learner(model, alpha=1.0).plan(made).contexts)

    with pytest.warns(UserWarning, match=r"longer than max_context .* raise sdpo.hinted.max_context"):
        some = step(learner(model, alpha=1.0), made, whole_turn_teacher(model, max_context=lengths[2]))
    assert some["sdpo/contexts_left_out"] == sum(length > lengths[2] for length in lengths) > 0
    assert some["sdpo/loss"] > 0

    with pytest.warns(UserWarning, match="6 of 6 hinted contexts"):
        none = step(learner(model, alpha=1.0), made, whole_turn_teacher(model, max_context=8))
    assert (none["sdpo/contexts_left_out"], none["sdpo/rows"]) == (6.0, 0.0)
    assert "sdpo/loss" not in none
    assert torch.isfinite(torch.tensor(list(none.values()))).all()

    empty = step(learner(model, alpha=1.0), batch(model, failing=()), whole_turn_teacher(model))
    assert (empty["sdpo/sites"], empty["sdpo/rows"]) == (0.0, 0.0)
