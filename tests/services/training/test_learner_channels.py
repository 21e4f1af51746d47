"""Each channel acts where it should, moves the student the right way, and leaves the others alone."""

from __future__ import annotations

import copy
import math
from itertools import accumulate

import pytest
import torch
from training_builders import (
    EOS,
    answer,
    batch,
    encode,
    forward_calls,
    gradients,
    learner,
    row_gradients,
    step,
    tiny_model,
    weights,
    whole_turn_teacher,
    without_advantages,
)

from mesh.messages import TrainBatch
from services.training.channel import Averages
from services.training.learner import Hinted
from services.weights.logits import LogitsGone

ARCHITECTURES = ["qwen3", "llama"]


def rows_of(ids: tuple[int, ...], made: TrainBatch) -> list[tuple[int, int]]:
    """The sampled spans of the sequence `ids`."""
    for q in (q for g in made.groups for r in g.rollouts for q in r.sequences):
        if list(ids) == q.token_ids:
            return q.sampled
    raise AssertionError("a forward pass over ids that are in no rollout")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_policy_gradient_is_on_sampled_tokens_with_an_advantage_and_nowhere_else(architecture):
    model = tiny_model(architecture=architecture)
    made = batch(model)
    of = learner(model)
    with row_gradients(of) as found:
        metrics = step(of, made)
    expected = sum(
        stop - start
        for g in made.groups
        for r, advantage in zip(g.rollouts, g.advantages, strict=True)
        if advantage
        for start, stop in r.sequences[0].sampled
    )
    acted = set(found)
    assert len(acted) == expected > 0
    for ids, t in acted:
        assert any(start - 1 <= t < stop - 1 for start, stop in rows_of(ids, made))
    assert metrics["policy/grad_norm"] > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sdpo_gradient_is_on_the_failing_turns_and_nowhere_else(architecture):
    model = tiny_model(architecture=architecture)
    made = without_advantages(batch(model))
    of = learner(model, alpha=1.0)
    with row_gradients(of) as found:
        metrics = step(of, made, whole_turn_teacher(model))
    acted = set(found)
    turns = [turn for g in made.groups for r in g.rollouts for turn in r.turns if turn.error]
    assert len(acted) == sum(turn.stop - turn.start for turn in turns) == metrics["sdpo/rows"] > 0
    for ids, t in acted:
        start, stop = rows_of(ids, made)[0]  # the first turn of every rollout is the one that failed
        assert start - 1 <= t < stop - 1
    assert metrics["sdpo/grad_norm"] > 0
    assert metrics["policy/grad_norm"] == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("objective", ["dpo", "simpo"])
def test_replay_gradient_is_on_both_responses_and_nowhere_else(architecture, objective):
    model = tiny_model(architecture=architecture)
    made = without_advantages(batch(model))
    of = learner(model, copy.deepcopy(model), beta=1.0, replay_loss={"objective": objective, "nll_weight": 0.3})
    with row_gradients(of) as found:
        metrics = step(of, made)
    lengths = [
        (len(p.prompt_ids), len(response))
        for p in made.pairs
        for response in ([*encode(p.chosen), EOS], p.rejected_ids)
    ]
    expected = sorted(prompt - 1 + j for prompt, response in lengths for j in range(response))
    assert sorted(t for _, t in found) == expected
    assert metrics["replay/grad_norm"] > 0
    assert metrics["replay/pairs"] == len(made.pairs)


def test_policy_steps_make_good_tokens_likelier_and_bad_ones_less_likely():
    model = tiny_model()
    made = batch(model, pairs=0)
    of = learner(model)

    def by_sign() -> tuple[float, float]:
        totals = {1: 0.0, -1: 0.0}
        for g in made.groups:
            for r, advantage in zip(g.rollouts, g.advantages, strict=True):
                ids = torch.tensor([r.sequences[0].token_ids])
                logprobs = of.model(ids).logits[0].log_softmax(-1).detach()
                if advantage:
                    totals[1 if advantage > 0 else -1] += sum(
                        float(logprobs[t - 1, ids[0, t]]) for span in r.sequences[0].sampled for t in range(*span)
                    )
        return totals[1], totals[-1]

    good, bad = by_sign()
    for _ in range(3):
        step(of, made)
    better, worse = by_sign()
    assert better > good + 0.5
    assert worse < bad - 0.5


