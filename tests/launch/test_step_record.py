"""What the driver writes down of steps, with the members' health given by hand."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from launch.leftovers import FILE, end_leftovers, remember
from launch.record import Record, mean_rewards
from mesh.processes import process
from services.telemetry.table import ProgressTable


def member(role, name, busy, uptime, incarnation=0):
    health = {"name": name, "busy_s": busy, "uptime_s": uptime, "incarnation": incarnation, "answered_in_s": 0.01}
    return SimpleNamespace(place=SimpleNamespace(role=role)), health


@pytest.fixture
def record(tmp_path):
    supervisor = SimpleNamespace(placed={}, health={}, deaths={"generator": 1})
    made = Record(tmp_path, ProgressTable(), supervisor, say=lambda text: None)
    made.open(0)
    yield made
    made.close()


def report(step, finished_at, life="one", reward=0.5, tokens=100.0):
    metrics = {"tokens": tokens, "rollouts": 10.0, "reward/mean": reward}
    return {"step": step, "life": life, "finished_at": finished_at, "metrics": metrics, "histograms": {}}


def rows(record):
    return [json.loads(line) for line in (record.run_dir / "metrics.jsonl").read_text().splitlines()]


def see(record, name, role, busy, uptime, incarnation=0):
    record.supervisor.placed[name], record.supervisor.health[name] = member(role, name, busy, uptime, incarnation)


def test_rates_are_over_the_time_between_two_steps_however_late_they_are_read(record):
    record.add([report(0, 100.0), report(1, 102.0), report(2, 107.0, tokens=50.0)])
    assert "tokens_per_s" not in rows(record)[0]
    assert [row["tokens_per_s"] for row in rows(record)[1:]] == [50.0, 10.0]


def test_steps_that_are_done_again_replace_their_rows_and_rewards(record):
    record.add([report(step, 100.0 + step, reward=0.1) for step in range(4)])
    record.add([report(2, 200.0, life="two", reward=0.9), report(3, 201.0, life="two", reward=None)])
    assert [row["step"] for row in rows(record)] == [0, 1, 2, 3]
    assert mean_rewards([record]) == [0.1, 0.1, 0.9]
    assert "tokens_per_s" not in rows(record)[2]  # the time since the other trainer's step says nothing
    assert record.step == 4


def test_idle_shares_are_over_the_time_since_the_last_row_and_begin_anew_with_a_new_process(record):
    see(record, "generator-0", "generator", busy=1.0, uptime=10.0)
    record.add([report(0, 100.0)])
    see(record, "generator-0", "generator", busy=4.0, uptime=14.0)
    record.add([report(1, 104.0)])
    see(record, "generator-0", "generator", busy=1.0, uptime=2.0, incarnation=1)
    record.add([report(2, 106.0)])
    assert [row["idle/generator"] for row in rows(record)] == pytest.approx([0.9, 0.25, 0.5])


def test_weights_that_are_pulled_beside_generation_and_loaded_between_its_steps_are_timed_apart(record):
    for name, pull_s, update_s in (("generator-0", 3.0, 0.1), ("generator-1", 2.0, 0.2)):
        see(record, name, "generator", busy=1.0, uptime=10.0)
        record.supervisor.health[name] |= {"pull_s": pull_s, "update_s": update_s}
    record.add([report(0, 100.0)])
    (row,) = rows(record)
    assert (row["seconds/generator/pull"], row["seconds/generator/update"]) == (3.0, 0.2)


def test_deaths_are_in_every_row(record):
    record.add([report(0, 100.0)])
    assert rows(record)[0]["supervision/deaths"] == 1.0


def test_leftovers_of_an_earlier_driver_are_ended_and_a_reused_pid_is_spared(tmp_path):
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        remember(tmp_path, [process(left.pid), process(other.pid), None])
        known = json.loads((tmp_path / FILE).read_text())
        known[str(other.pid)] = "another start"
        (tmp_path / FILE).write_text(json.dumps(known))
        said = []
        end_leftovers(tmp_path, said.append)
        assert left.wait(timeout=10) == -9
        assert other.poll() is None
        assert any(str(left.pid) in line for line in said)
        assert not (tmp_path / FILE).exists()
    finally:
        for each in (left, other):
            each.kill()
            each.wait()


def test_files_that_a_killed_driver_was_writing_are_removed_and_those_of_another_that_starts_are_spared(tmp_path):
    for name in (".status.json.0a1b.aside", ".metrics.jsonl.0a1b.aside", ".driver.lock.0a1b.aside"):
        (tmp_path / name).touch()
    end_leftovers(tmp_path, lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == [".driver.lock.0a1b.aside"]
