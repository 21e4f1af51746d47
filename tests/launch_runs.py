"""Running `milkweed` as a user does: a process of its own, watched from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from launch.traces import Traces, listening

SMALL = [
    "trainer.steps=4",
    "rollouts.groups_per_batch=2",
    "rollouts.group_size=4",
    "generator.episodes=8",
    "generator.engine.max_batch=8",
    "run.evaluate=0",
    "run.sample_every=1",
    "supervision.heartbeat_s=0.3",
]
ENVIRONMENT = {**os.environ, "COLUMNS": "200"}


def milkweed(*arguments, timeout=600):
    """Run to the end; returns the finished process with its output."""
    command = [sys.executable, "-m", "launch.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=ENVIRONMENT)


def settings(root, name, *more):
    pairs = [*SMALL, f"run.root={root}", f"run.name={name}", *more]
    return [part for pair in pairs for part in ("--set", pair)]


class LiveRun:
    """`milkweed run` (or `resume`) in the background; always ended at the end of the block."""

    def __init__(self, root, name, *more, resume=False, traces=None):
        """`traces`: of the run that is resumed."""
        self.path = Path(root) / name
        self.traces = traces or Traces(self.path)
        arguments = ["resume", str(self.path)] if resume else ["run", *settings(root, name, *more)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**ENVIRONMENT, **self.traces.mark},
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=30)

    def status(self):
        file = self.path / "status.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def wait_for(self, condition, what, timeout=400):
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            status = self.status()
            if status and condition(status):
                return status
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended before {what}:\n{self.process.communicate()[0]}")
            time.sleep(0.1)
        raise AssertionError(f"no {what} within {timeout} s; last status: {self.status()}")

    def wait_step(self, step, *members):
        """The status once the run is at that step and these members are in it."""
        return self.wait_for(
            lambda status: status["step"] >= step and set(members) <= set(status["members"]),
            f"step {step}" + f" with {', '.join(members)}" * bool(members),
        )

    def end(self, timeout=600):
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output


def processes_of(path):
    """Pids of this machine's processes that have a file of the run open: its actors, servers and driver."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            links = [os.readlink(fd) for fd in (folder / "fd").iterdir()]
        except OSError:
            continue
        if any(link.startswith(str(path)) for link in links) and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def listening_beyond_this_host(path):
    """Local addresses, other than loopback, on which processes of the run accept connections."""
    return sorted(listening(processes_of(path), beyond_this_host=True))


def nothing_left(path, timeout=10):
    """Whether all processes of the run are gone."""
    until = time.monotonic() + timeout
    while processes_of(path) and time.monotonic() < until:
        time.sleep(0.1)
    return processes_of(path) == []


def metrics(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def accounts(path):
    return json.loads((path / "status.json").read_text())["summary"]["accounts"]
