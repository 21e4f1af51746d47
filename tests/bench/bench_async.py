"""Asynchronous against synchronous training: the same run, once as it is and once on-policy in lock-step.

    python tests/bench/bench_async.py [--steps 16] [--rounds 2]

Lock-step is `rollouts.max_staleness = 0` without prefetch: generators wait for each step, the trainer for each batch.
Rates are over the steps after the first three, from the times in `metrics.jsonl`; rounds alternate between the two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ARMS = {"async": [], "sync": ["rollouts.max_staleness=0", "trainer.prefetch=false"]}
WARM = 3  # steps before the rate is taken: everything is starting


def rate(root: Path, name: str, steps: int, settings: list[str]) -> tuple[float, float]:
    """Rollouts trained per second, and the generators' mean idle share, of one run."""
    chosen = [f"run.root={root}", f"run.name={name}", f"trainer.steps={steps}", "run.evaluate=0", *settings]
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "run", *[part for one in chosen for part in ("--set", one)]],
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout}{done.stderr}")
    rows = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()][WARM:]
    trained = sum(row["rollouts"] for row in rows[1:])
    return trained / (rows[-1]["time"] - rows[0]["time"]), statistics.fmean(
        row["idle/generator"] for row in rows if "idle/generator" in row
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="a setting for both")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for arm, settings in ARMS.items():
                found[arm].append(rate(Path(folder), f"{arm}-{number}", options.steps, [*settings, *options.set]))
    print(f"{'':8}{'rollouts/s':>12}{'generators idle':>18}")
    for arm, figures in found.items():
        print(
            f"{arm:8}{statistics.median(f[0] for f in figures):>12.1f}{statistics.fmean(f[1] for f in figures):>17.0%}"
        )
    ratios = [a[0] / s[0] for a, s in zip(found["async"], found["sync"], strict=True)]
    print(
        f"async / sync, round by round: {', '.join(f'{r:.2f}' for r in ratios)}; median {statistics.median(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
