"""`milkweed chaos`: a run whose processes are killed at random while it trains, and whether it kept its promises.

    start `milkweed run` ─▶ wait for the next step that was drawn ─▶ draw a victim, or two ─▶ kill -9, or stop
                                        ▲                                                         │
                                        └────── status.json, deaths.jsonl: everybody is back ◀────┘
    at the end: who died, how long each took to come back, the books, what is left behind, which promise was broken

A victim is any process of any member, those of a sharded trainer too. One that is stopped (SIGSTOP) hangs, which only
a heartbeat notices. Nobody is killed again before all are back. The draws are the seed's and the moments the machine's,
so two soaks of one seed are alike, not equal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from launch.config import Config
from launch.promises import broken_promises
from launch.traces import Traces
from services.rollouts.audit import audit
from services.rollouts.journal import JournalError
from services.runs.deaths import Death, read_deaths
from services.runs.folder import of_replica

STOPS = 0.2  # share of kills that only stop the process
PAIRS = 0.25  # share of kills that come two at a time
LAST = 0.8  # share of the run's steps after which nobody is killed any more
STEPS_PER_KILL = 20
HANG_S = 5.0
POLL_S = 0.1
WAIT_LIMIT_S = 300.0
END_LIMIT_S = 1800.0  # for the steps after the last kill
SAY = functools.partial(print, flush=True)  # a soak is long, and followed while it goes on


class Soaked(Exception):
    """The soak cannot go on: the run ended or hangs. The message says at which kill."""


@dataclass(slots=True)
class Kill:
    """One process that was killed or stopped."""

    member: str
    pid: int
    sign: signal.Signals
    step: int
    at: float  # Unix seconds
    death: Death | None = None  # as the driver saw it


def defaults(kills: int) -> list[str]:
    """Settings of a soak that the user's go before: enough steps, no death ends the run, a hang is noticed soon."""
    return [
        f"trainer.steps={STEPS_PER_KILL * kills}",
        f"supervision.max_restarts={kills + 4}",
        f"supervision.hang_s={HANG_S}",
        "trainer.keep_checkpoints=1000000",  # the journal then tells of every task from the beginning
    ]


def chaos(
    config: Config, arguments: Sequence[str], run_dir: Path, kills: int, seed: int, say: Callable[[str], None] = SAY
) -> bool:
    """Run `milkweed run` with `arguments`, which make `config` and `run_dir`, and kill; True if all promises held."""
    traces, log = Traces(run_dir), run_dir.with_name(f"{run_dir.name}.log")
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "run", *arguments],
            stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **traces.mark}, start_new_session=True,
        )  # fmt: skip
    soak = _Soak(process, run_dir, config.trainer.steps, traces, random.Random(seed), say)
    broken = []
    try:
        soak.kill(kills)
        traces.processes()
        process.wait(END_LIMIT_S)
    except (Soaked, subprocess.TimeoutExpired) as error:
        broken.append(str(error))
    finally:
        _end(process)
    if process.returncode != 0:
        broken.append(f"`milkweed run` ended with exit status {process.returncode}: see {log}")
    if run_dir.exists():
        broken += broken_promises(run_dir, config.trainer.steps, config.trainer.replicas)
    broken += [f"left behind: {line}" for line in traces.left()]
    _report(soak.killed, run_dir, config.trainer.replicas, broken, say)
    return not broken


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run that goes on: in order if it can, else at once."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(120.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)


