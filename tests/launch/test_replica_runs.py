"""Runs of several trainers that are DiLoCo replicas: together, killed in parts, stopped and resumed."""

import hashlib
import os
import signal

from launch_runs import LiveRun, accounts, listening_beyond_this_host, metrics, milkweed, nothing_left

from launch.promises import broken_promises
from services.runs.deaths import read_deaths

# Few and short episodes: what is shown is how replicas go on together, not what they learn.
FEW = [
    "rollouts.groups_per_batch=1", "rollouts.group_size=4", "generator.episodes=4", "generator.engine.max_batch=4",
    "replay.beta=0", "teachers.backend=none", "sdpo.alpha=0", "diloco.heartbeat_timeout_s=3", "supervision.hang_s=10",
]  # fmt: skip


def trainers(status):
    return {name: each for name, each in status["members"].items() if name.startswith("trainer")}


def training(status, name):
    """Whether a trainer is there, and not behind the others any more."""
    return name in status["members"] and not status["members"][name]["behind"]


def final_policies(run_dir, replicas, steps):
    """The digest of each replica's last policy."""
    folders = [run_dir / "checkpoints", *[run_dir / "checkpoints" / f"replica-{r}" for r in range(1, replicas)]]
    files = [folder / f"step-{steps}" / "policy" / "model.safetensors" for folder in folders]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def rows_of(run_dir, replica):
    return metrics(run_dir if replica == 0 else run_dir / f"replica-{replica}")


def balanced(found):
    parts = [found[fate] for fate in ("trained", "in_work", "ready", "taken")]
    return found["issued"] == sum(parts) + sum(found["dropped"].values())


def test_three_replicas_lose_a_trainer_the_lighthouse_a_buffer_and_have_one_frozen(tmp_path):
    steps = 60
    chosen = ["trainer.replicas=3", "generator.count=3", f"trainer.steps={steps}", "diloco.sync_every=4",
              "trainer.checkpoint_every=8", "trainer.keep_checkpoints=100"]  # fmt: skip
    with LiveRun(tmp_path, "three", *FEW, *chosen) as run:
        before = run.wait_step(5, "trainer-1", "lighthouse-0", "rollout-buffer-0", "trainer-2")
        assert listening_beyond_this_host(run.path) == []
        run.traces.processes()
        os.kill(before["members"]["trainer-1"]["pid"], signal.SIGKILL)
        run.wait_for(lambda status: "trainer-1" not in status["members"], "a dead trainer noticed")
        step = run.status()["step"]
        run.wait_for(lambda status: status["step"] > step, "a step of the survivors")
        status = run.wait_for(lambda status: training(status, "trainer-1"), "trainer-1 healed")
        os.kill(status["members"]["lighthouse-0"]["pid"], signal.SIGKILL)
        rounds = max(each["rounds"] for each in trainers(status).values())
        status = run.wait_for(
            lambda status: (
                any(each["rounds"] > rounds + 1 for each in trainers(status).values())
                and "lighthouse-0" in status["members"]
            ),
            "syncs over another lighthouse",
        )
        os.kill(status["members"]["rollout-buffer-0"]["pid"], signal.SIGKILL)
        frozen = status["members"]["trainer-2"]["pid"]
        os.kill(frozen, signal.SIGSTOP)
        run.wait_for(lambda status: "trainer-2" not in status["members"], "a frozen trainer noticed")
        assert not os.path.exists(f"/proc/{frozen}")
        code, output = run.end()
    assert code == 0, output
    assert broken_promises(run.path, steps, replicas=3) == []
    assert len(set(final_policies(run.path, 3, steps))) == 1
    assert any(row.get("diloco/participants") == 3 for row in rows_of(run.path, 0))
    lost = [death.member for death in read_deaths(run.path)]
    assert {"trainer-1", "lighthouse-0", "rollout-buffer-0", "trainer-2"} <= set(lost)
    assert run.traces.left() == []


def test_replicas_of_two_procs_that_stream_two_fragments_stop_resume_and_end_equal(tmp_path):
    chosen = ["trainer.replicas=2", "trainer.procs=2", "trainer.steps=400", "diloco.sync_every=4", "diloco.fragments=2",
              "diloco.fragment_sync_delay=1", "trainer.checkpoint_every=100"]  # fmt: skip
    with LiveRun(tmp_path, "streamed", *FEW, *chosen) as run:
        run.wait_step(5)
        assert milkweed("stop", run.path).returncode == 0
        code, output = run.end()
    assert code == 0, output
    stood = accounts(run.path)
    assert balanced(stood)
    steps = 8 + 4 * (max(row["step"] for row in metrics(run.path)) // 4)
    resumed = milkweed("resume", run.path, "--set", f"trainer.steps={steps}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert len(set(final_policies(run.path, 2, steps))) == 1
    assert balanced(accounts(run.path))
    assert accounts(run.path)["trained"] > stood["trained"]
    assert rows_of(run.path, 1)[-1]["diloco/participants"] == 2
    assert nothing_left(run.path)


def test_replicas_that_meet_in_an_object_store_go_on_without_a_dead_one_and_heal_it(tmp_path):
    chosen = ["trainer.replicas=2", "trainer.steps=30", "diloco.sync_every=3", "diloco.transport=object_store",
              f"diloco.uri={tmp_path / 'store'}", "diloco.poll_s=0.1", "diloco.grace_s=3"]  # fmt: skip
    with LiveRun(tmp_path, "stored", *FEW, *chosen) as run:
        status = run.wait_step(3, "trainer-1")
        os.kill(status["members"]["trainer-1"]["pid"], signal.SIGKILL)
        code, output = run.end()
    assert code == 0, output
    assert len(set(final_policies(run.path, 2, 30))) == 1
    assert rows_of(run.path, 0)[-1]["diloco/rounds"] == 10
    assert balanced(accounts(run.path))
    assert nothing_left(run.path)


def test_another_number_of_replicas_is_refused_on_resume(tmp_path):
    run = tmp_path / "two"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text("[trainer]\nreplicas = 2\nsteps = 10\n[generator]\ncount = 3\n")
    done = milkweed("resume", run, "--set", "trainer.replicas=3")
    assert done.returncode == 2
    assert "began with trainer.replicas = 2" in done.stderr
