"""Replicas that are processes, over a local path: killed in inner steps, killed while they write, and stopped.

Whatever happens to one, all that committed a round hold the same state after it, bit by bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import object_store_replica
import pytest

LIMIT_S = 180.0  # of anything that a test waits for; nothing is judged by it


class Replicas:
    """Processes of one store, and what they wrote about the rounds that they committed."""

    def __init__(self, folder: Path, world: int, **options) -> None:
        self.store, self.log, self.world = folder / "store", folder / "log", world
        self.log.mkdir()
        self.processes: dict[int, subprocess.Popen] = {}
        self.options = options

    def start(self, rank: int, **options) -> None:
        spec = {"uri": str(self.store), "rank": rank, "world_size": self.world, "log": str(self.log)}
        with (self.log / f"{rank}.err").open("a") as errors:
            self.processes[rank] = subprocess.Popen(
                [sys.executable, object_store_replica.__file__, json.dumps(spec | self.options | options)],
                stderr=errors,
            )

    def lines(self, rank: int) -> list[dict]:
        """Of all processes that were this rank; a line that is being written is left out."""
        path = self.log / f"{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def last(self, rank: int) -> dict:
        """The last round of the process that is this rank now."""
        mine = [line for line in self.lines(rank) if line["pid"] == self.processes[rank].pid]
        return mine[-1] if mine else {"round": 0, "participants": 0}

    def until(self, what, reason: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not what():
            assert time.monotonic() < end, f"{reason}: {self.report()}"
            time.sleep(0.02)

    def report(self) -> str:
        return json.dumps({r: [self.last(r), (self.log / f"{r}.err").read_text()[-2000:]] for r in self.processes})

    def finish(self) -> None:
        """All go on to one round, the last, and end."""
        goal = max(self.last(rank)["round"] for rank in self.processes) + 5
        aside = self.log / "STOP.aside"
        aside.write_text(str(goal))
        aside.rename(self.log / "STOP")
        for rank, process in self.processes.items():
            assert process.wait(LIMIT_S) == 0, f"replica {rank}: {self.report()}"

    def assert_equal(self) -> None:
        digests: dict[int, set[str]] = {}
        for rank in range(self.world):
            for line in self.lines(rank):
                digests.setdefault(line["round"], set()).add(line["digest"])
        assert {number: len(found) for number, found in digests.items()} == dict.fromkeys(digests, 1)
        last = {self.last(rank)["round"] for rank in self.processes}
        assert len(last) == 1
        assert {self.last(rank)["participants"] for rank in self.processes} == {self.world}

    def assert_clean(self) -> None:
        assert len(os.listdir(self.store)) == 3  # keep_rounds
        assert [path for path in self.store.rglob("*") if path.name.endswith(".aside")] == []


@pytest.fixture
def replicas(tmp_path):
    # Long enough that a slow machine leaves nobody out, short enough to wait for once per death.
    times = {"poll_s": 0.02, "grace_s": 8.0, "first_grace_s": 120.0, "give_up_s": LIMIT_S}
    running = Replicas(tmp_path, 3, config=times, fragments=2)
    yield running
    for process in running.processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait(30)


def test_one_of_three_is_killed_in_inner_steps_comes_back_and_equals_its_peers(replicas):
    for rank in range(3):
        replicas.start(rank)
    replicas.until(lambda: all(replicas.last(r)["round"] >= 3 for r in range(3)), "first rounds")
    replicas.processes[2].kill()
    replicas.processes[2].wait(30)
    before = replicas.last(0)["round"]
    replicas.until(lambda: replicas.last(0)["round"] >= before + 5, "rounds of the survivors")
    replicas.start(2)
    replicas.until(lambda: replicas.last(2)["participants"] == 3, "the healed one takes part")
    replicas.finish()
    replicas.assert_equal()
    replicas.assert_clean()
    by_round = {line["round"]: line["participants"] for line in replicas.lines(0)}
    assert {2, 3} == set(by_round.values())
    healed = [line for line in replicas.lines(2) if line["pid"] == replicas.processes[2].pid]
    assert healed[0]["round"] > before  # it did not go through the rounds that it missed
    assert healed[0]["participants"] == 2  # and is not in the one in which it healed
    assert healed[0]["left_out"] == healed[-1]["left_out"] == 0


def test_one_of_three_is_killed_while_it_writes_and_its_half_file_harms_nobody(replicas):
    replicas.start(0)
    replicas.start(1)
    replicas.start(2, die_writing=4)
    assert replicas.processes[2].wait(LIMIT_S) == -signal.SIGKILL
    halves = [path for path in replicas.store.rglob("*.aside")]
    replicas.until(lambda: replicas.last(0)["round"] >= 8, "rounds of the survivors")
    replicas.start(2)
    replicas.until(lambda: replicas.last(2)["participants"] == 3, "the healed one takes part")
    replicas.finish()
    replicas.assert_equal()
    replicas.assert_clean()
    assert len(halves) == 1
    by_round = {line["round"]: line["participants"] for line in replicas.lines(0)}
    assert (by_round[3], by_round[4], by_round[5]) == (3, 2, 2)


def test_one_of_three_is_stopped_and_when_it_goes_on_it_heals(replicas):
    for rank in range(3):
        replicas.start(rank)
    replicas.until(lambda: all(replicas.last(r)["round"] >= 3 for r in range(3)), "first rounds")
    replicas.processes[1].send_signal(signal.SIGSTOP)
    before = replicas.last(0)["round"]
    replicas.until(lambda: replicas.last(0)["round"] >= before + 8, "rounds of the others")
    replicas.processes[1].send_signal(signal.SIGCONT)
    replicas.until(lambda: replicas.last(1)["round"] > before + 8, "it heals")
    replicas.until(lambda: replicas.last(1)["participants"] == 3, "the healed one takes part")
    replicas.finish()
    replicas.assert_equal()
    replicas.assert_clean()


def test_two_of_three_are_killed_and_the_last_one_goes_on_and_heals_them(replicas):
    for rank in range(3):
        replicas.start(rank)
    replicas.until(lambda: all(replicas.last(r)["round"] >= 2 for r in range(3)), "first rounds")
    for rank in (0, 2):
        replicas.processes[rank].kill()
        replicas.processes[rank].wait(30)
    before = replicas.last(1)["round"]
    replicas.until(lambda: replicas.last(1)["round"] >= before + 3, "rounds of the survivor")
    replicas.start(0)
    replicas.start(2)
    replicas.until(lambda: all(replicas.last(r)["participants"] == 3 for r in (0, 2)), "the healed ones take part")
    replicas.finish()
    replicas.assert_equal()
    replicas.assert_clean()