class _Soak:
    def __init__(
        self, process: subprocess.Popen[bytes], run_dir: Path, steps: int, traces: Traces, rng: random.Random,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.process, self.run_dir, self.steps, self.traces = process, run_dir, steps, traces
        self.rng, self.say = rng, say
        self.killed: list[Kill] = []

    def kill(self, kills: int) -> None:
        """Spread the kills over the run's steps; Soaked when it does not live to see them all."""
        moments = sorted(self.rng.uniform(1, LAST * self.steps) for _ in range(kills))
        everybody = set(self._wait(lambda status: status["step"] >= 1, "its first step")["members"])
        while moments:
            self._wait(lambda status: status["step"] >= moments[0], f"step {moments[0]:.0f}")
            time.sleep(self.rng.uniform(0.0, 1.0))
            status = self._wait(lambda status: set(status["members"]) >= everybody, "a moment when all live")
            if status["step"] > (1 + LAST) / 2 * self.steps:
                raise Soaked(f"the run was over after {len(self.killed)} of {kills} kills: set trainer.steps higher")
            at_once = 2 if len(moments) > 1 and self.rng.random() < PAIRS else 1
            for name in self.rng.sample(sorted(everybody), at_once):
                self._kill(name, status)
                moments.pop(0)
            if moments:  # a run may end before the last victims are back
                names = " and ".join(kill.member for kill in self.killed[-at_once:])
                self._wait(lambda status: self._is_back(), f"{names} came back")

    def _kill(self, name: str, status: dict[str, Any]) -> None:
        member = status["members"][name]
        pid = self.rng.choice([member["pid"], *[peer["pid"] for peer in member.get("peers", [])]])
        sign = signal.SIGSTOP if self.rng.random() < STOPS else signal.SIGKILL
        self.traces.processes()
        self.killed.append(Kill(name, pid, sign, status["step"], time.time()))
        try:
            os.kill(pid, sign)
        except ProcessLookupError:
            raise Soaked(f"process {pid} of {name} had died by itself: see {self.run_dir / 'logs'}") from None
        self.say(f"step {status['step']:4}: {sign.name} to {name} (pid {pid})")

    def _is_back(self) -> bool:
        """Whether the driver saw every kill and filled every place again."""
        _match(self.killed, self.run_dir)
        return all(kill.death is not None and kill.death.back_at is not None for kill in self.killed)

    def _wait(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """The status that meets the condition."""
        until = time.monotonic() + WAIT_LIMIT_S
        while True:
            status = self._status()
            if status.get("state") == "running" and condition(status):
                return status
            if self.process.poll() is not None:
                raise Soaked(f"the run ended before {what}: set trainer.steps higher")
            if time.monotonic() > until:
                raise Soaked(f"{what}: not seen within {WAIT_LIMIT_S:g} s; see {self.run_dir / 'logs'}")
            time.sleep(POLL_S)

    def _status(self) -> dict[str, Any]:
        path = self.run_dir / "status.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found


def _match(killed: list[Kill], run_dir: Path) -> None:
    """Find each kill's death in the driver's log: the first one of that member after it."""
    deaths = read_deaths(run_dir)
    for kill in killed:
        kill.death = next((d for d in deaths if d.member == kill.member and d.noticed_at >= kill.at), None)


def _report(killed: list[Kill], run_dir: Path, replicas: int, broken: list[str], say: Callable[[str], None]) -> None:
    deaths = read_deaths(run_dir)
    _match(killed, run_dir)
    say(f"\n{len(killed)} processes were killed or stopped; the driver saw {len(deaths)} deaths")
    by_role: dict[str, list[tuple[Kill, Death]]] = {}
    for kill in killed:
        if kill.death is not None:
            by_role.setdefault(kill.death.role, []).append((kill, kill.death))
    say("seconds from the kill (least, median, most) until it was noticed, the next step ended, its place was filled")
    for role, seen in sorted(by_role.items()):
        noticed = _span([death.noticed_at - kill.at for kill, death in seen])
        stepped = _span([death.step_at - kill.at for kill, death in seen if death.step_at])
        back = _span([death.back_at - kill.at for kill, death in seen if death.back_at])
        say(f"  {role:15} {len(seen):3} times   noticed {noticed}   next step {stepped}   back {back}")
    for replica in range(replicas):
        with contextlib.suppress(FileNotFoundError, JournalError):  # then a promise is broken, and named below
            say(f"books: {audit(of_replica(run_dir / 'buffer', replica))}")
    for line in broken:
        say(f"BROKEN: {line}")
    say("all promises were kept" if not broken else f"{len(broken)} promises were broken")


def _span(seconds: list[float]) -> str:
    return "  ".join(f"{value:5.1f}" for value in (min(seconds), median(seconds), max(seconds))) if seconds else "-"
