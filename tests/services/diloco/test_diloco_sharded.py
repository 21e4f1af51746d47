"""Replicas of two procs each, sharded by FSDP2: they sync, checkpoint, fail and heal as one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from diloco_builders import SHAPES, Reference, adamw, config, parameters, pull, same
from diloco_procs import Proc
from torch import nn
from torch.distributed.tensor import DTensor

from services.diloco.config import DilocoConfig
from services.diloco.lighthouse import Lighthouse
from services.diloco.manager import open_manager
from services.diloco.replicas import Outer
from services.diloco.transport import StateTransport
from services.meeting import free_port, open_store
from services.training.sharding import join, like, shard, whole

ROUND, SIZE = 3, 2
CONFIG = config(sync_every=2 * ROUND, fragments=2)


class ShardedReplica:
    """One proc of it. The optimizer's parameters are the shards of `diloco_builders.parameters`."""

    def __init__(self, settings: DilocoConfig, number: int, rank: int, port: int, lighthouse: str) -> None:
        torch.set_num_threads(1)
        self.number, self.rank = number, rank
        replica = join(rank, SIZE, port)
        model = nn.Module()
        for name, p in parameters().items():
            model.register_parameter(name.replace(".", "_"), p)
        shard(model, replica)
        self.trained = {name: model.get_parameter(name.replace(".", "_")) for name in SHAPES}
        assert all(isinstance(p, DTensor) for p in self.trained.values())
        self.optimizer = adamw(self.trained)
        self.manager = open_manager(
            settings, replica=number, rank=rank, procs=SIZE, lighthouse=lighthouse, share=_from_the_first
        )
        self.outer = Outer(settings, self.trained, self.optimizer, self.manager)

    def train(self, to: int) -> dict[str, Any]:
        while self.outer.step < to:
            step = self.outer.step
            self.outer.step = step + 1
            self.outer.trained(self.number + 1)
            for name, p in self.trained.items():
                gradient = pull(self.number, step, name, whole(p.detach()).numpy())
                p.grad = like(torch.tensor(gradient), p)
            self.optimizer.step()
        return self.report()

    def catch_up(self, at_least: int) -> dict[str, Any]:
        assert self.outer.catch_up(at_least)
        return self.report()

    def report(self) -> dict[str, Any]:
        state = self.outer.state_dict()
        assert all(isinstance(tensor, DTensor) for tensor in state.values())
        moments = self.optimizer.state
        return {
            "parameters": {name: whole(p.detach()).numpy() for name, p in self.trained.items()},
            "outer": {name: whole(tensor).numpy() for name, tensor in state.items()},
            "inner": {
                f"{name} {kind}": whole(value).numpy()
                for name, p in self.trained.items()
                for kind, value in moments[p].items()
            },
            "step": self.outer.step,
            "rounds": self.outer.rounds,
            "participants": self.manager.num_participants(),
        }

    def save(self, folder: str) -> dict[str, Any]:
        dcp.save(self.outer.state_dict(), storage_writer=dcp.FileSystemWriter(folder))
        return self.outer.progress()

    def fail_to_receive(self, times: int) -> None:
        """The next transfers to this proc, and to no other one of the replica, break off."""
        receive, left = StateTransport.recv_checkpoint, [times]

        def broken(transport: StateTransport, **settings: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise ConnectionError("a peer's state broke off")
            return receive(transport, **settings)

        StateTransport.recv_checkpoint = broken  # type: ignore[method-assign,assignment]


def _from_the_first(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


class Team:
    """The procs of one replica."""

    def __init__(self, number: int, lighthouse: Lighthouse) -> None:
        self._store = open_store("127.0.0.1", 120)
        self.procs = [
            Proc(ShardedReplica, CONFIG, number, rank, self._store.port, lighthouse.address) for rank in range(SIZE)
        ]

    def order(self, name: str, *args: Any) -> Team:
        for proc in self.procs:
            proc.order(name, *args)
        return self

    def answer(self) -> Any:
        """Of its first proc; the others must say the same."""
        answers = [proc.answer() for proc in self.procs]
        for each in answers[1:]:
            if isinstance(each, dict) and "parameters" in each:
                assert same(answers[0]["parameters"], each["parameters"], 0.0)
                assert each["step"] == answers[0]["step"]
        return answers[0]

    def end(self) -> None:
        for proc in self.procs:
            proc.end()


@contextmanager
def teams(*numbers: int, lighthouse: Lighthouse) -> Iterator[dict[int, Team]]:
    made = {number: Team(number, lighthouse) for number in numbers}
    try:
        for team in made.values():
            team.answer()
        yield made
    finally:
        for team in made.values():
            team.end()


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    made = Lighthouse(CONFIG, free_port("127.0.0.1"))
    yield made
    made.close()


def expected(steps: int, lost: set[tuple[int, int]] | None = None) -> Any:
    names = list(SHAPES)
    fragments = [names[:2], names[2:]]
    return Reference(2, fragments, 2 * ROUND, weights=[1.0, 2.0], lost=lost or set()).run(steps)[-1]


def bit_equal(one: dict[str, Any], other: dict[str, Any], *parts: str) -> None:
    for part in parts:
        assert one[part].keys() == other[part].keys()
        for name, value in one[part].items():
            assert np.array_equal(value, other[part][name]), f"{part} {name} differs"


def test_sharded_replicas_equal_the_reference(lighthouse: Lighthouse) -> None:
    with teams(0, 1, lighthouse=lighthouse) as those:
        reports = [team.answer() for team in [team.order("train", 4 * ROUND + 1) for team in those.values()]]
    for number, report in enumerate(reports):
        assert same(expected(4 * ROUND + 1)[number], report["parameters"], 1e-12)
    bit_equal(reports[0], reports[1], "outer")


def test_a_killed_replica_heals_in_all_its_procs_or_in_none(lighthouse: Lighthouse) -> None:
    with teams(0, 1, lighthouse=lighthouse) as those:
        for team in [team.order("train", ROUND + 1) for team in those.values()]:
            team.answer()
        those[1].procs[1].kill(signal.SIGKILL)
        those[1].procs[0].kill(signal.SIGKILL)  # as its trainer does: half a replica is none
        alone = those[0].order("train", 2 * ROUND).answer()
        assert alone["participants"] == 1
        assert same(expected(2 * ROUND, {(1, 1)})[0], alone["parameters"], 1e-12)

        those[1] = Team(1, lighthouse)
        those[1].answer()
        # One of its procs gets no state at first: then none of them may take one over.
        those[1].procs[1].ask("fail_to_receive", 1)
        those[1].order("catch_up", 2)
        for done in range(3, 20):
            source = those[0].order("train", done * ROUND).answer()
            if source["participants"] == 2:
                break
        back = those[1].answer()
        bit_equal(source, back, "outer", "inner")
        assert (back["step"], back["rounds"]) == (source["step"], source["rounds"])
        after = [team.answer() for team in [team.order("train", (done + 1) * ROUND) for team in those.values()]]
        bit_equal(after[0], after[1], "outer")
        assert after[1]["participants"] == 2


def test_a_checkpoint_of_two_procs_is_read_by_one(lighthouse: Lighthouse, tmp_path: Path) -> None:
    with teams(0, lighthouse=lighthouse) as those:
        report = those[0].order("train", ROUND + 1).answer()
        progress = those[0].order("save", str(tmp_path / "outer")).answer()
    trained = parameters()
    outer = Outer(CONFIG, trained, adamw(trained), open_manager(CONFIG, replica=0, lighthouse=lighthouse.address))
    tensors: dict[str, Any] = outer.state_dict()
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(tmp_path / "outer"), no_dist=True)
    outer.load(tensors, progress)
    found = outer.state_dict()
    outer.close()
    assert (outer.step, outer.rounds) == (ROUND + 1, 1)
    assert found.keys() == report["outer"].keys()
    assert all(np.array_equal(found[name].numpy(), report["outer"][name]) for name in found)
    assert any(tensor.any() for name, tensor in found.items() if name.endswith("momentum_buffer"))
