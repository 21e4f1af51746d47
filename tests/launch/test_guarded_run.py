"""Whole runs that are evaluated while they train: what it shows, what it leaves alone, and how a guard ends one."""

import json
import os
import signal

import pytest
from launch_runs import LiveRun, accounts, metrics, milkweed, nothing_left, settings

GUARDED = ["safety.evaluate_every=2", "safety.held_out_tasks=8", "safety.min_steps=1"]


def evaluated(rows):
    return [row for row in rows if "safety/held_out_reward" in row]


def one_that_evaluates(status):
    return next((member for member in status["members"].values() if member.get("held_out")), None)


def log_of(path):
    return (path / "logs" / "driver.log").read_text().splitlines()


def every_task_has_its_fate(path):
    found = accounts(path)
    return found["issued"] == found["trained"] + sum(found["dropped"].values())


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_is_evaluated_while_it_trains_and_trains_what_it_would_have_trained(tmp_path, staleness):
    """In lock-step the trainer waits for rollouts of versions that held generators do not have yet."""
    chosen = [*GUARDED, "trainer.steps=10", f"rollouts.max_staleness={staleness}", "safety.kl_hard_stop=1000.0"]
    chosen += ["trainer.prefetch=false"] if staleness == 0 else []
    done = milkweed("run", *settings(tmp_path, "watched", *chosen))
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "watched"
    rows = metrics(path)
    assert [row["step"] for row in rows] == list(range(10))
    assert len(evaluated(rows)) >= 2
    for row in evaluated(rows):
        assert 0.0 <= row["safety/held_out_reward"] <= 1.0
        assert row["safety/held_out_version"] <= row["step"] + 1
        assert (row["safety/held_out_scored"], row["safety/held_out_discarded"]) == (8.0, 0.0)
        assert row["safety/evaluation_s"] > 0
    versions = [row["safety/held_out_version"] for row in evaluated(rows)]
    assert versions == sorted(set(versions))
    assert all(row["safety/fired"] == 0 and row["safety/kl"] == row["policy/ref_kl"] >= 0 for row in rows)
    assert rows[-1]["policy/ref_kl"] > 0
    assert max(row["staleness/max"] for row in rows) <= staleness
    assert accounts(path)["trained"] == 20
    assert every_task_has_its_fate(path)
    assert [json.loads(line)["step"] for line in (path / "guard.jsonl").read_text().splitlines()] == list(range(10))
    assert nothing_left(path)


def test_a_guard_that_fires_ends_the_run_in_order_and_its_resume_needs_a_higher_limit(tmp_path):
    chosen = [*GUARDED, "trainer.steps=40", "safety.kl_hard_stop=1e-6", "run.evaluate=4"]
    done = milkweed("run", *settings(tmp_path, "collapsed", *chosen))
    path = tmp_path / "collapsed"
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the held-out guard fired at step 1: the KL to the initial policy reached" in done.stderr
    assert "resume with a higher safety.kl_hard_stop, or with safety.on_fire = warn" in done.stderr
    assert "Traceback" not in done.stderr
    before = metrics(path)
    assert len(before) < 40
    assert [row["safety/fired"] for row in before[:2]] == [0.0, 1.0]
    saved = path / "checkpoints" / f"step-{len(before)}" / "policy"
    assert saved.is_dir()
    assert accounts(path)["trained"] == 2 * len(before)
    assert "collapsed: failed" in milkweed("status", path).stdout
    assert nothing_left(path)

    refused = milkweed("resume", path)
    assert refused.returncode == 1
    assert "the held-out guard fired at step 1" in refused.stderr
    assert metrics(path) == before
    assert nothing_left(path)

    steps = len(before) + 2
    raised = milkweed(
        "resume", path, "--set", "safety.kl_hard_stop=1000.0", "--set", f"trainer.steps={steps}",
        "--set", "safety.evaluate_every=1",
    )  # fmt: skip
    assert raised.returncode == 0, raised.stdout + raised.stderr
    rows = metrics(path)
    assert [row["step"] for row in rows] == list(range(steps))
    assert [row["safety/fired"] for row in rows[-2:]] == [0.0, 0.0]
    assert every_task_has_its_fate(path)


def test_a_run_goes_on_when_its_guard_only_warns_and_when_a_generator_is_killed_in_an_evaluation(tmp_path):
    chosen = ["safety.evaluate_every=1", "safety.held_out_tasks=64", "safety.min_steps=1", "trainer.steps=20"]
    chosen += ["safety.kl_hard_stop=1e-6", "safety.on_fire=warn"]
    with LiveRun(tmp_path, "bereft", *chosen) as run:
        run.wait_step(2)
        status = run.wait_for(one_that_evaluates, "a generator that plays held-out tasks")
        os.kill(one_that_evaluates(status)["pid"], signal.SIGKILL)
        code, output = run.end()
    assert code == 0, output
    rows = metrics(run.path)
    assert [row["step"] for row in rows] == list(range(20))
    assert rows[-1]["supervision/deaths"] == 1
    assert any("tasks are not played: generator-" in line for line in log_of(run.path))
    assert rows[-1]["safety/skipped"] >= 1
    assert accounts(run.path)["trained"] == 40
    assert every_task_has_its_fate(run.path)
    sentence = "the held-out guard fired at step 1: the KL"
    assert f"warning: {sentence}" in output
    assert any(sentence in line for line in log_of(run.path))
    assert f"warning: {sentence}" in milkweed("status", run.path).stdout
    assert nothing_left(run.path)


def test_weights_that_do_not_change_have_the_same_score_at_every_evaluation(tmp_path):
    chosen = [*GUARDED, "trainer.steps=8", "run.evaluate=8", "trainer.optimizer.lr=1e-30"]
    done = milkweed("run", *settings(tmp_path, "still", *chosen))
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "still"
    scores = [row["safety/held_out_reward"] for row in evaluated(metrics(path))]
    at_the_end = json.loads((path / "status.json").read_text())["summary"]["held_out_reward"]
    assert len(scores) >= 2
    assert {*scores, at_the_end} == {at_the_end}
