"""`milkweed replica`: runs that meet in an object store, started by hand and by an executor."""

import hashlib
import json

import pytest
from launch_runs import SMALL, metrics, milkweed, nothing_left

from launch.config import ConfigError
from launch.replica import TARGET, keep_policy, open_run, replica_config
from services.executors import LocalProcessExecutor, ReplicaSpec

FEW = [
    *SMALL, "trainer.steps=4", "diloco.sync_every=2", "rollouts.groups_per_batch=1", "generator.count=1",
    "generator.episodes=4", "generator.engine.max_batch=4", "replay.beta=0", "teachers.backend=none", "sdpo.alpha=0",
]  # fmt: skip


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
    policies = [store / "policies" / f"rank-{rank}" for rank in (0, 1)]
    digests = [hashlib.sha256((policy / "model.safetensors").read_bytes()).hexdigest() for policy in policies]
    assert digests[0] == digests[1]
    assert json.loads((policies[0] / "config.json").read_text())["model_type"]
    assert [result.value["policy"] for result in results] == [str(policy) for policy in policies]
