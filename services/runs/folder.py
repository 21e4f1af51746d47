"""The folder of one run, `runs/NAME/`: where each thing lives, and how a run is found again.

    config.toml     the configuration as resolved        teachers.jsonl  ledger of paid calls
    mesh.ref        how to attach, readable by its       checkpoints/    step-N/, see `services.runs.checkpoints`
                    owner only                           logs/           one file per proc
    metrics.jsonl   one line per step                    buffer/         the rollout buffer's journal
    tb/             TensorBoard events                   status.json     what the driver last said of the run
    rollouts/       readable samples                     driver.lock     who drives the run now

    Of several trainer replicas the first has checkpoints/, buffer/ and rollouts/, the others replica-R/ in each.

A name is used once: a second run in the same folder would mix its metrics and rollouts with the first one's.
"""

from __future__ import annotations

import json
import re
import secrets
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from services.runs.atomic import write_atomic

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
WORDS = ["aster", "clover", "fern", "gentian", "indigo", "juniper", "lupine", "mallow", "nettle", "sorrel", "thistle"]


def of_replica(folder: Path, replica: int) -> Path:
    """Where a trainer replica has what the first one has in `folder`: checkpoints, a buffer's journal, samples."""
    return folder if replica == 0 else folder / f"replica-{replica}"


class RunFolder:
    """`root/name/` with its subfolders, made when it is created.

    `name` defaults to the local time and a word, "20250131-174501-clover". With `resume` the run must exist and is
    opened as it is. ValueError for a name that is no plain folder name, FileExistsError for a name that was used
    before, FileNotFoundError for a run to resume that is not there.
    """

    def __init__(self, root: str | Path, name: str | None = None, *, resume: bool = False) -> None:
        name = name or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.choice(WORDS)}"
        if not resume and not NAME.fullmatch(name):
            raise ValueError(
                f"run name {name!r} is not usable: take up to 100 letters, digits, '.', '_' and '-', "
                "starting with a letter or a digit"
            )
        self.root = Path(root).expanduser().absolute()
        self.name = name
        self.path = self.root / name
        if resume:
            if not _is_run(self.path):
                raise FileNotFoundError(f"{self.path} is no run: it is missing or has no checkpoints/ folder")
        else:
            self._claim()
        for folder in (self.tensorboard, self.rollouts, self.checkpoints, self.logs, self.buffer):
            folder.mkdir(exist_ok=True)

    def _claim(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir()
        except FileExistsError:
            if not self.path.is_dir() or any(self.path.iterdir()):
                raise FileExistsError(
                    f"run {self.name!r} exists already in {self.root}: choose another name, leave the name out to get "
                    f"a fresh one, or go on with it by `milkweed resume {self.name}`"
                ) from None

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def mesh_ref(self) -> Path:
        return self.path / "mesh.ref"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def teachers(self) -> Path:
        return self.path / "teachers.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def buffer(self) -> Path:
        return self.path / "buffer"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def lock(self) -> Path:
        return self.path / "driver.lock"

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Save a nested mapping of scalars, lists and mappings, as `model_dump(mode="json")` makes it, as TOML.

        TOML has no null: a None in a mapping is left out, so the key's default holds when the file is read; a None in
        a list has no such reading and is a ValueError. TypeError names a value that TOML cannot hold.
        """
        write_atomic(self.config, tomli_w.dumps(_without_none(config, "")))

    def read_config(self) -> dict[str, Any]:
        """What `write_config` saved. FileNotFoundError or ValueError say why a run cannot be resumed from its file."""
        if not self.config.is_file():
            raise FileNotFoundError(f"run {self.name!r} has no config.toml in {self.path}: it ended before it began")
        try:
            return tomllib.loads(self.config.read_text())
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{self.config} is not valid TOML, mend it or restore it: {error}") from error

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace status.json; readers always find a whole one."""
        write_atomic(self.status, json.dumps(dict(status), indent=2) + "\n")

    def read_status(self) -> dict[str, Any]:
        """What the driver last said of the run; {} before it said anything."""
        return json.loads(self.status.read_text()) if self.status.is_file() else {}


def find_run(name_or_path: str | Path, root: str | Path = "runs") -> RunFolder:
    """The run with this name under `root`, or at this path. FileNotFoundError lists the runs that exist."""
    given = Path(name_or_path).expanduser()
    for path in (Path(root).expanduser() / given, given):
        if _is_run(path):
            path = path.resolve()
            return RunFolder(path.parent, path.name, resume=True)
    names = runs_in(root)
    found = f"runs there, newest first: {', '.join(names)}" if names else "there are no runs there"
    raise FileNotFoundError(f"no run {str(name_or_path)!r} in {Path(root).expanduser().absolute()}; {found}")


def runs_in(root: str | Path) -> list[str]:
    """Names of the runs under `root`, newest first."""
    root = Path(root).expanduser()
    folders = [p for p in root.iterdir() if _is_run(p)] if root.is_dir() else []
    return [p.name for p in sorted(folders, key=lambda p: (p.stat().st_mtime, p.name), reverse=True)]


def _is_run(path: Path) -> bool:
    """Every run has this folder from its first moment on; other folders are never taken for a run and filled."""
    return (path / "checkpoints").is_dir()


def _without_none(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v, f"{where}.{k}".lstrip(".")) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        if any(v is None for v in value):
            raise ValueError(f"config value {where!r} is a list with None in it, which TOML cannot hold: leave it out")
        return [_without_none(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if not isinstance(value, str | bool | int | float):
        raise TypeError(f"config value {where!r} is a {type(value).__name__}, which TOML cannot hold: dump it first")
    return value
