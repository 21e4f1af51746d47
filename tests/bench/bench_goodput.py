"""Goodput: steps that a run gets done while one process a minute is killed, against an undisturbed run.

    python tests/bench/bench_goodput.py [--seconds 120] [--every 60] [--seed 0] [--set SECTION.KEY=VALUE ...]

Both runs are the same but for the kills, one after the other, on the same machine. Counting begins with the first step
and ends `--seconds` later; steps that a placed-again trainer does twice count once. The victim is any process of any
member; the draws are the seed's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTINGS = ["trainer.steps=100000", "trainer.checkpoint_every=10", "run.evaluate=0", "supervision.max_restarts=1000"]


def steps_done(root: Path, name: str, options: argparse.Namespace, rng: random.Random | None) -> int:
    """Steps of one run within the time; with `rng`, one of its processes is killed in every interval."""
    chosen = [*SETTINGS, f"run.root={root}", f"run.name={name}", *options.set]
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.cli", "run", *[part for one in chosen for part in ("--set", one)]],
        stdout=subprocess.DEVNULL,
    )
    try:
        first = wait_for_step(root / name, process)
        began, killed = time.monotonic(), 0
        while (passed := time.monotonic() - began) < options.seconds:
            if rng and passed > (killed + 0.5) * options.every:  # in the middle of each interval
                members = status(root / name)["members"]
                victim = rng.choice(sorted(members))
                os.kill(members[victim]["pid"], signal.SIGKILL)
                killed += 1
                print(f"  after {passed:.0f} s: killed {victim}", flush=True)
            time.sleep(0.2)
        return int(status(root / name)["step"]) - first
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(180)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_for_step(path: Path, process: subprocess.Popen) -> int:
    until = time.monotonic() + 300
    while time.monotonic() < until and process.poll() is None:
        if (step := status(path).get("step", 0)) >= 1:
            return int(step)
        time.sleep(0.1)
    raise SystemExit(f"no step within 300 s, or the run ended: see {path / 'logs'}")


def status(path: Path) -> dict:
    file = path / "status.json"
    return json.loads(file.read_text()) if file.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="length of each of the two measurements")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="a setting for both")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calm = steps_done(Path(folder), "undisturbed", options, None)
        killed = steps_done(Path(folder), "killed", options, random.Random(options.seed))
    for name, steps in (("undisturbed", calm), ("killed", killed)):
        print(f"{name:12} {steps:5} steps in {options.seconds:.0f} s: {steps / options.seconds:.2f} a second")
    print(f"goodput with one kill every {options.every:.0f} s: {killed / max(calm, 1):.2f}")


if __name__ == "__main__":
    main()
