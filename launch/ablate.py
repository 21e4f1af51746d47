"""The four arms on the harder task, everything else equal: does each channel help, and do both help most?

Every arm of every seed is a whole run in a process of its own, as a user would start it. Arms differ only in the
weights of channels 2 and 3.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from launch.config import PRESETS, load_config
from launch.models import initial_model
from services.runs.atomic import write_atomic
from services.telemetry.metrics import read_metrics
from services.telemetry.plot import plot_ablation

ARMS = {
    "policy": ["sdpo.alpha=0", "replay.beta=0"],
    "policy+sdpo": ["replay.beta=0"],
    "policy+replay": ["sdpo.alpha=0"],
    "all": [],
}
LAST = 5  # steps over which the end of a run is averaged


class AblationFailed(ValueError):
    """An arm did not finish. The message holds what its run said."""


def ablate(out: Path, seeds: Sequence[int], steps: int, settings: Sequence[str] = ()) -> str:
    """Run what is not there yet, write `table.md`, `table.json` and `reward.png` into `out`; returns the table.

    Finished runs in `out` are kept, so an interrupted ablation goes on where it was. AblationFailed names the arm.
    """
    config = PRESETS / "hard.toml"
    initial_model(load_config(config, settings))  # built once, before the arms that share it
    rows: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    for seed in seeds:
        for arm, weights in ARMS.items():
            name = f"{arm.replace('+', '-')}-seed{seed}"
            if not _finished(out / name):
                chosen = [*weights, f"trainer.steps={steps}", f"run.seed={seed}", f"run.root={out}", f"run.name={name}"]
                _run(config, [*chosen, *settings], name)
            rows.append(_result(out / name, arm, seed))
            curves += _curve(out / name, arm, seed)
            _write(out, rows, curves)
    return (out / "table.md").read_text()


def _finished(run: Path) -> bool:
    status = run / "status.json"
    return status.exists() and json.loads(status.read_text())["state"] == "finished"


def _run(config: Path, settings: Sequence[str], name: str) -> None:
    command = [sys.executable, "-m", "launch.cli", "run", str(config)]
    print(f"running {name}", flush=True)
    done = subprocess.run(
        [*command, *[part for setting in settings for part in ("--set", setting)]],
        capture_output=True, text=True, timeout=7200, check=False,
    )  # fmt: skip
    if done.returncode:
        raise AblationFailed(f"{name} did not finish: {done.stderr.strip()[-2000:]}")


def _result(run: Path, arm: str, seed: int) -> dict[str, Any]:
    summary = json.loads((run / "status.json").read_text())["summary"]
    rewards = [row["reward/mean"] for row in read_metrics(run) if row.get("reward/mean") is not None]
    return {
        "arm": arm,
        "seed": seed,
        "mean": fmean(rewards),
        "last": fmean(rewards[-LAST:]),
        "held_out": summary["held_out_reward"],
        "seconds": summary["seconds"],
    }


def _curve(run: Path, arm: str, seed: int) -> list[dict[str, Any]]:
    """Reward against rollouts trained so far."""
    trained, points = 0.0, []
    for row in read_metrics(run):
        trained += row["rollouts"]
        if row.get("reward/mean") is not None:
            points.append({"arm": arm, "seed": seed, "rollouts": trained, "reward": row["reward/mean"]})
    return points


def _write(out: Path, rows: list[dict[str, Any]], curves: list[dict[str, Any]]) -> None:
    """The table so far: a row per arm, a figure per seed."""
    lines = [
        f"| arm | mean reward over the run | last {LAST} steps | held-out reward at the end | mean held-out |",
        "|---|---|---|---|---|",
    ]
    for arm in ARMS:
        of_arm = [row for row in rows if row["arm"] == arm]
        if of_arm:
            cells = [" ".join(_figure(row[key]) for row in of_arm) for key in ("mean", "last", "held_out")]
            held_out = [row["held_out"] for row in of_arm if row["held_out"] is not None]
            lines.append(f"| {arm} | {' | '.join(cells)} | {_figure(fmean(held_out) if held_out else None)} |")
    write_atomic(out / "table.md", "\n".join(lines) + "\n")
    write_atomic(out / "table.json", json.dumps(rows, indent=1) + "\n")
    plot_ablation(curves, out / "reward.png")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
