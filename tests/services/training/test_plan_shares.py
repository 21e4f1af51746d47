"""A plan dealt out to the procs of a trainer: all of the work once, and the same passes for everybody."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from training_builders import answer, batch, learner, tiny_model, whole_turn_teacher

from services.training.learner import Learner
from services.training.plan import StepPlan


class Procs:
    """Stands for the procs of one trainer: threads that meet in every sum, as procs do in a collective."""

    def __init__(self, number: int) -> None:
        self._barrier = threading.Barrier(number, timeout=30)
        self._lock = threading.Lock()
        self._handed: list[dict[str, float]] = []

    def total(self, figures: dict[str, float]) -> dict[str, float]:
        with self._lock:
            self._handed.append(figures)
        self._barrier.wait()
        sums: Counter[str] = Counter()
        for each in self._handed:
            for name, value in each.items():
                sums[name] += value
        if self._barrier.wait() == 0:
            self._handed = []
        self._barrier.wait()
        return dict(sums)


def plan_of(max_tokens: int = 40, **settings: Any) -> StepPlan:
    of = learner(tiny_model(), alpha=1.0, beta=1.0, max_tokens=max_tokens)
    return of.plan(batch(turns=3, failing=(0, 2), **settings))


@pytest.mark.parametrize("procs", [1, 2, 3, 5, 20])
def test_shares_hold_every_sample_site_and_pair_once_in_equally_many_passes(procs):
    plan = plan_of()
    shares = [plan.share(number, procs) for number in range(procs)]

    samples = [(s.rollout_id, s.sequence) for share in shares for micro in share.micro_batches for s in micro.samples]
    whole = [(s.rollout_id, s.sequence) for micro in plan.micro_batches for s in micro.samples]
    assert Counter(samples) - Counter({("", 0): 10_000}) == Counter(whole)
    contexts = [tuple(c.prompt_ids) for share in shares for c in share.contexts]
    assert Counter(contexts) == Counter(tuple(c.prompt_ids) for c in plan.contexts)
    pairs = [(c.token_ids.tolist(), r.token_ids.tolist()) for s in shares for b in s.pair_batches
             for c, r in zip(b.chosen, b.rejected, strict=True) if c.loss_mask.any()]  # fmt: skip
    assert len(pairs) == plan.pairs == shares[-1].pairs

    passes = {(len(s.micro_batches), tuple(m.distills for m in s.micro_batches), len(s.pair_batches)) for s in shares}
    assert len(passes) == 1
    assert len(shares[0].micro_batches) == -(-len(plan.micro_batches) // procs)
    for share in shares:
        for micro in share.micro_batches:
            assert all(micro.samples[site.row].length > site.position for site in micro.sites)
    assert sum(share.sites_left_out for share in shares) == plan.sites_left_out


def test_a_proc_without_a_failing_turn_of_its_own_takes_part_in_the_distillation():
    plan = plan_of(max_tokens=10_000)
    assert len(plan.micro_batches) == 1
    idle = plan.share(1, 2)
    assert idle.contexts == []
    assert [micro.distills for micro in idle.micro_batches] == [True]
    assert not idle.micro_batches[0].samples[0].loss_mask.any()


def step_together(learners: list[Learner], plan: StepPlan, hinted: list[Any]) -> list[dict[str, float]]:
    """One step in as many threads as there are learners. (Gradients are not exchanged: that is the sharded model's.)"""
    shares = [plan.share(number, len(learners)) for number in range(len(learners))]
    answers = [make(share) for make, share in zip(hinted, shares, strict=True)]
    with ThreadPoolExecutor(len(learners)) as pool:
        return list(pool.map(lambda of, share, hint: of.step(share, hint), learners, shares, answers))


SETTINGS: dict[str, Any] = {
    "objective": "dr_grpo", "alpha": 1.0, "beta": 1.0, "max_tokens": 40, "sdpo_loss": {"kind": "taid"},
    "policy": {"kl_beta": 0.05, "kl_in_reward": True}, "replay_loss": {"objective": "dpo"},
}  # fmt: skip


@pytest.mark.parametrize("number", [2, 3])
def test_every_proc_reports_the_figures_of_the_whole_step(number):
    model, reference = tiny_model(), tiny_model(seed=2)
    teacher, made = whole_turn_teacher(model), batch(tiny_model(seed=1), turns=3, failing=(0, 2))
    alone = learner(model, reference, **SETTINGS)
    plan = alone.plan(made)
    expected = alone.step(plan, answer(teacher, plan, version=3, accuracy=0.9))

    procs = Procs(number)
    learners = [learner(model, reference, total=procs.total, **SETTINGS) for _ in range(number)]

    def hint(share: StepPlan) -> Any:
        return answer(teacher, share, version=3, accuracy=0.9) if share.contexts else None

    reports = step_together(learners, plan, [hint] * number)
    for report in reports:
        assert report.keys() == expected.keys()
        for name, value in expected.items():
            if not name.endswith("grad_norm"):  # each proc's own here
                assert report[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert {of.taid.t for of in learners} == {alone.taid.t}
    assert expected["sdpo/loss"] > 0


@pytest.mark.parametrize("fault", ["unanswered", "gated", "unread"])
def test_a_proc_whose_teacher_fails_leaves_the_channel_out_for_all(fault):
    model = tiny_model()
    teacher, made = whole_turn_teacher(model), batch(model, turns=3, failing=(0, 2), pairs=0)
    procs = Procs(2)
    settings = {"alpha": 1.0, "max_tokens": 40, "sdpo": {"min_hinted_accuracy": 0.5}}
    learners = [learner(model, total=procs.total, **settings) for _ in range(2)]
    plan = learners[0].plan(made)

    def good(share: StepPlan) -> Any:
        return answer(teacher, share, accuracy=0.9)

    def bad(share: StepPlan) -> Any:
        hinted = answer(teacher, share, accuracy=0.1 if fault == "gated" else 0.9)
        if fault == "unread":
            hinted.read = lambda count: (_ for _ in ()).throw(TimeoutError("the owner is gone"))
        return None if fault == "unanswered" else hinted

    reports = step_together(learners, plan, [good, bad])
    figure = {"unanswered": "sdpo/missing", "gated": "sdpo/gated", "unread": "sdpo/unread"}[fault]
    for of, report in zip(learners, reports, strict=True):
        assert report[figure] == 1.0
        assert "sdpo/loss" not in report
        assert all(torch.isfinite(p).all() for p in of.parameters)
