"""A batch as metrics: what counts, what does not, and what is left out rather than called 0."""

from __future__ import annotations

import math
import random

import pytest
from training_builders import group

from mesh.messages import Sequence, TrainBatch, VersionSpan
from services.training.report import describe_batch


def a_batch(*rewards: list[float | None], step: int = 5, **settings: object) -> TrainBatch:
    rng = random.Random(0)
    groups = [group(rng, n, found, version=4, **settings) for n, found in enumerate(rewards)]
    return TrainBatch(step, groups, [], counts={"dropped_stale": 3.0})


def test_rewards_errors_and_staleness_of_an_ordinary_batch():
    made = a_batch([1.0, 0.0, 0.5], [1.0, 1.0, 1.0], failing=(0,))
    made.groups[0].rollouts[0].status = "truncated"
    second = made.groups[0].rollouts[1].turns[1]
    second.error = made.groups[0].rollouts[1].turns[0].error
    metrics, histograms = describe_batch(made)
    assert metrics["rollouts"] == 6
    assert metrics["groups"] == 2
    assert metrics["tokens"] == sum(r.sampled_tokens for g in made.groups for r in g.rollouts)
    assert metrics["reward/mean"] == pytest.approx(0.75)
    assert metrics["reward/std"] == pytest.approx(math.sqrt((3 * 0.0625 + 0.0625 + 0.5625 + 0.0625) / 6))
    assert metrics["groups/dead_fraction"] == 0.5
    assert metrics["rollouts/truncated"] == 1
    assert metrics["turns/per_rollout"] == 2
    assert metrics["errors/per_rollout"] == metrics["errors/tool_not_found"] == pytest.approx(7 / 6)
    assert metrics["hints/template"] == 7
    assert (metrics["staleness/mean"], metrics["staleness/max"], metrics["staleness/off_policy"]) == (1.0, 1.0, 1.0)
    assert metrics["buffer/dropped_stale"] == 3.0
    assert histograms == {"staleness": [1.0] * 6, "reward": [1.0, 0.0, 0.5, 1.0, 1.0, 1.0]}


def test_unscorable_rewards_are_counted_and_in_no_mean():
    metrics, histograms = describe_batch(a_batch([1.0, None, 0.0], [math.nan, 0.5, None]))
    assert metrics["reward/unscorable"] == 3
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert histograms["reward"] == [1.0, 0.0, 0.5]
    assert metrics["groups/dead_fraction"] == 0.5  # one scorable reward compares with nothing


def test_without_a_scorable_reward_there_is_no_mean():
    metrics, histograms = describe_batch(a_batch([None, None]))
    assert "reward/mean" not in metrics
    assert "reward/std" not in metrics
    assert metrics["reward/unscorable"] == 2
    assert metrics["groups/dead_fraction"] == 1.0
    assert histograms["reward"] == []


def test_staleness_counts_from_the_oldest_version_and_mixed_rollouts_are_told():
    made = a_batch([1.0, 0.0])
    q = made.groups[0].rollouts[0].sequences[0]
    (a, b), (c, d) = q.sampled
    q.versions = [VersionSpan(2, a, b), VersionSpan(5, c, d)]
    metrics, histograms = describe_batch(made)
    assert histograms["staleness"] == [3.0, 1.0]
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (2.0, 3.0)
    assert metrics["rollouts/mixed_versions"] == 0.5


def test_on_policy_rollouts_are_not_stale():
    metrics, _ = describe_batch(a_batch([1.0, 0.0], step=4))
    assert (metrics["staleness/mean"], metrics["staleness/off_policy"], metrics["rollouts/mixed_versions"]) == (0, 0, 0)


def test_failing_turns_without_a_hint_are_told_apart():
    made = a_batch([1.0, 0.0], failing=(0,))
    site = made.groups[0].rollouts[0].turns[0].error
    assert site is not None
    site.hint_layer, site.hint, site.kind = None, None, "json_decode"
    metrics, _ = describe_batch(made)
    assert (metrics["hints/none"], metrics["hints/template"]) == (1.0, 1.0)
    assert (metrics["errors/json_decode"], metrics["errors/tool_not_found"]) == (0.5, 0.5)


def test_nothing_sampled_and_nothing_at_all_have_no_means():
    made = a_batch([1.0])
    r = made.groups[0].rollouts[0]
    r.turns, r.sequences = [], [Sequence([3], [0.0], [], [])]
    metrics, histograms = describe_batch(made)
    assert metrics["tokens"] == 0
    assert "staleness/mean" not in metrics
    assert histograms["staleness"] == []
    metrics, _ = describe_batch(TrainBatch(0, [], []))
    assert metrics == {
        "rollouts": 0, "groups": 0, "tokens": 0, "reward/unscorable": 0, "rollouts/truncated": 0,
        "safety/flagged": 0,
    }  # fmt: skip


def test_flagged_rollouts_are_counted_once_each_and_by_kind():
    made = a_batch([1.0, 0.0, 0.5], [1.0, 0.0])
    assert describe_batch(made)[0]["safety/flagged"] == 0
    made.groups[0].rollouts[0].flags = ["archives/unpack@0", "archives/unpack@2", "mine/peek@1"]
    made.groups[1].rollouts[1].flags = ["archives/unpack@0"]
    metrics, _ = describe_batch(made)
    found = {name: value for name, value in metrics.items() if name.startswith("safety/")}
    assert found == {"safety/flagged": 2, "safety/flagged/archives": 2, "safety/flagged/mine": 1}
