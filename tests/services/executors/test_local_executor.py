from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from replica_helpers import LIMIT_S, all_gone, pids_of, spec, stream_three_lines, wait_until

from mesh.processes import started
from services.environments.process import ROOT
from services.executors import LocalProcessExecutor, ReplicaFailed

TESTS = ROOT / "tests"


@pytest.fixture
def executor(tmp_path: Path):
    with LocalProcessExecutor(tmp_path / "logs") as executor:
        yield executor


def test_each_replica_is_given_its_rank_payload_and_environment_and_its_value_is_collected(executor, tmp_path):
    executor.launch_replicas(spec(tmp_path / "store", "describe", 2, payload={"lr": 0.5}, env={"REPLICA_TEST": "yes"}))
    results = executor.collect(LIMIT_S)
    assert [r.value for r in results] == [{"rank": r, "payload": {"lr": 0.5}, "env": "yes"} for r in (0, 1)]
    assert [(r.state, r.exit_code, r.error) for r in results] == [("succeeded", 0, "")] * 2
    assert results[1].log_tail.splitlines() == ["I am 1 of 2", "this went to standard error"]
    assert [s.state for s in executor.poll()] == ["succeeded", "succeeded"]


def test_replicas_run_at_the_same_time_and_meet_in_the_store(executor, tmp_path):
    executor.launch_replicas(spec(tmp_path / "store", "meet", 3))
    assert [r.value for r in executor.collect(LIMIT_S)] == [[0, 1, 2]] * 3


def test_a_failure_reaches_collect_with_exit_code_and_log_and_the_others_values_are_kept(executor, tmp_path):
    executor.launch_replicas(spec(tmp_path / "store", "fail_at_rank_1", 3))
    with pytest.raises(ReplicaFailed, match="replica 1 failed: ValueError: the shard is empty") as failure:
        executor.collect(LIMIT_S)
    error = failure.value
    assert (error.rank, error.exit_code) == (1, 1)
    assert error.log_tail.startswith("about to fail\nTraceback")
    assert [r.value for r in error.results] == ["done", None, "done"]
    again = executor.collect(LIMIT_S, allow_failures=True)
    assert [r.state for r in again] == ["succeeded", "failed", "succeeded"]


@pytest.mark.parametrize(
    ("function", "payload", "code", "why"),
    [
        ("kill_itself", {}, 137, "killed by signal 9"),
        ("leave", {"code": 7}, 7, "SystemExit: 7"),
        ("not_json", {}, 1, "returned what JSON cannot hold"),
        ("no_such_function", {}, 2, "replica_targets has no function 'no_such_function'"),
    ],
)
def test_every_kind_of_bad_end_is_told_apart(executor, tmp_path, function, payload, code, why):
    executor.launch_replicas(spec(tmp_path / "store", function, payload=payload))
    with pytest.raises(ReplicaFailed, match=why) as failure:
        executor.collect(LIMIT_S)
    assert failure.value.exit_code == code


def test_the_result_of_an_earlier_launch_in_the_same_store_is_not_taken_for_this_ones(executor, tmp_path):
    executor.launch_replicas(spec(tmp_path / "store", "describe"))
    assert executor.collect(LIMIT_S)[0].value
    executor.launch_replicas(spec(tmp_path / "store", "kill_itself"))
    (result,) = executor.collect(LIMIT_S, allow_failures=True)
    assert result.value is None
    assert "I am 0" not in result.log_tail


def test_a_replica_that_runs_longer_than_its_limit_is_ended_and_says_so(executor, tmp_path):
    executor.launch_replicas(spec(tmp_path / "store", "clean_up_when_asked_to_end", limit_s=5.0))
    (result,) = executor.collect(LIMIT_S, allow_failures=True)
    assert result.exit_code == 124
    assert "longer than 5 s" in result.log_tail


