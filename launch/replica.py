"""A run that is one replica of several which meet in an object store: `milkweed replica`, and a target for executors.

    LocalProcessExecutor(logs).launch_replicas(
        ReplicaSpec("launch.replica:train", 2, "s3://bucket/run", {"config": "my.toml", "set": ["trainer.steps=100"]})
    )

Each replica is a whole run, with generators, rewarders and a folder of its own, on a machine of its own. What they
share is the store: there they average, and heal who comes late or again. All must be given the same configuration.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from launch.config import Config, ConfigError, load_config
from services.executors.protocol import Replica, ReplicaSpec
from services.executors.results import check_store
from services.runs.folder import RunFolder

TARGET = "launch.replica:train"


class ReplicaRunFailed(RuntimeError):
    """The replica's run ended by an error. The message is the run's own."""


def train(replica: Replica) -> dict[str, Any]:
    """Train a whole run as one replica, and return its summary.

    The payload: `config`, a TOML file or a preset (unset: the demo), and `set`, a list of "section.key=value". The
    summary is that of the run, with `run`, its folder, and `policy`, where in the store the trained model is.
    """
    from launch.cli import train_replica  # here, because that module is the program, and this one serves it

    path = replica.payload.get("config")
    config = replica_config(
        Path(path) if path else None, replica.rank, replica.world_size, replica.uri, replica.payload.get("set", [])
    )
    status, run = train_replica(config)
    ended = run.read_status()
    if status:
        raise ReplicaRunFailed(ended.get("reason") or f"run {run.name} was ended at once")
    return {**ended["summary"], "run": str(run.path), "policy": policy_address(config)}


def replica_config(path: Path | None, rank: int, world_size: int, uri: str, settings: Sequence[str] = ()) -> Config:
    """The configuration at `path` as that of one replica. ConfigError or ValueError say what to mend."""
    spec = ReplicaSpec(TARGET, world_size, uri)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is none of the {world_size} ranks from 0 on")
    check_store(spec.uri)
    own = [
        'diloco.transport="object_store"',
        f"diloco.uri={json.dumps(spec.uri)}",
        f"diloco.first_rank={rank}",
        f"diloco.world_size={world_size}",
    ]
    config = load_config(path, [*settings, *own])
    if config.trainer.replicas != 1:
        raise ConfigError(
            f"trainer.replicas is {config.trainer.replicas}, but each `milkweed replica` is one of the {world_size} "
            "replicas: set trainer.replicas = 1, and start as many of them"
        )
    config.run.name = f"{config.run.name or 'replica'}-r{rank}"
    return config


def open_run(config: Config) -> RunFolder:
    """The replica's folder: a new one, or that of an earlier start of the same replica, which then goes on.

    FileExistsError when the folder is another run's, ConfigError when it met its peers elsewhere.
    """
    path = Path(config.run.root).expanduser() / str(config.run.name)
    if not (path / "config.toml").is_file():
        return RunFolder(config.run.root, config.run.name)
    run = RunFolder(config.run.root, config.run.name, resume=True)
    before = run.read_config().get("diloco", {})
    for key in ("uri", "first_rank", "world_size"):
        if before.get(key) != getattr(config.diloco, key):
            raise ConfigError(
                f"run {run.name} in {run.path} is another replica's: its diloco.{key} is {before.get(key)!r}, and this "
                f"one's {getattr(config.diloco, key)!r}; set another run.name or run.root"
            )
    return run


def policy_address(config: Config) -> str:
    """Where in the store this replica's trained model is put."""
    return f"{str(config.diloco.uri).rstrip('/')}/policies/rank-{config.diloco.first_rank}"


def keep_policy(config: Config, folder: str) -> str:
    """Copy the trained model into the store, where it outlives the replica's machine; its address there."""
    fs, place = url_to_fs(policy_address(config))
    fs.makedirs(place, exist_ok=True)
    for file in sorted(Path(folder).iterdir()):
        fs.put_file(str(file), f"{place}/{file.name}")
    return policy_address(config)
