"""One step as arithmetic: it does not depend on how it is cut, and agrees with the formulas computed by hand."""

from __future__ import annotations

import copy
import math
from statistics import fmean
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from training_builders import (
    batch,
    forward_calls,
    gradients,
    learner,
    record_logprobs,
    step,
    tiny_model,
    weights,
    whole_turn_teacher,
)

from mesh.messages import Group, Sequence, TrainBatch, Turn, VersionSpan
from services.training.config import OptimizerConfig


def rollouts(made: TrainBatch) -> list[tuple[Group, int]]:
    return [(g, member) for g in made.groups for member in range(len(g.rollouts))]


@torch.no_grad()
def sampled_logprobs(model: torch.nn.Module, made: TrainBatch, temperature: float = 1.0) -> list[torch.Tensor]:
    """One vector per rollout (of one sequence): log_softmax(logits / temperature) at its sampled tokens."""
    found = []
    for g, member in rollouts(made):
        q = g.rollouts[member].sequences[0]
        logits = model(torch.tensor([q.token_ids])).logits[0]
        logprobs = (logits / temperature).log_softmax(-1)
        found.append(torch.stack([logprobs[t - 1, q.token_ids[t]] for span in q.sampled for t in range(*span)]))
    return found


@pytest.mark.parametrize("objective", ["dapo", "grpo", "dr_grpo", "gspo"])
def test_the_step_does_not_depend_on_the_micro_batch_size(objective):
    model = tiny_model()
    teacher = whole_turn_teacher(model)
    made = batch(tiny_model(seed=1), turns=3, failing=(0, 2))  # sampled by other weights, so ratios differ from 1
    made.groups[0].rollouts[1].status = "truncated"  # dapo leaves it out of both sums

    def run(max_tokens: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, float], int]:
        of = learner(
            model, copy.deepcopy(model), objective=objective, alpha=0.2, beta=0.1, max_tokens=max_tokens,
            replay_loss={"objective": "dpo", "nll_weight": 0.3},
            # So large an epsilon that AdamW's step is as smooth in the gradient as SGD's.
            optimizer={"eps": 1.0, "lr": 0.1},
        )  # fmt: skip
        with forward_calls(of.model) as calls:
            metrics = step(of, made, teacher)
        return gradients(of), weights(of), metrics, len(calls)

    whole, whole_weights, whole_metrics, passes = run(10_000)
    assert passes == 2
    assert whole.norm() > 0.1
    for max_tokens in (64, 1):
        cut, cut_weights, metrics, more_passes = run(max_tokens)
        assert more_passes > passes
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-6)
        torch.testing.assert_close(cut_weights, whole_weights, rtol=0, atol=1e-6)
        assert metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-5)
        passes = more_passes
    assert passes == 9  # one sequence, or one pair, at a time