@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "jsd", "beta": 0.0},
        {"kind": "jsd", "beta": 0.5},
        {"kind": "jsd", "beta": 1.0},
        {"kind": "taid"},
        {"kind": "entropy_gated"},
        {"kind": "eopd", "entropy_threshold": 1.0},
    ],
    ids=lambda loss: "-".join(str(value) for value in loss.values()),
)
def test_sdpo_steps_pull_the_student_to_the_hinted_teacher(loss):
    model = tiny_model()
    made = without_advantages(batch(model, pairs=0))
    teacher = whole_turn_teacher(model)
    of, meter = learner(model, alpha=1.0, sdpo_loss=loss), learner(model, alpha=1.0, optimizer={"lr": 1e-12})

    def forward_kl() -> float:
        meter.model.load_state_dict(of.model.state_dict())
        return step(meter, made, teacher)["sdpo/divergence"]

    before = forward_kl()
    for _ in range(5):
        step(of, made, teacher)
    assert forward_kl() < 0.7 * before


@pytest.mark.parametrize("objective", ["dpo", "simpo"])
def test_replay_steps_widen_the_margin_and_raise_the_chosen(objective):
    model = tiny_model()
    made = without_advantages(batch(model))
    of = learner(model, copy.deepcopy(model), beta=1.0, replay_loss={"objective": objective, "nll_weight": 0.3})
    seen = [step(of, made) for _ in range(5)]
    margins = [metrics["replay/margin"] for metrics in seen]
    assert margins == sorted(margins)
    assert margins[-1] > margins[0] + 0.5
    assert seen[-1]["replay/chosen_logprob"] > seen[0]["replay/chosen_logprob"]


def test_without_weights_the_step_is_bit_identical_to_the_policy_alone():
    model = tiny_model()
    full, bare = batch(model), batch(model, failing=(), pairs=0)
    off, alone = learner(model), learner(model)
    for _ in range(3):
        plan = off.plan(full)
        assert not plan.contexts
        assert not plan.pair_batches
        off.step(plan, None)
        step(alone, bare)
    assert torch.equal(weights(off), weights(alone))
    assert not torch.equal(weights(off), weights(learner(model)))


def test_channels_without_weight_or_input_cost_no_forward_pass():
    model = tiny_model()
    reference = copy.deepcopy(model)
    full = batch(model)
    teacher = whole_turn_teacher(model)

    def passes(made: TrainBatch, alpha: float, beta: float, objective: str = "simpo") -> tuple[int, int]:
        of = learner(model, reference, alpha=alpha, beta=beta, replay_loss={"objective": objective})
        plan = of.plan(made)
        hinted = answer(teacher, plan)
        with forward_calls(of.model) as trained, forward_calls(reference) as compared:
            of.step(plan, hinted)
        return len(trained), len(compared)

    assert passes(full, 0.0, 0.0) == (1, 0)
    assert passes(full, 1.0, 0.0) == (1, 0)  # shares the policy's pass
    assert passes(full, 0.0, 1.0) == (2, 0)  # chosen and rejected together
    assert passes(full, 0.0, 1.0, "dpo") == (2, 1)
    assert passes(batch(model, pairs=0), 1.0, 1.0, "dpo") == (1, 0)
    assert passes(batch(model, failing=(), pairs=0), 1.0, 1.0, "dpo") == (1, 0)


