"""`milkweed replica`: runs that meet in an object store, started by hand and by an executor."""

import hashlib
import json
import os
import signal
import time

import pytest
from launch_runs import SMALL, metrics, milkweed, nothing_left

from launch.config import ConfigError
from launch.replica import TARGET, keep_policy, open_run, replica_config
from services.executors import LocalProcessExecutor, ReplicaFailed, ReplicaSpec

FEW = [
    *SMALL, "trainer.steps=4", "diloco.sync_every=2", "rollouts.groups_per_batch=1", "generator.count=1",
    "generator.episodes=4", "generator.engine.max_batch=4", "replay.beta=0", "teachers.backend=none", "sdpo.alpha=0",
]  # fmt: skip


LONGER = [*FEW, "trainer.steps=12", "diloco.sync_every=4", "trainer.checkpoint_every=4", "diloco.grace_s=5"]


def test_a_replica_is_the_run_with_its_place_among_the_others(tmp_path):
    config = replica_config(None, 1, 3, str(tmp_path / "store"), ["run.name=trial", "trainer.steps=20"])
    assert config.run.name == "trial-r1"
    diloco = config.diloco
    assert (diloco.transport, diloco.uri) == ("object_store", str(tmp_path / "store"))
    assert (diloco.first_rank, diloco.world_size) == (1, 3)
    assert config.trainer.steps == 20
    assert config.run.seed == replica_config(None, 0, 3, str(tmp_path / "store")).run.seed


@pytest.mark.parametrize(
    ("rank", "more", "why"),
    [
        (3, [], "rank 3 is none of the 3 ranks"),
        (0, ["trainer.replicas=2", "generator.count=2"], "trainer.replicas is 2"),
        (0, ["trainer.steps=15", "diloco.sync_every=10"], "no multiple of diloco.sync_every"),
    ],
)
def test_what_contradicts_being_one_replica_is_refused(tmp_path, rank, more, why):
    with pytest.raises(ValueError, match=why):
        replica_config(None, rank, 3, str(tmp_path), more)


def test_a_second_start_of_a_replica_goes_on_with_its_run_and_never_with_anothers(tmp_path):
    chosen = ["run.name=trial", f"run.root={tmp_path}/runs"]
    config = replica_config(None, 0, 2, str(tmp_path / "store"), chosen)
    run = open_run(config)
    run.write_config(config.resolved())
    assert open_run(replica_config(None, 0, 2, str(tmp_path / "store"), chosen)).path == run.path
    with pytest.raises(ConfigError, match=r"its diloco\.uri is"):
        open_run(replica_config(None, 0, 2, str(tmp_path / "other"), chosen))


def test_the_policy_is_kept_in_the_store(tmp_path):
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text("{}")
    config = replica_config(None, 1, 2, str(tmp_path / "store"))
    assert keep_policy(config, str(policy)) == str(tmp_path / "store" / "policies" / "rank-1")
    assert (tmp_path / "store" / "policies" / "rank-1" / "config.json").read_text() == "{}"


def test_a_rank_out_of_range_is_one_sentence_and_exit_code_2(tmp_path):
    ended = milkweed("replica", "--rank", "2", "--world-size", "2", "--uri", str(tmp_path))
    assert ended.returncode == 2
    assert ended.stderr == "milkweed: rank 2 is none of the 2 ranks from 0 on\n"


def wait_step(run, step, limit_s=400.0):
    until = time.monotonic() + limit_s
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < step:
        assert time.monotonic() < until, f"{run.name} did no step {step} within {limit_s} s"
        time.sleep(0.2)


def tasks(run):
    """The seeds of the tasks that were trained: every step's rollouts are sampled."""
    lines = [line for file in (run / "rollouts").glob("step-*.jsonl") for line in file.read_text().splitlines()]
    found = {json.loads(line)["seed"] for line in lines}
    assert len(found) >= 4
    return found


def digest(policy):
    return hashlib.sha256((policy / "model.safetensors").read_bytes()).hexdigest()


def test_two_replicas_launched_as_processes_train_together_and_end_equal(tmp_path):
    store = tmp_path / "store"
    chosen = [*FEW, "run.name=demo", f"run.root={tmp_path}/runs"]
    spec = ReplicaSpec(TARGET, 2, str(store), {"set": chosen}, limit_s=900.0)
    with LocalProcessExecutor(tmp_path / "logs") as executor:
        executor.launch_replicas(spec)
        results = executor.collect(1000.0)
    for rank, result in enumerate(results):
        run = tmp_path / "runs" / f"demo-r{rank}"
        assert (result.value["outcome"], result.value["steps"]) == ("finished", 4)
        assert result.value["run"] == str(run)
        assert f"run demo-r{rank} finished after 4 steps" in result.log_tail
        assert [row["step"] for row in metrics(run)] == [0, 1, 2, 3]
        assert [row["diloco/participants"] for row in metrics(run) if "diloco/participants" in row] == [2.0, 2.0]
        assert nothing_left(run)
    assert not tasks(tmp_path / "runs" / "demo-r0") & tasks(tmp_path / "runs" / "demo-r1")
    policies = [store / "policies" / f"rank-{rank}" for rank in (0, 1)]
    assert digest(policies[0]) == digest(policies[1])
    assert json.loads((policies[0] / "config.json").read_text())["model_type"]
    assert [result.value["policy"] for result in results] == [str(policy) for policy in policies]


def test_a_killed_replica_is_told_and_the_other_trains_on(tmp_path):
    store, runs = tmp_path / "store", tmp_path / "runs"
    chosen = [*LONGER, "run.name=demo", f"run.root={runs}"]
    with LocalProcessExecutor(tmp_path / "logs") as executor:
        executor.launch_replicas(ReplicaSpec(TARGET, 2, str(store), {"set": chosen}, limit_s=1000.0))
        wait_step(runs / "demo-r1", 6)
        os.kill(executor.pid(1), signal.SIGKILL)
        with pytest.raises(ReplicaFailed, match="replica 1 failed: it was killed by signal 9") as failure:
            executor.collect(600.0)
    assert nothing_left(runs / "demo-r1", timeout=120)
    survivor = failure.value.results[0]
    assert (survivor.value["outcome"], survivor.value["steps"]) == ("finished", 12)
    assert [row["diloco/participants"] for row in metrics(runs / "demo-r0") if row["step"] in (3, 11)] == [2.0, 1.0]


def test_a_replica_that_is_started_again_heals_from_its_peer(tmp_path):
    store, runs = tmp_path / "store", tmp_path / "runs"
    # With two needed in every sync the other waits for it, however long its start takes.
    chosen = [*LONGER, "diloco.min_replicas=2", "run.name=demo", f"run.root={runs}"]
    with LocalProcessExecutor(tmp_path / "logs") as executor:
        executor.launch_replicas(ReplicaSpec(TARGET, 2, str(store), {"set": chosen}, limit_s=1000.0))
        wait_step(runs / "demo-r1", 6)
        os.kill(executor.pid(1), signal.SIGKILL)
        assert nothing_left(runs / "demo-r1", timeout=120)
        place = ["replica", "--rank", "1", "--world-size", "2", "--uri", store]
        again = milkweed(*place, *[part for setting in chosen for part in ("--set", setting)], timeout=400)
        assert again.returncode == 0, again.stdout + again.stderr
        results = executor.collect(600.0, allow_failures=True)
    assert [result.state for result in results] == ["succeeded", "failed"]
    assert results[0].value["steps"] == 12
    assert digest(store / "policies" / "rank-0") == digest(store / "policies" / "rank-1")
