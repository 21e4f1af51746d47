from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from replica_helpers import LIMIT_S, all_gone, pids_of, spec, stream_three_lines, wait_until

from launch.monarch_executor import MonarchExecutor
from mesh.roles import Member
from services.executors import ReplicaFailed


@pytest.fixture
def executor(host, tmp_path: Path):
    with MonarchExecutor(host, tmp_path / "logs") as executor:
        yield executor


def proc_of(executor: MonarchExecutor, rank: int) -> int:
    return executor._call(rank, Member.status)["pid"]


def test_replicas_run_at_the_same_time_each_in_its_proc_and_are_collected(executor, tmp_path):
    executor.launch_replicas(spec(tmp_path / "store", "meet", 2))
    assert proc_of(executor, 0) != proc_of(executor, 1)
    assert [r.value for r in executor.collect(LIMIT_S)] == [[0, 1]] * 2


def test_a_replica_is_not_taken_for_a_proc_of_the_mesh(executor, tmp_path):
    executor.launch_replicas(spec(tmp_path / "store", "environment", env={"REPLICA_TEST": "yes"}))
    (result,) = executor.collect(LIMIT_S)
    assert result.value["REPLICA_TEST"] == "yes"
    assert not [name for name in result.value if "BOOTSTRAP_MODE" in name or name == "OMP_NUM_THREADS"]


def test_a_failure_reaches_collect_with_exit_code_and_log(executor, tmp_path):
    executor.launch_replicas(spec(tmp_path / "store", "fail_at_rank_1", 2))
    with pytest.raises(ReplicaFailed, match="replica 1 failed: ValueError: the shard is empty") as failure:
        executor.collect(LIMIT_S)
    assert failure.value.exit_code == 1
    assert failure.value.log_tail.startswith("about to fail\nTraceback")
    assert failure.value.results[0].value == "done"


def test_logs_are_streamed_while_the_replica_runs(executor, tmp_path):
    stream_three_lines(executor, tmp_path / "store")


def test_a_killed_proc_is_a_failed_replica_with_the_reason_and_no_process_stays(executor, tmp_path):
    store = tmp_path / "store"
    executor.launch_replicas(spec(store, "sleep_or_return", 2, grace_s=1.0))
    pids = pids_of(store, 0)
    os.kill(proc_of(executor, 0), signal.SIGKILL)
    with pytest.raises(ReplicaFailed, match=r"replica 0 failed: .*its proc is gone: .*died") as failure:
        executor.collect(LIMIT_S)
    assert [r.value for r in failure.value.results] == [None, "returned"]
    assert "sleeping" in failure.value.log_tail
    wait_until(lambda: all_gone(pids), f"{pids} are gone")


def test_a_stopped_proc_is_a_failed_replica_after_the_silence_limit(host, tmp_path):
    store = tmp_path / "store"
    with MonarchExecutor(host, tmp_path / "logs", silence_s=3.0) as executor:
        executor.launch_replicas(spec(store, "sleep_or_return", grace_s=1.0))
        pids, proc = pids_of(store, 0), proc_of(executor, 0)
        os.kill(proc, signal.SIGSTOP)
        with pytest.raises(ReplicaFailed, match="silent for"):
            executor.collect(LIMIT_S)
        wait_until(lambda: all_gone([proc, *pids]), "the stopped proc and its replica are gone")


def test_cancel_leaves_no_process_and_may_be_called_again(executor, tmp_path):
    store = tmp_path / "store"
    executor.launch_replicas(spec(store, "sleep_with_stubborn_family", 2, payload={"stubborn": True}, grace_s=1.0))
    pids = [*pids_of(store, 0), *pids_of(store, 1)]
    procs = [proc_of(executor, 0), proc_of(executor, 1)]
    executor.cancel()
    assert all_gone(pids)
    wait_until(lambda: all_gone(procs), "the procs are gone")
    executor.cancel()
    assert [s.state for s in executor.poll()] == ["cancelled", "cancelled"]


def test_a_second_launch_takes_the_place_of_the_first(executor, tmp_path):
    executor.launch_replicas(spec(tmp_path / "store", "describe"))
    executor.collect(LIMIT_S)
    first = proc_of(executor, 0)
    executor.launch_replicas(spec(tmp_path / "store", "describe", payload={"again": 1}))
    assert executor.collect(LIMIT_S)[0].value["payload"] == {"again": 1}
    wait_until(lambda: all_gone([first]), "the first proc is gone")