def test_channels_are_clipped_one_by_one_and_then_weighed():
    model = tiny_model()
    teacher = whole_turn_teacher(model)
    made = batch(model)
    loud = copy.deepcopy(made)
    for g in loud.groups:
        g.advantages = [1000 * advantage for advantage in g.advantages]

    def gradient(made: TrainBatch, alpha: float, beta: float) -> tuple[torch.Tensor, dict[str, float]]:
        of = learner(model, alpha=alpha, beta=beta, optimizer={"max_grad_norm": 0.01})
        metrics = step(of, made, teacher)
        return gradients(of), metrics

    policy, quiet_metrics = gradient(made, 0, 0)
    loud_policy, loud_metrics = gradient(loud, 0, 0)
    everything, _ = gradient(made, 0.2, 0.1)
    loud_everything, _ = gradient(loud, 0.2, 0.1)
    sdpo = gradient(without_advantages(made), 0.2, 0)[0]
    replay = gradient(without_advantages(made), 0, 0.1)[0]

    assert loud_metrics["policy/grad_norm"] == pytest.approx(1000 * quiet_metrics["policy/grad_norm"], rel=1e-4)
    assert quiet_metrics["policy/grad_norm"] > 0.01
    assert loud_policy.norm() == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(loud_everything - loud_policy, everything - policy, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(everything, policy + sdpo + replay, rtol=1e-4, atol=1e-6)
    assert 0 < sdpo.norm() <= 0.2 + 1e-6
    assert 0 < replay.norm() <= 0.1 + 1e-6


def test_a_gradient_that_is_not_finite_is_left_out_and_counted():
    model = tiny_model()
    made = batch(model, pairs=0)
    of, alone = learner(model, alpha=1.0), learner(model)
    plan = of.plan(made)
    rows = sum(len(context.turn_ids) for context in plan.contexts)
    offsets = list(accumulate((len(c.turn_ids) for c in plan.contexts), initial=0))
    broken = Hinted.from_rows(torch.full((rows, 40), math.nan), offsets)
    metrics = of.step(plan, broken)
    step(alone, batch(model, pairs=0, failing=()))
    assert metrics["sdpo/nonfinite"] == 1.0
    assert metrics["policy/nonfinite"] == 0.0
    assert torch.equal(weights(of), weights(alone))


def test_a_teacher_that_dies_while_it_is_read_costs_only_its_channel():
    model = tiny_model()
    made = batch(model, pairs=0)
    of, alone = learner(model, alpha=1.0, max_tokens=40), learner(model, max_tokens=40)
    plan = of.plan(made)
    hinted = answer(whole_turn_teacher(model), plan)
    read, calls = hinted.read, []

    def dies(count: int) -> torch.Tensor:
        calls.append(count)
        if len(calls) == 2:
            raise LogitsGone("the logits were released")
        return read(count)

    hinted.read = dies
    metrics = of.step(plan, hinted)
    step(alone, batch(model, pairs=0, failing=()))
    assert len(plan.micro_batches) > 2 == len(calls)  # nobody asks a dead teacher again
    assert hinted.failure == "LogitsGone: the logits were released"
    assert metrics["sdpo/unread"] == 1.0
    assert "sdpo/loss" not in metrics
    assert torch.equal(weights(of), weights(alone))


def test_low_hinted_accuracy_gates_the_channel_and_says_so():
    model = tiny_model()
    made = batch(model, pairs=0)
    teacher, alone = whole_turn_teacher(model), learner(model)
    step(alone, batch(model, pairs=0, failing=()))

    def run(accuracy: float | None) -> tuple[bool, dict[str, float]]:
        of = learner(model, alpha=1.0, sdpo={"min_hinted_accuracy": 0.5})
        metrics = step(of, made, teacher, accuracy=accuracy, version=4)
        return torch.equal(weights(of), weights(alone)), metrics

    skipped, metrics = run(0.49)
    assert skipped
    assert (metrics["sdpo/gated"], metrics["sdpo/hinted_accuracy"], metrics["sdpo/teacher_version"]) == (1.0, 0.49, 4.0)
    assert "sdpo/loss" not in metrics
    for accuracy in (0.5, None):  # good enough, and not measured yet
        skipped, metrics = run(accuracy)
        assert not skipped
        assert metrics["sdpo/gated"] == 0.0
        assert metrics["sdpo/loss"] > 0


def test_a_step_without_the_teacher_says_that_it_is_missing():
    model = tiny_model()
    of, alone = learner(model, alpha=1.0), learner(model)
    metrics = step(of, batch(model, pairs=0))
    step(alone, batch(model, pairs=0, failing=()))
    assert (metrics["sdpo/missing"], metrics["sdpo/gated"], metrics["sdpo/sites"]) == (1.0, 0.0, 6.0)
    assert torch.equal(weights(of), weights(alone))
    assert step(of, batch(model, pairs=0, failing=()))["sdpo/missing"] == 0.0  # nothing to ask about


@pytest.mark.parametrize("counts", [[3], [99] * 6, [-1] * 6])
def test_rows_that_do_not_fit_the_plan_are_refused(counts):
    model = tiny_model()
    of = learner(model, alpha=1.0)
    with pytest.raises(ValueError, match="do not fit turns of"):
        of.step(of.plan(batch(model)), Hinted.from_rows(torch.zeros(600, 40), list(accumulate(counts, initial=0))))


def test_figures_are_means_over_what_was_counted_and_totals_where_they_count():
    averages = Averages()
    averages.add({"ratio": torch.tensor(1.0), "dropped_tokens": torch.tensor(2)}, torch.tensor(1))
    averages.add({"ratio": torch.tensor(4.0), "dropped_tokens": torch.tensor(3)}, torch.tensor(2))
    assert averages.figures("policy") == {"policy/ratio": 3.0, "policy/dropped_tokens": 5.0}
    empty = Averages()
    empty.add({"ratio": torch.tensor(0.0), "dropped_tokens": torch.tensor(7)}, torch.tensor(0))
    assert empty.figures("policy") == {"policy/dropped_tokens": 7.0}