def test_collect_names_who_still_runs_when_its_time_is_over_and_leaves_it_running(executor, tmp_path):
    executor.launch_replicas(spec(tmp_path / "store", "count"))
    with pytest.raises(TimeoutError, match=r"replicas 0 \(running\)"):
        executor.collect(0.5)
    with pytest.raises(RuntimeError, match="still run"):
        executor.launch_replicas(spec(tmp_path / "store", "describe"))
    for i in range(3):
        (tmp_path / "store" / f"go-{i}").touch()
    assert executor.collect(LIMIT_S)[0].value == 3


def test_logs_are_streamed_while_the_replica_runs(executor, tmp_path):
    stream_three_lines(executor, tmp_path / "store")
    assert list(executor.stream_logs(0, follow=False)) == ["line 0", "line 1", "line 2"]


def test_cancel_lets_a_target_clean_up(executor, tmp_path):
    store = tmp_path / "store"
    executor.launch_replicas(spec(store, "clean_up_when_asked_to_end"))
    wait_until((store / "started").exists, "the replica is up")
    executor.cancel()
    assert (store / "cleaned").exists()
    with pytest.raises(ReplicaFailed, match="cancelled"):
        executor.collect(LIMIT_S)


def test_cancel_leaves_no_process_whatever_the_replica_started_and_may_be_called_again(executor, tmp_path):
    store = tmp_path / "store"
    executor.launch_replicas(spec(store, "sleep_with_stubborn_family", 2, payload={"stubborn": True}, grace_s=1.0))
    pids = [*pids_of(store, 0), *pids_of(store, 1)]
    assert not any(started(pid) is None for pid in pids)
    executor.cancel()
    assert all_gone(pids)
    executor.cancel()
    assert [s.state for s in executor.poll()] == ["cancelled", "cancelled"]


def test_cancel_keeps_what_had_ended_by_itself(executor, tmp_path):
    executor.launch_replicas(spec(tmp_path / "store", "describe"))
    assert executor.collect(LIMIT_S)[0].state == "succeeded"
    executor.cancel()
    assert executor.collect(LIMIT_S)[0].state == "succeeded"


def test_replicas_end_when_their_launcher_is_killed(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    text = (
        "import sys, time\n"
        "from services.executors import LocalProcessExecutor, ReplicaSpec\n"
        "executor = LocalProcessExecutor(sys.argv[1])\n"
        "target = 'replica_targets:sleep_with_stubborn_family'\n"
        "executor.launch_replicas(ReplicaSpec(target, 1, sys.argv[2], grace_s=1.0))\n"
        "print('launched', flush=True); time.sleep(600)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path / "logs"), str(store)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])},
    )
    try:
        pids = pids_of(store)
        assert not any(started(pid) is None for pid in pids)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.communicate(timeout=30)
    wait_until(lambda: all_gone(pids), f"{pids} are gone")


def test_a_killed_guard_takes_the_replica_with_it(executor, tmp_path):
    store = tmp_path / "store"
    executor.launch_replicas(spec(store, "clean_up_when_asked_to_end"))
    wait_until((store / "started").exists, "the replica is up")
    os.kill(executor.pid(0), signal.SIGKILL)
    (result,) = executor.collect(LIMIT_S, allow_failures=True)
    assert (result.exit_code, result.error) == (137, "it was killed by signal 9")
    assert not (store / "cleaned").exists()


def test_when_one_replica_cannot_be_started_none_is_left(tmp_path, monkeypatch):
    executor = LocalProcessExecutor(tmp_path / "logs")
    (tmp_path / "logs" / "replica-1.log").mkdir(parents=True)  # so that its log cannot be opened
    store = tmp_path / "store"
    with pytest.raises(RuntimeError, match=r"replica 1 could not be started .*Is a directory"):
        executor.launch_replicas(spec(store, "clean_up_when_asked_to_end", 2))
    assert executor._children[0].exit_code is not None
    with pytest.raises(RuntimeError, match="nothing was launched"):
        executor.poll()
