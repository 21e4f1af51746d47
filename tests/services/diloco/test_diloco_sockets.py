"""What replicas and the lighthouse listen on, what a stranger gets there, and what a reader takes from a peer."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from diloco_builders import config
from diloco_procs import LighthouseProc, Proc, replicas

from services.diloco.lighthouse import Lighthouse
from services.diloco.transport import StateTransport
from services.meeting import free_port

SOON = timedelta(seconds=20)


@pytest.fixture
def transport() -> Iterator[StateTransport]:
    made = StateTransport("127.0.0.1", 20.0)
    yield made
    made.shutdown()


def listening(pid: int) -> set[str]:
    """The addresses, as the kernel writes them in hexadecimal, of a process's sockets that wait for others."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    mine = {target for file in files if (target := os.readlink(file)).startswith("socket:")}
    found = set()
    for kind, waiting in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            _, address, _, state, *rest = line.split()
            if state == waiting and f"socket:[{rest[5]}]" in mine:
                found.add(f"{kind} {address}")
    return found


def test_nothing_of_a_replica_or_the_lighthouse_listens_beyond_its_address() -> None:
    settings = config(sync_every=1)
    light = Proc(LighthouseProc, settings, free_port("127.0.0.1"))
    light.answer()
    with replicas(settings, [0, 1], light.ask("where")) as those:
        for each in [each.order("train", 2) for each in those.values()]:
            each.answer()  # they have made a group, and so opened all they will
        found = {pid: listening(pid) for pid in (light.pid, those[0].pid, those[1].pid)}
    light.end()
    # The lighthouse; each replica's store, manager, state and gloo.
    assert len(found[light.pid]) == 1
    assert all(len(found[pid]) >= 3 for pid in found if pid != light.pid)
    beyond = {address for each in found.values() for address in each if not address.startswith("tcp 0100007F:")}
    assert not beyond, f"reachable from elsewhere: {beyond}"


def test_a_state_arrives_as_it_was_when_it_was_offered(transport: StateTransport) -> None:
    moving = torch.arange(5.0)
    transport.send_checkpoint([1], 7, {"a": moving, "b": {"c": [1, "x"]}}, SOON)
    moving += 1  # training goes on
    found = StateTransport("127.0.0.1", 20.0)
    state = found.recv_checkpoint(0, transport.metadata(), 7, SOON)
    found.shutdown()
    assert torch.equal(state["a"], torch.arange(5.0))
    assert state["b"] == {"c": [1, "x"]}


def test_a_reader_that_comes_first_waits_for_the_state(transport: StateTransport) -> None:
    timer = threading.Timer(0.5, transport.send_checkpoint, ([1], 3, {"a": 1}, SOON))
    timer.start()
    assert transport.recv_checkpoint(0, transport.metadata(), 3, SOON) == {"a": 1}
    timer.join()


@pytest.mark.parametrize("path", ["/", "/guess/7", "/{token}/8", "/{token}/7/", "/{token}/x", "/../{token}/7"])
def test_a_stranger_gets_nothing(path: str) -> None:
    transport = StateTransport("127.0.0.1", 0.2)
    transport.send_checkpoint([1], 7, {"a": 1}, SOON)
    base, token, _ = transport.metadata().rsplit("/", 2)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(base + path.format(token=token), timeout=20)
    assert refused.value.code == 404
    transport.shutdown()


def test_a_state_that_is_withdrawn_is_not_given_out() -> None:
    transport = StateTransport("127.0.0.1", 0.2)
    transport.send_checkpoint([1], 7, {"a": 1}, SOON)
    transport.disallow_checkpoint()
    with pytest.raises(urllib.error.HTTPError):
        transport.recv_checkpoint(0, transport.metadata(), 7, SOON)
    transport.shutdown()


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch taken",)


def test_code_in_a_state_is_refused_and_not_run(
    transport: StateTransport, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    transport.send_checkpoint([1], 7, {"a": Evil()}, SOON)
    with pytest.raises(pickle.UnpicklingError):
        transport.recv_checkpoint(0, transport.metadata(), 7, SOON)
    assert not os.path.exists("taken")


def test_a_source_that_is_gone_or_silent_is_an_error_in_time(transport: StateTransport) -> None:
    gone = StateTransport("127.0.0.1", 20.0)
    address = gone.metadata()
    gone.shutdown()
    with pytest.raises(urllib.error.URLError, match="refused"):
        transport.recv_checkpoint(0, address, 7, SOON)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/x/"
        with pytest.raises(TimeoutError):
            transport.recv_checkpoint(0, address, 7, timedelta(seconds=0.5))


def test_a_lighthouse_on_a_taken_port_says_what_to_set() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RuntimeError, match=r"diloco\.lighthouse_port"):
        Lighthouse(config(), taken.getsockname()[1])
