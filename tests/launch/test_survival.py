"""Each kind of process is killed -9 (or stopped, as a hang is) in a whole run, and all its promises are checked.

A kill is a real one, of what `milkweed status` shows. How long a recovery takes is not judged here (`docs/survival.md`
has measured times); that training went on meanwhile, or began again, is.
"""

import os
import signal

import pytest
from launch_runs import LiveRun, metrics, milkweed

from launch.promises import broken_promises
from services.runs.deaths import DeathLog, read_deaths

# Every checkpoint is kept, so that the journal tells of every task from the beginning.
KEPT = ["trainer.keep_checkpoints=1000", "trainer.checkpoint_every=3", "teachers.local.delay_s=0.0"]


def survive(root, name, steps, victims, *chosen, at_step=2, sign=signal.SIGKILL):
    """Run; at a step send `sign` to the victims' processes at the same time; check every promise; return the run."""
    with LiveRun(root, name, f"trainer.steps={steps}", *KEPT, *chosen) as run:
        status = run.wait_step(at_step, *victims)
        run.traces.processes()
        for victim in victims:
            os.kill(status["members"][victim]["pid"], sign)
        run.wait_for(lambda status: came_back(run.path, victims), f"a new {', '.join(victims)}")
        run.traces.processes()
        code, output = run.end()
    assert code == 0, output
    assert broken_promises(run.path, steps) == []
    assert run.traces.left() == []
    return run


def came_back(path, victims):
    return set(victims) <= {death.member for death in read_deaths(path) if death.back_at is not None}


def deaths_of(run, victim):
    found = [death for death in read_deaths(run.path) if death.member == victim]
    assert found, f"{victim} was not missed"
    return found


def test_training_goes_on_while_a_generator_is_placed_again(tmp_path):
    run = survive(tmp_path, "generator", 30, ["generator-0"])
    (death,) = deaths_of(run, "generator-0")
    assert death.step_at < death.back_at  # the other one generates


def test_training_goes_on_without_the_hint_channel_and_the_teachers_while_they_are_placed_again(tmp_path):
    run = survive(tmp_path, "teachers", 30, ["sdpo-teacher-0", "teachers-0"])
    deaths_of(run, "teachers-0")
    (death,) = deaths_of(run, "sdpo-teacher-0")
    assert death.step_at < death.back_at  # it has a model to load; the pool is back before anybody missed it
    assert max(row["sdpo/missing"] for row in metrics(run.path)) == 1
    assert metrics(run.path)[-1]["sdpo/missing"] == 0


def test_a_death_is_shown_with_what_became_of_it(tmp_path):
    (tmp_path / "shown/checkpoints").mkdir(parents=True)
    log = DeathLog(tmp_path / "shown")
    log.lost("generator-0", "generator", 0, "its process 7 is gone")
    log.back("generator-0", 1)
    (tmp_path / "shown/status.json").write_text('{"state": "finished", "step": 4, "steps": 4}')
    shown = milkweed("status", tmp_path / "shown").stdout
    assert "generator-0 was lost (its process 7 is gone), back after 0.0 s" in shown


def test_a_rewarder_and_the_rollout_buffer_lose_nothing_that_was_delivered(tmp_path):
    run = survive(tmp_path, "buffer", 16, ["rewarder-0", "rollout-buffer-0"])
    assert len(read_deaths(run.path)) == 2
    assert [row["reward/unscorable"] for row in metrics(run.path)] == [0] * 16  # asked for again


def test_a_trainer_that_is_killed_begins_again_at_its_last_checkpoint_and_nothing_is_trained_twice(tmp_path):
    run = survive(tmp_path, "trainer", 9, ["trainer-0"], at_step=4)
    deaths_of(run, "trainer-0")


@pytest.mark.parametrize(("victim", "steps"), [("generator-1", 40), ("trainer-0", 9)])
def test_one_that_hangs_is_killed_and_placed_again(tmp_path, victim, steps):
    chosen = ["supervision.hang_s=4"]
    run = survive(tmp_path, f"stopped-{victim}", steps, [victim], *chosen, at_step=4, sign=signal.SIGSTOP)
    assert any("is silent for" in death.reason for death in deaths_of(run, victim))


def test_all_members_at_once_are_placed_again(tmp_path):
    everybody = [
        "rollout-buffer-0",
        "rewarder-0",
        "teachers-0",
        "sdpo-teacher-0",
        "trainer-0",
        "generator-0",
        "generator-1",
    ]
    survive(tmp_path, "everybody", 9, everybody, at_step=4)


def test_a_driver_that_is_killed_leaves_nothing_and_the_resumed_run_keeps_all_promises(tmp_path):
    with LiveRun(tmp_path, "driverless", "trainer.steps=9", *KEPT) as run:
        run.wait_step(5)
        run.traces.processes()
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(timeout=10)
        assert "driverless: dead" in milkweed("status", run.path).stdout
    assert [line for line in run.traces.left(60) if line.startswith(("process", "port"))] == []
    with LiveRun(tmp_path, "driverless", resume=True, traces=run.traces) as resumed:
        resumed.wait_step(6)
        run.traces.processes()
        code, output = resumed.end()
    assert code == 0, output
    assert broken_promises(run.path, 9) == []
    assert run.traces.left() == []
