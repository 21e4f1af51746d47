from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from fake_hub import TOKEN, FakeHub
from replica_helpers import LIMIT_S, spec, stream_three_lines, wait_until

from services.executors import ExecutorUnavailable, HFJobsExecutor, ReplicaFailed


@pytest.fixture
def hub(tmp_path: Path):
    with FakeHub(tmp_path) as hub:
        yield hub


@pytest.fixture
def executor(hub, monkeypatch):
    monkeypatch.setattr(HFJobsExecutor, "poll_s", 0.1)
    return HFJobsExecutor("ghcr.io/me/milkweed", flavor="a10g-small", token=TOKEN, endpoint=hub.endpoint)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "huggingface_hub" else real(name))
    with pytest.raises(ExecutorUnavailable, match=r"pip install 'milkweed\[hf-jobs\]'"):
        HFJobsExecutor("image")


def test_without_a_token_it_says_how_to_get_one(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ExecutorUnavailable, match="hf auth login"):
        HFJobsExecutor("image")


def test_a_token_that_the_hub_refuses_is_an_error_at_construction(hub):
    with pytest.raises(ExecutorUnavailable, match="answered 401"):
        HFJobsExecutor("image", token="hf_wrong", endpoint=hub.endpoint)


def test_replicas_are_jobs_with_image_hardware_limit_environment_and_labels(hub, executor, tmp_path):
    executor.secrets = {"STORE_KEY": "s3cret"}
    executor.launch_replicas(
        spec(tmp_path / "store", "describe", 2, payload={"lr": 1}, env={"REPLICA_TEST": "yes"}, limit_s=90.0)
    )
    results = executor.collect(LIMIT_S)
    assert [r.value for r in results] == [{"rank": r, "payload": {"lr": 1}, "env": "yes"} for r in (0, 1)]
    assert results[1].log_tail.splitlines() == ["I am 1 of 2", "this went to standard error"]
    jobs = sorted((job.spec for job in hub.jobs.values()), key=lambda s: s["labels"]["milkweed-rank"])
    assert [job["labels"]["milkweed-rank"] for job in jobs] == ["0", "1"]
    assert {key: jobs[0][key] for key in ("dockerImage", "flavor", "timeoutSeconds", "environment", "secrets")} == {
        "dockerImage": "ghcr.io/me/milkweed",
        "flavor": "a10g-small",
        "timeoutSeconds": 90,
        "environment": {"REPLICA_TEST": "yes"},
        "secrets": {"STORE_KEY": "s3cret"},
    }


def test_a_failed_job_reaches_collect_with_its_exit_code_and_log(executor, tmp_path):
    executor.launch_replicas(spec(tmp_path / "store", "fail_at_rank_1", 2))
    with pytest.raises(ReplicaFailed, match=r"ValueError: the shard is empty; Job failed with exit code: 1") as failure:
        executor.collect(LIMIT_S)
    assert (failure.value.rank, failure.value.exit_code) == (1, 1)
    assert "about to fail\nTraceback" in failure.value.log_tail
    assert failure.value.results[0].value == "done"


def test_logs_are_streamed_while_the_job_runs(executor, tmp_path):
    stream_three_lines(executor, tmp_path / "store")
    assert list(executor.stream_logs(0, follow=False)) == ["line 0", "line 1", "line 2"]


def test_cancel_ends_jobs_and_may_be_called_again(hub, executor, tmp_path):
    store = tmp_path / "store"
    executor.launch_replicas(spec(store, "clean_up_when_asked_to_end", 2))
    wait_until((store / "started").exists, "a replica is up")
    executor.cancel()
    executor.cancel()
    assert [job.stage()[0] for job in hub.jobs.values()] == ["CANCELED"] * 2
    with pytest.raises(ReplicaFailed, match="cancelled"):
        executor.collect(LIMIT_S)


def test_a_job_whose_creation_was_not_answered_is_found_and_cancelled(hub, executor, tmp_path):
    hub.silent_starts = True
    with pytest.raises(RuntimeError, match=r"replica 0 could not be started .*others are ended"):
        executor.launch_replicas(spec(tmp_path / "store", "clean_up_when_asked_to_end", 2))
    assert len(hub.jobs) == 2
    assert [job.stage()[0] for job in hub.jobs.values()] == ["CANCELED"] * 2


def test_an_outage_of_the_hub_does_not_fail_a_replica(hub, executor, tmp_path):
    store = tmp_path / "store"
    executor.launch_replicas(spec(store, "count"))
    hub.outage = True
    (status,) = executor.poll()
    assert status.state in ("pending", "running")
    assert "answered 503" in status.detail
    with pytest.raises(TimeoutError, match="answered 503"):
        executor.collect(0.0)
    hub.outage = False
    for i in range(3):
        (store / f"go-{i}").touch()
    assert executor.collect(LIMIT_S)[0].value == 3


def test_a_job_that_somebody_deleted_is_a_failed_replica(hub, executor, tmp_path):
    executor.launch_replicas(spec(tmp_path / "store", "clean_up_when_asked_to_end"))
    deleted = hub.jobs.pop("job0")
    deleted.process.kill()
    deleted.process.wait(30)
    with pytest.raises(ReplicaFailed, match="its job is gone"):
        executor.collect(LIMIT_S)
