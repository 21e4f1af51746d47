"""Which actor plays which role in a run, with what: the one place that knows all actors' constructors."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from actors.following import buffer_name, trainer_name
from actors.generator import GeneratorActor
from actors.lighthouse import LighthouseActor
from actors.rewarder import RewarderActor
from actors.rollout_buffer import RolloutBufferActor
from actors.sdpo_teacher import SDPOTeacherActor
from actors.teacher_pool import TeacherPoolActor
from actors.trainer import TrainerActor
from actors.trainer_part import TrainerSettings
from actors.trainer_peer import TrainerPeerActor
from launch.config import Config
from launch.services import LocalServers
from mesh.topology import Place, ProcSpec
from services.meeting import free_port
from services.runs.folder import RunFolder

# Roles end in this order: who needs another ends before it.
FINISH_ORDER = ["trainer", "generator", "teachers", "sdpo_teacher", "rewarder", "lighthouse", "rollout_buffer"]


def places(config: Config, run: RunFolder, model_path: Path, servers: LocalServers) -> list[Place]:
    """Every member of the run, in the order in which roles are started: who is needed first comes first."""

    def proc(name: str, threads: int = 1) -> ProcSpec:
        return ProcSpec(threads=threads, log_path=str(run.logs / f"{name}.log"))

    model, environment = str(model_path), (servers.environment_url, config.environment)
    sampling = config.generator.episode.temperature
    replicas = config.trainer.replicas
    filled = []
    for replica in range(replicas):
        name, share = buffer_name(replica), config.share(replica)
        holding = (config.buffer(), config.run.seed, str(run.path), config.run.sample_every, replica, share)
        filled.append(Place("rollout_buffer", name, RolloutBufferActor, holding, proc(name)))
    filled += [
        Place("rewarder", name, RewarderActor, (config.rewarder.reward,), proc(name), spare=True)
        for name in (f"rewarder-{i}" for i in range(config.rewarder.count))
    ]
    if config.replay.beta:
        asked = config.teachers.asked(servers.urls.get("teachers"))
        name, own = "teachers-0", config.teachers.vllm if config.teachers.backend == "vllm" else None
        asking = (asked, str(run.teachers), own, replicas)
        filled.append(Place("teachers", name, TeacherPoolActor, asking, proc(name, own.threads if own else 1)))
    if config.sdpo.alpha and config.sdpo.teacher == "actor":
        name, hinted = "sdpo-teacher-0", config.sdpo.hinted
        arguments = (hinted, model, *environment, config.weights, config.tune, replicas)
        filled.append(Place("sdpo_teacher", name, SDPOTeacherActor, arguments, proc(name, hinted.threads)))
    lighthouse = ""
    if config.averages and config.diloco.transport == "torchft":
        port = config.diloco.lighthouse_port or free_port(config.diloco.host)
        lighthouse = f"http://{config.diloco.host}:{port}"
        filled.append(Place("lighthouse", "lighthouse-0", LighthouseActor, (config.diloco, port), proc("lighthouse-0")))
    diloco = config.diloco
    if diloco.transport == "object_store" and diloco.world_size in (None, replicas):
        # All replicas are this run's: each drive has a place of its own, without rounds that no checkpoint knows of.
        diloco = diloco.model_copy(update={"uri": f"{diloco.uri}/{run.name}-{time.time_ns():x}"})
    settings = TrainerSettings(
        config.trainer, config.policy, config.sdpo, config.replay, config.weights, model, sampling,
        config.buffer().advantage_scaling, config.run.seed, config.tune,
        diloco if config.averages else None, lighthouse=lighthouse,
        watch_kl=config.safety.kl_hard_stop is not None,
    )  # fmt: skip
    for replica in range(replicas):
        name, procs = trainer_name(replica), config.trainer.procs
        devices = config.trainer.gpus[replica * procs : (replica + 1) * procs]
        spec = replace(proc(name, config.trainer.threads), devices=devices)
        training = (replace(settings, replica=replica), str(run.path))
        filled.append(Place("trainer", name, TrainerActor, training, spec, procs, TrainerPeerActor, spare=True))
    at_once = -(-config.generator.count * config.generator.episodes // config.rewarder.count)
    score_limit_s = config.rewarder.reward.limit_s(at_once)
    playing = (config.generator, model, *environment, config.weights, config.run.seed, score_limit_s, config.tune)
    for i in range(config.generator.count):
        name, devices = f"generator-{i}", config.generator.devices[i : i + 1]
        spec = replace(proc(name, config.generator.threads), devices=devices)
        role = (*playing, i, replicas, config.safety.monitor)
        # Each of several trainers needs its own.
        filled.append(Place("generator", name, GeneratorActor, role, spec, spare=replicas == 1))
    return filled
