"""A short soak: `milkweed chaos` kills at random, and tells whether the run kept its promises."""

from launch_runs import SMALL, milkweed

from services.runs.deaths import read_deaths


def chaos(root, name, *more):
    pairs = [*SMALL, f"run.root={root}", f"run.name={name}", "teachers.local.delay_s=0.0", *more]
    return [part for pair in pairs for part in ("--set", pair)]


def test_a_run_keeps_its_promises_while_its_processes_are_killed_at_random(tmp_path):
    done = milkweed("chaos", "--kills", 4, "--seed", 3, *chaos(tmp_path, "soak", "trainer.steps=60"), timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 processes were killed or stopped" in done.stdout
    assert "all promises were kept" in done.stdout
    assert len(read_deaths(tmp_path / "soak")) >= 4


def test_a_run_that_is_too_short_for_its_kills_is_said_to_be_and_leaves_nothing(tmp_path):
    done = milkweed("chaos", "--kills", 50, *chaos(tmp_path, "short", "trainer.steps=3"), timeout=1200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "set trainer.steps higher" in done.stdout
    assert "left behind" not in done.stdout


def test_kills_and_the_run_must_make_sense():
    done = milkweed("chaos", "--kills", 0)
    assert done.returncode == 2
    assert "--kills 0 is no soak" in done.stderr
