from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from replica_helpers import LIMIT_S, spec, stream_three_lines, wait_until

from services.executors import ExecutorUnavailable, ModalExecutor, ReplicaFailed

needs_modal = pytest.mark.skipif(
    importlib.util.find_spec("modal") is None,
    reason="the package modal is not installed: pip install 'milkweed[modal]'",
)


@pytest.fixture
def server(tmp_path: Path):
    from fake_modal import FakeModal

    with FakeModal(tmp_path) as server:
        yield server


@pytest.fixture
def connect(server, monkeypatch):
    """Makes an executor whose `modal` talks to the tests' server."""
    import modal
    from fake_modal import TOKEN

    monkeypatch.setattr(ModalExecutor, "poll_s", 0.1)
    monkeypatch.setenv("MODAL_SERVER_URL", server.url)
    clients = []

    def make(**settings: Any) -> ModalExecutor:
        clients.append(modal.Client.from_credentials(*TOKEN))
        return ModalExecutor("ghcr.io/me/milkweed", client=clients[-1], **settings)

    yield make
    for client in clients:
        client.close()


def test_without_the_package_it_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "modal" else real(name))
    with pytest.raises(ExecutorUnavailable, match=r"pip install 'milkweed\[modal\]'"):
        ModalExecutor("image")


@needs_modal
def test_without_a_token_it_says_how_to_get_one(monkeypatch):
    import modal.config

    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(modal.config, "_user_config", {})
    with pytest.raises(ExecutorUnavailable, match=r"modal token new.*Token missing"):
        ModalExecutor("image")


@needs_modal
@pytest.mark.parametrize("gpu", [None, "A10G"])
def test_replicas_are_sandboxes_with_image_hardware_limit_environment_and_tags(server, connect, tmp_path, gpu):
    executor = connect(app="diloco", gpu=gpu, cpu=2.0, memory=4096)
    executor.launch_replicas(
        spec(tmp_path / "store", "describe", 2, payload={"lr": 1}, env={"REPLICA_TEST": "yes"}, limit_s=89.5)
    )
    results = executor.collect(LIMIT_S)
    assert [r.value for r in results] == [{"rank": r, "payload": {"lr": 1}, "env": "yes"} for r in (0, 1)]
    assert results[1].log_tail.splitlines() == ["I am 1 of 2", "this went to standard error"]
    made = sorted(server.sandboxes.values(), key=lambda sandbox: sandbox.tags["milkweed-rank"])
    assert [sandbox.tags["milkweed-rank"] for sandbox in made] == ["0", "1"]
    assert len({sandbox.tags["milkweed-launch"] for sandbox in made}) == 1
    definition = made[0].request.definition
    assert made[0].request.app_id == "ap-diloco"
    assert definition.timeout_secs == 90
    assert (definition.resources.milli_cpu, definition.resources.memory_mb) == (2000, 4096)
    assert definition.resources.gpu_config.gpu_type == (gpu or "")
    assert "FROM ghcr.io/me/milkweed" in server.images[0].dockerfile_commands


@needs_modal
def test_a_failed_sandbox_reaches_collect_with_its_exit_code_and_log(connect, tmp_path):
    executor = connect()
    executor.launch_replicas(spec(tmp_path / "store", "fail_at_rank_1", 2))
    with pytest.raises(ReplicaFailed, match="replica 1 failed: ValueError: the shard is empty") as failure:
        executor.collect(LIMIT_S)
    assert failure.value.exit_code == 1
    assert failure.value.log_tail.startswith("about to fail\nTraceback")
    assert failure.value.results[0].value == "done"


@needs_modal
def test_logs_are_streamed_while_the_sandbox_runs(connect, tmp_path):
    executor, store = connect(gpu="A10G"), tmp_path / "store"
    stream_three_lines(executor, store)
    executor.collect(LIMIT_S)
    for follow in (False, True):
        assert list(executor.stream_logs(0, follow=follow)) == ["line 0", "line 1", "line 2"]


@needs_modal
@pytest.mark.parametrize("gpu", [None, "A10G"])
def test_cancel_ends_sandboxes_and_may_be_called_again(server, connect, tmp_path, gpu):
    executor, store = connect(gpu=gpu), tmp_path / "store"
    executor.launch_replicas(spec(store, "clean_up_when_asked_to_end", 2))
    wait_until((store / "started").exists, "a replica is up")
    executor.cancel()
    executor.cancel()
    assert all(sandbox.terminated and sandbox.process.poll() is not None for sandbox in server.sandboxes.values())
    with pytest.raises(ReplicaFailed, match="cancelled"):
        executor.collect(LIMIT_S)


@needs_modal
@pytest.mark.parametrize("gpu", [None, "A10G"])
def test_a_sandbox_whose_creation_was_not_answered_is_found_and_ended(server, connect, tmp_path, gpu):
    executor = connect(gpu=gpu)
    server.lost_answers = True
    with pytest.raises(RuntimeError, match=r"replica 0 could not be started .*others are ended"):
        executor.launch_replicas(spec(tmp_path / "store", "clean_up_when_asked_to_end", 2))
    assert len(server.sandboxes) >= 2
    assert all(sandbox.process.poll() is not None for sandbox in server.sandboxes.values())


@needs_modal
def test_an_outage_does_not_fail_a_replica(server, connect, tmp_path):
    executor, store = connect(), tmp_path / "store"
    executor.launch_replicas(spec(store, "count"))
    server.outage = True
    (status,) = executor.poll()
    assert status.state in ("pending", "running")
    assert "out of order" in status.detail
    server.outage = False
    for i in range(3):
        (store / f"go-{i}").touch()
    assert executor.collect(LIMIT_S)[0].value == 3


@needs_modal
def test_a_sandbox_that_is_gone_is_a_failed_replica(server, connect, tmp_path):
    executor = connect()
    executor.launch_replicas(spec(tmp_path / "store", "clean_up_when_asked_to_end"))
    gone = server.sandboxes.popitem()[1]
    gone.process.kill()
    gone.process.wait(30)
    with pytest.raises(ReplicaFailed, match="its sandbox is gone"):
        executor.collect(LIMIT_S)