@pytest.mark.parametrize(
    "form",
    [{"packing": False}, {"logits_chunk": 1}, {"checkpointing": True}, {"packing": False, "checkpointing": True}],
    ids=lambda form: "-".join(f"{name} {value}" for name, value in form.items()),
)
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_the_step_does_not_depend_on_the_form_in_which_the_model_runs(architecture, form):
    model, reference = tiny_model(architecture=architecture), tiny_model(seed=2, architecture=architecture)
    teacher = whole_turn_teacher(model)
    made = batch(tiny_model(seed=1, architecture=architecture), turns=3, failing=(0, 2))

    def run(model_settings: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        of = learner(
            model, copy.deepcopy(reference), objective="bnpo", alpha=0.2, beta=0.1, max_tokens=80,
            policy={"kl_beta": 0.05, "correction": "tis"}, replay_loss={"objective": "dpo", "nll_weight": 0.3},
            optimizer={"eps": 1.0, "lr": 0.1}, model_settings=model_settings,
        )  # fmt: skip
        metrics = step(of, made, teacher)
        metrics = step(of, made, teacher)
        return gradients(of), weights(of), metrics

    default, default_weights, default_metrics = run({})
    found, found_weights, metrics = run(form)
    assert {"policy/loss", "sdpo/loss", "replay/loss"} < metrics.keys()
    torch.testing.assert_close(found, default, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found_weights, default_weights, rtol=0, atol=1e-6)
    assert metrics == pytest.approx(default_metrics, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_trainer_logprobs_are_those_at_the_sampling_temperature(temperature):
    model = tiny_model()
    made = batch(model, temperature=temperature)
    metrics = step(learner(model, temperature=temperature), made)
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch/kl"] == pytest.approx(0.0, abs=1e-6)
    wrong = step(learner(model, temperature=temperature * 1.5), made)
    assert wrong["mismatch/kl"] > 0.01


def test_mismatch_is_the_mean_kl_between_the_generator_and_the_policy():
    model, generator = tiny_model(), tiny_model(seed=1)
    made = batch(generator)
    mine, theirs = torch.cat(sampled_logprobs(model.eval(), made)), torch.cat(sampled_logprobs(generator, made))
    by_hand = (torch.exp(theirs - mine) - (theirs - mine) - 1).mean()
    metrics = step(learner(model, max_tokens=50), made)
    assert metrics["mismatch/kl"] == pytest.approx(float(by_hand), rel=1e-4)
    assert "mismatch/loss" not in metrics


def test_tokens_whose_logprob_is_not_finite_are_dropped_and_counted():
    model = tiny_model()
    made = batch(model)
    q = made.groups[0].rollouts[0].sequences[0]
    q.logprobs[q.sampled[0][0]] = math.nan
    q.logprobs[q.sampled[0][1] - 1] = -math.inf
    metrics = step(learner(model, objective="dapo"), made)
    assert metrics["policy/dropped_tokens"] == 2.0
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(("kind", "above"), [("tis", 1.2), ("mis", 0.0)])
def test_corrections_weigh_each_token_by_how_far_the_generator_was_off(kind, above):
    """The ratio's denominator is the policy itself, so a token's gradient is -w A / N with w = min(p / q, cap) or 0."""
    model, generator = tiny_model(), tiny_model(seed=1)
    made = batch(generator, pairs=0)
    of = learner(
        model, objective="dapo", max_tokens=50, optimizer={"max_grad_norm": 1e6},
        policy={"correction": kind, "correction_cap": 1.2},
    )  # fmt: skip
    metrics = step(of, made)

    mine = copy.deepcopy(model).eval()
    total, count, seen = torch.zeros(()), 0, []
    for g, member in rollouts(made):
        q = g.rollouts[member].sequences[0]
        logprobs = mine(torch.tensor([q.token_ids])).logits[0].log_softmax(-1)
        for t in (t for span in q.sampled for t in range(*span)):
            logp = logprobs[t - 1, q.token_ids[t]]
            ratio = math.exp(float(logp.detach()) - q.logprobs[t])
            seen.append(ratio)
            total = total - (ratio if ratio <= 1.2 else above) * g.advantages[member] * logp
            count += 1
    assert min(seen) < 1.2 < max(seen)
    by_hand = torch.autograd.grad(total / count, list(mine.parameters()))
    torch.testing.assert_close(gradients(of), torch.cat([p.flatten() for p in by_hand]), rtol=1e-3, atol=1e-6)
    assert metrics["policy/ratio"] == pytest.approx(1.0)
    assert metrics["policy/correction_weight"] == pytest.approx(
        fmean(ratio if ratio <= 1.2 else above for ratio in seen), rel=1e-4
    )
    assert metrics["mismatch/kl"] > 0.01  # the generator's distance stays visible


def test_kl_in_the_reward_equals_taking_it_off_the_rewards_before_the_group_mean():
    model, reference = tiny_model(), tiny_model(seed=1)
    made = batch(model, pairs=0)
    made.groups[1].rollouts[2].reward = None  # unscorable: not in the mean, advantage 0
    made.groups[1].advantages = [-0.5, 0.5, 0.0]
    beta = 0.05

    by_hand = copy.deepcopy(made)
    kl = [
        float((mine - theirs).sum())
        for mine, theirs in zip(
            sampled_logprobs(model.eval(), made), sampled_logprobs(reference.eval(), made), strict=True
        )
    ]
    assert max(map(abs, kl)) > 1.0
    per_rollout = iter(kl)
    for g in by_hand.groups:
        rewards = [
            None if r.reward is None else r.reward - beta * k for r, k in zip(g.rollouts, per_rollout, strict=False)
        ]
        mean = fmean(reward for reward in rewards if reward is not None)
        g.advantages = [0.0 if reward is None else reward - mean for reward in rewards]

    for max_tokens in (10_000, 1):  # a group in one micro-batch, and spread over three
        inside = learner(
            model, reference, policy={"kl_beta": beta, "kl_in_reward": True}, max_tokens=max_tokens
        )  # fmt: skip
        outside = learner(model, max_tokens=max_tokens)
        metrics = step(inside, made)
        step(outside, by_hand)
        torch.testing.assert_close(gradients(inside), gradients(outside), rtol=1e-3, atol=1e-6)
        assert "policy/ref_kl" not in metrics  # the term in the loss is off


def test_kl_in_the_reward_is_of_a_whole_rollout_that_was_forked_in_two():
    model, reference = tiny_model(), tiny_model(seed=1)
    made = batch(model, pairs=0, failing=())
    forked = copy.deepcopy(made)
    first = forked.groups[0].rollouts[0]
    ids = first.sequences[0].token_ids
    (a, b), (c, d) = first.sequences[0].sampled
    first.sequences = [
        Sequence(ids[:b], [0.0] * b, [(a, b)], [VersionSpan(0, a, b)]),
        Sequence(ids[:d], [0.0] * d, [(c, d)], [VersionSpan(0, c, d)]),  # the same history, once more
    ]
    first.turns = [Turn(0, a, b, "", ""), Turn(1, c, d, "", "")]
    record_logprobs(forked, model)

    def run(made: TrainBatch) -> torch.Tensor:
        # dapo's denominator counts tokens, not sequences: a fork then changes nothing but where the tokens stand.
        of = learner(model, reference, objective="cispo", policy={"kl_beta": 0.05, "kl_in_reward": True})
        step(of, made)
        return gradients(of)

    torch.testing.assert_close(run(forked), run(made), rtol=1e-3, atol=1e-6)


def test_kl_in_the_reward_of_divided_advantages_is_refused_before_the_first_step():
    model, kl = tiny_model(), {"kl_beta": 0.05, "kl_in_reward": True}
    with pytest.raises(ValueError, match="set the advantage scaling to 'none'"):
        learner(model, model, objective="grpo", policy=kl)
    with pytest.raises(ValueError, match="set the advantage scaling to 'none'"):
        learner(model, model, objective="dr_grpo", policy=kl, advantage_scaling="group_std")
    made = batch(model)
    of = learner(model, copy.deepcopy(model), objective="grpo", policy=kl, advantage_scaling="none")
    assert step(of, made)["policy/grad_norm"] > 0


def test_kl_in_the_loss_pulls_toward_the_reference():
    model, reference = tiny_model(), tiny_model(seed=1)
    made = batch(model, pairs=0)
    for g in made.groups:
        g.advantages = [0.0] * 3
    of = learner(model, reference, objective="bnpo", policy={"kl_beta": 1.0})
    mine, theirs = torch.cat(sampled_logprobs(model.eval(), made)), torch.cat(sampled_logprobs(reference.eval(), made))
    by_hand = (torch.exp(theirs - mine) - (theirs - mine) - 1).mean()
    seen = [step(of, made)["policy/ref_kl"] for _ in range(4)]
    assert seen[0] == pytest.approx(float(by_hand), rel=1e-4)
    assert seen[-1] < 0.8 * seen[0]


@pytest.mark.parametrize("max_tokens", [10_000, 1])
@pytest.mark.parametrize("policy", [{}, {"kl_beta": 0.05, "kl_in_reward": True}, {"kl_beta": 0.05}])
def test_a_kl_that_is_watched_is_the_mean_over_the_sampled_tokens_and_enters_no_loss(policy, max_tokens):
    model, reference = tiny_model(), tiny_model(seed=1)
    made = batch(model, pairs=0)
    watched = learner(model, reference, policy=policy, max_tokens=max_tokens, watch_kl=True)
    blind = learner(model, reference, policy=policy, max_tokens=max_tokens)
    mine, theirs = torch.cat(sampled_logprobs(model.eval(), made)), torch.cat(sampled_logprobs(reference.eval(), made))
    by_hand = (torch.exp(theirs - mine) - (theirs - mine) - 1).mean()
    assert step(watched, made)["policy/ref_kl"] == pytest.approx(float(by_hand), rel=1e-4)
    step(blind, made)
    torch.testing.assert_close(gradients(watched), gradients(blind), rtol=0, atol=0)


def test_a_policy_that_is_the_initial_one_has_no_kl_to_it():
    model = tiny_model()
    assert step(learner(model, copy.deepcopy(model), watch_kl=True), batch(model))["policy/ref_kl"] < 1e-6


def test_a_loss_that_compares_with_the_initial_policy_needs_it():
    with pytest.raises(ValueError, match="pass a reference"):
        learner(tiny_model(), None, objective="bnpo", policy={"kl_beta": 0.1})
    with pytest.raises(ValueError, match="pass a reference"):
        learner(tiny_model(), None, beta=0.1, replay_loss={"objective": "dpo"})
    with pytest.raises(ValueError, match="pass a reference"):
        learner(tiny_model(), None, watch_kl=True)
    learner(tiny_model(), None, beta=0.1, replay_loss={"objective": "simpo"})


def test_a_batch_without_a_sampled_token_changes_nothing():
    model = tiny_model()
    of = learner(model, model, alpha=1.0, policy={"kl_beta": 0.1, "kl_in_reward": True})
    before = weights(of)
    empty = batch(model, pairs=0, failing=())
    for g in empty.groups:
        for r in g.rollouts:
            r.turns, r.sequences = [], [Sequence([5, 6], [0.0, 0.0], [], [])]
    assert step(of, empty)["policy/loss"] == 0.0
    assert step(of, TrainBatch(0, [], []))["policy/loss"] == 0.0
    assert torch.equal(weights(of), before)


def test_taid_rises_with_the_steps_that_were_distilled():
    model = tiny_model()
    made, teacher = batch(model, pairs=0), whole_turn_teacher(model)
    of = learner(model, alpha=1.0, sdpo_loss={"kind": "taid"})
    step(of, batch(model, pairs=0, failing=()), teacher)
    assert (of.taid.t, of.taid.previous) == (0.4, None)  # nothing was distilled, so nothing was learned about the loss
    seen = []
    for number in range(1, 4):
        made.id = number
        step(of, made, teacher)
        seen.append(of.taid.t)
    assert seen == sorted(seen)
    assert seen[-1] >= 0.4 + 0.6 * 4 / 100


def test_learning_rate_warms_up_then_falls_to_its_last_fraction():
    for schedule, middle in (("constant", 1.0), ("linear", 0.6), ("cosine", 0.6)):
        config = OptimizerConfig(lr=1.0, warmup_steps=4, schedule=schedule, final_lr=0.2)
        assert [config.rate(step, 104) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
        assert config.rate(4, 104) == 1.0
        assert config.rate(54, 104) == pytest.approx(middle)
        assert config.rate(104, 104) == pytest.approx(1.0 if schedule == "constant" else 0.2)
    with pytest.raises(ValidationError, match="momentum"):
        OptimizerConfig(momentum=0.9)  # type: ignore[call-arg]


def test_the_optimizer_steps_at_the_rate_of_the_batch():
    model = tiny_model()
    of = learner(model, optimizer={"lr": 0.01, "schedule": "linear", "final_lr": 0.0})
    assert step(of, batch(model, step=50))["optimizer/lr"] == pytest.approx(0.005)
    moved = (weights(of) - weights(learner(model))).abs().max()
    assert moved == pytest.approx(0.005, rel=1e-2)  # AdamW's first step has the size of the rate
