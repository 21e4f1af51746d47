"""Plots of runs and of ablations, drawn into files without a display.

Figures are made directly, not through pyplot, so a notebook that calls this keeps its own backend and settings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from services.runs.atomic import write_atomic
from services.telemetry.metrics import read_metrics

# panel title -> metric names; a name that ends in "/" stands for every metric under it
PANELS = {
    "reward": ["reward/mean"],
    "losses": ["policy/loss", "sdpo/loss", "replay/loss"],
    "staleness (versions)": ["staleness/mean", "staleness/max"],
    "tokens/s": ["tokens_per_s"],
    "idle share": ["idle/"],
}


@dataclass(frozen=True, slots=True)
class Curve:
    """Reward of one arm over rollouts, float64 arrays of one length; `low` and `high` are one deviation away."""

    rollouts: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    seeds: int


def plot_metrics(run_dirs: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Reward, losses, staleness, speed and idleness over steps, one line per run and metric.

    Saved as PNG to `out`, by default `metrics.png` in the first run's folder; returned. ValueError when none of the
    runs has metrics.
    """
    folders = [Path(run_dirs)] if isinstance(run_dirs, str | Path) else [Path(run) for run in run_dirs]
    runs = {folder.name: rows for folder in folders if (rows := read_metrics(folder))}
    if not runs:
        raise ValueError(f"no metrics to plot in {', '.join(map(str, folders))}: no step has been trained there yet")

    figure = _figure(width=8, height=2.4 * len(PANELS))
    axes = figure.subplots(len(PANELS), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, names) in zip(axes, PANELS.items(), strict=True):
        for run, rows in runs.items():
            for name in _expand(names, rows):
                points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
                label = name if len(runs) == 1 else f"{run}: {name}"
                axis.plot([x for x, _ in points], [y for _, y in points], label=label, linewidth=1)
        axis.set_title(title, fontsize=9)
        if axis.lines:
            axis.legend(fontsize=7)
    axes[-1].set_xlabel("step")
    return _save(figure, Path(out) if out else folders[0] / "metrics.png")


def plot_ablation(table: Iterable[Mapping[str, Any]], out: str | Path) -> Path:
    """Reward against rollouts, one line per arm: mean over its seeds, a band of one standard deviation.

    `table` has a row {"arm", "seed", "rollouts", "reward"} per arm, seed and point. Saved as PNG to `out`; returned.
    """
    figure = _figure(width=8, height=5)
    axis = figure.subplots()
    for arm, curve in ablation_curves(table).items():
        (line,) = axis.plot(curve.rollouts, curve.mean, label=f"{arm} ({curve.seeds} seeds)", linewidth=1.5)
        if curve.seeds > 1:
            axis.fill_between(curve.rollouts, curve.low, curve.high, color=line.get_color(), alpha=0.2, linewidth=0)
    axis.set_xlabel("rollouts")
    axis.set_ylabel("reward")
    axis.legend(fontsize=8)
    return _save(figure, Path(out))


def ablation_curves(table: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """The mean and the sample standard deviation over seeds of every arm, in the order of the table.

    Seeds of an asynchronous run reach different rollout counts, so each seed is interpolated linearly onto all counts
    that any seed of the arm reports, within the range that all of them cover: a mean over fewer seeds at the edges
    would jump. With one seed low = mean = high. Points without a reward are left out. ValueError for an empty table and
    for an arm whose seeds have no range in common.
    """
    points: dict[str, dict[Any, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in table:
        if row["reward"] is not None:
            points[row["arm"]][row["seed"]].append((float(row["rollouts"]), float(row["reward"])))
    if not points:
        raise ValueError("the ablation's table has no row with a reward: no arm has finished a step")
    return {arm: _curve(arm, [np.array(sorted(seed)) for seed in seeds.values()]) for arm, seeds in points.items()}


def _curve(arm: str, seeds: list[NDArray[np.float64]]) -> Curve:
    first, last = max(seed[0, 0] for seed in seeds), min(seed[-1, 0] for seed in seeds)
    if first > last:
        raise ValueError(f"arm {arm!r}: its seeds have no range of rollouts in common; train them equally long")
    counts = np.unique(np.concatenate([seed[:, 0] for seed in seeds]))
    counts = counts[(counts >= first) & (counts <= last)]
    rewards = np.stack([np.interp(counts, seed[:, 0], seed[:, 1]) for seed in seeds])
    mean = rewards.mean(axis=0)
    deviation = rewards.std(axis=0, ddof=1) if len(seeds) > 1 else np.zeros_like(mean)
    return Curve(counts, mean, mean - deviation, mean + deviation, len(seeds))


def _expand(names: list[str], rows: list[dict[str, Any]]) -> list[str]:
    known = dict.fromkeys(name for row in rows for name in row)
    return [k for name in names for k in known if k == name or (name.endswith("/") and k.startswith(name))]


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    """Drawn in memory first, so the picture too is whole or not there."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    write_atomic(path, drawn.getvalue())
    return path
