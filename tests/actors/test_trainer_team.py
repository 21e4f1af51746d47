"""A trainer of several procs: what it is told, what it does as real actors, and how one proc's failure ends it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch
from pydantic import ValidationError
from trainer_actors import EndlessBuffer
from transformers import AutoModelForCausalLM

from actors.trainer import TrainerActor
from actors.trainer_part import TrainerConfig, TrainerPart, TrainerSettings
from actors.trainer_peer import TrainerPeerActor
from actors.trainer_team import Team
from mesh import roles
from mesh.binding import Binding, MemberRef, RemoteFailure
from mesh.supervision import SupervisionConfig, Supervisor
from mesh.topology import Place
from services.losses.policy import PolicyConfig
from services.training.config import OptimizerConfig, ReplayConfig, SDPOConfig
from services.weights.config import WeightsConfig
from services.weights.reader import SnapshotReader

STEPS = 4


def settings(model_path, **config):
    sdpo = SDPOConfig(alpha=0.5, teacher="inline", hinted={"align": "turn", "weights": "ema"})
    return TrainerSettings(
        TrainerConfig(**{"steps": STEPS, "optimizer": OptimizerConfig(lr=1e-3), **config}),
        PolicyConfig(max_completion_length=8, kl_beta=0.05), sdpo, ReplayConfig(beta=0.0), WeightsConfig(via="shm"),
        model_path, 1.0, "none", 0,
    )  # fmt: skip


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"devices": ["0"]}, "trainer.devices names GPUs and trainer.device is 'cpu': set trainer.device = \"cuda\""),
        ({"procs": 2, "device": "cuda", "devices": ["0"]}, "trainer.devices has 1 entries for trainer.procs = 2"),
        ({"procs": 2, "device": "cuda:1"}, "trainer.device 'cuda:1' is one device and trainer.procs is 2"),
        ({"dtype": "float16"}, "'float32' or 'bfloat16'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_what_to_do(config, sentence):
    with pytest.raises(ValidationError) as refused:
        TrainerConfig(**config)
    assert sentence in str(refused.value)


def test_each_proc_gets_a_gpu_of_its_own():
    assert TrainerConfig(procs=2, device="cuda").gpus == ("0", "1")
    assert TrainerConfig(procs=2, device="cuda", devices=["5", "3"]).gpus == ("5", "3")
    assert TrainerConfig(device="cuda", devices=["3"]).gpus == ("3",)
    assert TrainerConfig(device="cuda").gpus == TrainerConfig(procs=2).gpus == ()


# ---- one proc fails --------------------------------------------------------------------------------------------------


class Peer:
    """Stands for the binding to a peer."""

    async def call(self, endpoint, *args):
        raise RemoteFailure(f"trainer-0/1.{endpoint.__name__} failed: OSError: no space", "OSError: no space")


def test_a_peers_failure_is_the_trainers_at_once_while_its_own_part_still_waits_in_a_collective(model_path):
    async def scenario():
        team, released = Team(TrainerPart(settings(model_path)), [MemberRef("trainer-0/1", None)]), threading.Event()
        team._peers = [Peer()]
        team.part.step = team.part.load = lambda *_: released.wait(60.0)
        try:
            for call in (team.load(None), team.step(["share", "share"], [None, None])):
                began = time.monotonic()
                with pytest.raises(RemoteFailure, match="no space"):
                    await call
                assert time.monotonic() - began < 5.0
        finally:
            released.set()

    asyncio.run(scenario())


# ---- real actors -----------------------------------------------------------------------------------------------------


async def train(host, given, run_dir):
    """A whole run of a trainer in real procs; its steps' metrics, and the last version as a reader gets it."""
    supervisor = Supervisor(host, SupervisionConfig(start_s=120.0), log=print)
    trainer = Binding("trainer")
    supervisor.listeners.append(lambda table: trainer.update(table) if table.role == "trainer" else None)
    place = Place(
        "trainer", "trainer-0", TrainerActor, (given, str(run_dir)), procs=given.config.procs, peer=TrainerPeerActor
    )
    try:
        await supervisor.place([Place("rollout_buffer", "rollout-buffer-0", EndlessBuffer, ()), place])
        reports = []
        while len(reports) < STEPS:
            reports = await trainer.call(roles.Trainer.reports, "", -1, 5.0)
        ref = await trainer.call(roles.Trainer.weights, STEPS - 1, 20.0)
        weights = await SnapshotReader(given.weights).pull(ref)
        version = {name: tensor.clone() for name, tensor in weights.items()}
        await trainer.call(roles.Trainer.release_weights, ref.lease_id)
        await supervisor.finish("trainer")
        return [report["metrics"] for report in reports], version, len(ref.shards)
    finally:
        await supervisor.stop()


def test_two_procs_train_publish_and_save_what_one_does(host, model_path, tmp_path):
    async def scenario():
        one, _, _ = await train(host, settings(model_path), tmp_path / "one")
        two, version, shards = await train(host, settings(model_path, procs=2), tmp_path / "two")
        assert shards == 2
        for ours, theirs in zip(two, one, strict=True):
            for name in ("policy/loss", "policy/grad_norm", "sdpo/loss", "sdpo/grad_norm", "sdpo/rows", "mismatch/kl"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
        assert one[-1]["sdpo/teacher_version"] == two[-1]["sdpo/teacher_version"] == STEPS - 1
        saved = [tmp_path / run / "checkpoints" / f"step-{STEPS}" / "policy" for run in ("one", "two")]
        policies = [dict(AutoModelForCausalLM.from_pretrained(path).named_parameters()) for path in saved]
        for name, parameter in policies[0].items():
            assert (policies[1][name] - parameter).abs().max() < 1e-5, name
            assert torch.equal(version[name], policies[1][name]), name  # what readers got is what was saved

    asyncio.run(scenario())
