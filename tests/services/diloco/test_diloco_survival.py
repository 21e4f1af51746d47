"""Replicas that are killed, frozen, slow or back again, with real processes and signals.

The accounts: what survivors hold afterwards equals DiLoCo in numpy over exactly the contributions that should count.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from diloco_builders import SHAPES, Reference, config, same
from diloco_procs import LargeReplica, LighthouseProc, Proc, Replica, replicas

from services.diloco.config import DilocoConfig
from services.diloco.lighthouse import Lighthouse
from services.meeting import free_port

ROUND = 3  # inner steps
CONFIG = config(sync_every=ROUND)
NAMES = [list(SHAPES)]


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    made = Lighthouse(CONFIG, free_port("127.0.0.1"))
    yield made
    made.close()


def expected(steps: int, lost: set[tuple[int, int]], replicas: int = 3) -> Any:
    """The parameters by replica after `steps`, replica r counting for its r + 1 tokens a step."""
    return Reference(replicas, NAMES, ROUND, weights=[r + 1.0 for r in range(replicas)], lost=lost).run(steps)[-1]


def bit_equal(one: dict[str, Any], other: dict[str, Any], *parts: str) -> None:
    for part in parts or ("parameters", "outer"):
        assert one[part].keys() == other[part].keys()
        for name, value in one[part].items():
            assert np.array_equal(value, other[part][name]), f"{part} {name} differs"


def sync_until_joined(
    those: dict[int, Proc], ahead: list[int], joins: int, rounds: int
) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """Have the replicas `ahead`, after `rounds` rounds, sync until the one that `joins` is in a sync of theirs.

    Mostly that is their next; on a busy machine it may come to a later one. Returns the rounds that are then done, the
    reports of those ahead, and of the one that joined.
    """
    for done in range(rounds + 1, rounds + 20):
        reports = [each.answer() for each in [those[r].order("train", done * ROUND, 0.5) for r in ahead]]
        if reports[0]["participants"] == len(ahead) + 1:
            return done, reports, those[joins].answer()
    raise AssertionError(f"replica {joins} did not join")


def lost_by(replica: int, start: int, stop: int) -> set[tuple[int, int]]:
    return {(replica, each) for each in range(start, stop)}


def test_a_replica_killed_in_inner_steps_costs_the_others_nothing(lighthouse: Lighthouse) -> None:
    with replicas(CONFIG, [0, 1, 2], lighthouse.address) as those:
        for each in those.values():
            each.order("train", ROUND + 1)
        for each in those.values():
            each.answer()
        those[2].kill()
        left = [those[r].order("train", 3 * ROUND) for r in (0, 1)]
        first, second = (each.answer() for each in left)
    bit_equal(first, second)
    assert same(expected(3 * ROUND, {(2, 1), (2, 2)})[0], first["parameters"], 1e-12)
    assert first["rounds"] == 3
    assert (first["rounds_lost"], second["rounds_lost"]) == (0, 0)


@pytest.mark.parametrize("point", ["weight", "data", "vote"])
def test_a_replica_killed_in_a_sync_costs_the_others_nothing(lighthouse: Lighthouse, point: str) -> None:
    with replicas(CONFIG, [0, 1, 2], lighthouse.address) as those:
        for each in [each.order("train", ROUND) for each in those.values()]:
            each.answer()
        those[2].ask("stop_at", point, signal.SIGKILL)
        for each in those.values():
            each.order("train", 2 * ROUND)
        first, second = those[0].answer(), those[1].answer()
        assert those[2].died() == -signal.SIGKILL
        bit_equal(first, second)
        assert same(expected(2 * ROUND, {(2, 1)})[0], first["parameters"], 1e-12)
        assert (first["rounds_lost"], second["rounds_lost"]) == (0, 0)
        assert point == "weight" or first["retries"] >= 1
        # And on they go.
        first, second = (each.answer() for each in [those[r].order("train", 3 * ROUND) for r in (0, 1)])
    bit_equal(first, second)
    assert same(expected(3 * ROUND, {(2, 1), (2, 2)})[0], first["parameters"], 1e-12)


@pytest.mark.parametrize("after_s", [0.001, 0.01, 0.03])
def test_a_replica_killed_while_bytes_move_is_in_the_average_of_all_survivors_or_of_none(after_s: float) -> None:
    settings = config(sync_every=ROUND, weighting="uniform")
    nearby = Lighthouse(settings, free_port("127.0.0.1"))
    with replicas(settings, [0, 1, 2], nearby.address, LargeReplica) as those:
        those[2].ask("stop_at", "data", signal.SIGKILL, after_s)
        for each in those.values():
            each.order("train", ROUND)
        first, second = those[0].answer(), those[1].answer()
    nearby.close()
    assert first == second
    assert first["least"] == first["most"]
    assert first["rounds_lost"] == 0
    step = -0.7 * (1 + 0.9) * ROUND  # the first outer step with Nesterov momentum, per unit of the average
    assert first["least"] in (pytest.approx(step * 1.5), pytest.approx(step * 2))


def test_a_replica_killed_after_the_vote_has_contributed(lighthouse: Lighthouse) -> None:
    with replicas(CONFIG, [0, 1, 2], lighthouse.address) as those:
        those[2].ask("stop_at", "commit", signal.SIGKILL)
        for each in those.values():
            each.order("train", ROUND)
        first, second = those[0].answer(), those[1].answer()
    bit_equal(first, second)
    assert same(expected(ROUND, set())[0], first["parameters"], 1e-12)
    assert (first["retries"], second["retries"]) == (0, 0)


def test_a_killed_replica_comes_back_equal_to_its_source_and_adds_nothing_it_did_not_train(
    lighthouse: Lighthouse,
) -> None:
    with replicas(CONFIG, [0, 1, 2], lighthouse.address) as those:
        for each in [each.order("train", ROUND) for each in those.values()]:
            each.answer()
        those[2].kill()
        for each in [those[r].order("train", 2 * ROUND) for r in (0, 1)]:
            each.answer()
        for each in [those[r].order("set_lr", 0.03125) for r in (0, 1)]:
            each.answer()
        those[2] = Proc(Replica, CONFIG, 2, lighthouse.address)
        those[2].answer()
        those[2].order("catch_up", 2)
        done, (first, second), back = sync_until_joined(those, [0, 1], 2, 2)
        assert back["healed"]
        assert back["contributions"] == [0.0]
        assert back["participants"] == first["participants"] == 3
        bit_equal(first, second)
        bit_equal(first, back)
        # Of its source alone: each survivor has moments of its own.
        source = first if np.array_equal(first["inner"]["0 exp_avg"], back["inner"]["0 exp_avg"]) else second
        bit_equal(source, back, "inner")
        assert (back["lr"], back["step"], back["rounds"]) == (0.03125, done * ROUND, done)
        assert back["rounds_lost"] == 0  # it had trained nothing
        # Its next round counts again, for the three steps it then trains.
        after = [each.answer() for each in [each.order("train", (done + 1) * ROUND) for each in those.values()]]
    for each in after:
        bit_equal(after[0], each)
        assert each["participants"] == 3
    assert after[2]["contributions"][-1] > 0


def test_a_lone_rejoiner_of_two_waits_for_its_peer(lighthouse: Lighthouse) -> None:
    """Half of the replicas that live make no quorum, so it does not train on by itself from the start."""
    with replicas(CONFIG, [0, 1], lighthouse.address) as those:
        for each in [each.order("train", ROUND) for each in those.values()]:
            each.answer()
        those[1].kill()
        those[0].ask("train", 2 * ROUND)
        those[1] = Proc(Replica, CONFIG, 1, lighthouse.address)
        those[1].answer()
        those[1].order("catch_up", 0)  # not knowing that anybody is ahead
        those[0].ask("train", 3 * ROUND - 1, 0.5)
        assert not those[1].answered
        done, (first,), back = sync_until_joined(those, [0], 1, 2)
    assert back["healed"]
    bit_equal(first, back)
    assert back["step"] == done * ROUND


def test_two_of_three_restarted_at_once_do_not_take_each_other_for_the_run(lighthouse: Lighthouse) -> None:
    settings = config(sync_every=ROUND, join_s=4.0)
    nearby = Lighthouse(settings, free_port("127.0.0.1"))
    with replicas(settings, [0, 1, 2], nearby.address) as those:
        for each in [each.order("train", 2 * ROUND) for each in those.values()]:
            each.answer()
        for number in (1, 2):
            those[number].kill()
            those[number] = Proc(Replica, settings, number, nearby.address)
        for number in (1, 2):
            those[number].answer()
            those[number].order("catch_up", 2)
        # Long enough for the two to be a quorum, again and again.
        alone = those[0].ask("train", 3 * ROUND, 4.0)
        back = [those[number].answer() for number in (1, 2)]
    nearby.close()
    assert same(expected(3 * ROUND, {(1, 2), (2, 2)})[0], alone["parameters"], 1e-12)
    for each in back:
        assert each["healed"]
        assert each["contributions"] == [0.0]
        assert (each["step"], each["rounds"]) == (3 * ROUND, 3)
        bit_equal(alone, each, "parameters", "outer", "inner")


def test_a_frozen_replica_is_left_behind_and_heals_when_it_thaws(lighthouse: Lighthouse) -> None:
    with replicas(CONFIG, [0, 1, 2], lighthouse.address) as those:
        for each in [each.order("train", ROUND) for each in those.values()]:
            each.answer()
        those[2].ask("train", ROUND + 1)
        those[2].kill(signal.SIGSTOP)
        first, second = (each.answer() for each in [those[r].order("train", 2 * ROUND) for r in (0, 1)])
        bit_equal(first, second)
        assert same(expected(2 * ROUND, {(2, 1)})[0], first["parameters"], 1e-12)
        those[2].kill(signal.SIGCONT)
        those[2].order("train", 2 * ROUND)
        done, (first, second), thawed = sync_until_joined(those, [0, 1], 2, 2)
    bit_equal(first, second)
    bit_equal(first, thawed)
    assert same(expected(done * ROUND, lost_by(2, 1, done))[0], first["parameters"], 1e-12)
    assert thawed["rounds_lost"] == 1
    assert thawed["contributions"][-1] == 0.0
    assert thawed["step"] == done * ROUND


def test_a_replica_frozen_in_a_sync_costs_the_others_the_limit_of_a_collective_and_nothing_else(
    lighthouse: Lighthouse,
) -> None:
    settings = config(sync_every=ROUND, collective_s=4.0)
    with replicas(settings, [0, 1, 2], lighthouse.address) as those:
        those[2].ask("stop_at", "data", signal.SIGSTOP)
        for each in those.values():
            each.order("train", ROUND)
        first, second = those[0].answer(), those[1].answer()
        bit_equal(first, second)
        assert same(expected(ROUND, {(2, 0)})[0], first["parameters"], 1e-12)
        assert (first["rounds_lost"], second["rounds_lost"]) == (0, 0)
        those[2].kill(signal.SIGCONT)
        # It tries its own sync again, finds the others ahead, and is in their next one.
        done, (first, second), thawed = sync_until_joined(those, [0, 1], 2, 1)
    bit_equal(first, second)
    bit_equal(first, thawed)
    assert same(expected(done * ROUND, lost_by(2, 0, done))[0], first["parameters"], 1e-12)
    assert thawed["rounds_lost"] == 1


def test_a_replica_that_comes_after_the_wait_heals_and_its_round_is_counted_lost() -> None:
    settings = config(sync_every=ROUND, join_s=4.0)
    nearby = Lighthouse(settings, free_port("127.0.0.1"))
    with replicas(settings, [0, 1, 2], nearby.address) as those:
        those[2].ask("train", ROUND - 1)
        first, second = (each.answer() for each in [those[r].order("train", ROUND) for r in (0, 1)])
        bit_equal(first, second)
        assert same(expected(ROUND, {(2, 0)})[0], first["parameters"], 1e-12)
        those[2].order("train", ROUND)
        done, (first, second), late = sync_until_joined(those, [0, 1], 2, 1)
    nearby.close()
    bit_equal(first, second)
    bit_equal(first, late)
    assert (late["rounds_lost"], late["step"], late["contributions"]) == (1, done * ROUND, [0.0])
    assert same(expected(done * ROUND, lost_by(2, 0, done))[0], first["parameters"], 1e-12)


def test_a_slow_replica_within_the_wait_is_in_every_sync(lighthouse: Lighthouse) -> None:
    with replicas(CONFIG, [0, 1, 2], lighthouse.address) as those:
        those[2].order("train", 3 * ROUND, 0.5)
        left = [those[r].order("train", 3 * ROUND) for r in (0, 1)]
        reports = [*(each.answer() for each in left), those[2].answer()]
    for each in reports:
        assert (each["rounds"], each["participants"], each["retries"]) == (3, 3, 0)
        assert same(expected(3 * ROUND, set())[0], each["parameters"], 1e-12)


@pytest.mark.parametrize("waiting", [False, True])
def test_a_lighthouse_that_is_killed_and_started_again_costs_no_round(waiting: bool) -> None:
    # The longer a connection may take, the longer a new lighthouse is not believed that there are fewer than before.
    settings: DilocoConfig = config(sync_every=ROUND, connect_s=40.0)
    port = free_port("127.0.0.1")
    light = Proc(LighthouseProc, settings, port)
    light.answer()
    address = light.ask("where")
    try:
        with replicas(settings, [0, 1, 2], address) as those:
            for each in [each.order("train", 2 * ROUND) for each in those.values()]:
                each.answer()
            if waiting:  # two wait in it for the third
                left = [those[r].order("train", 3 * ROUND) for r in (0, 1)]
                those[2].ask("train", 2 * ROUND + 1, 2.0)
                assert not any(each.answered for each in left)
            light.kill()
            light = Proc(LighthouseProc, settings, port)
            light.answer()
            for each in (those[2],) if waiting else those.values():
                each.order("train", 3 * ROUND)
            for each in those.values():
                each.answer()
            reports = [each.answer() for each in [each.order("train", 4 * ROUND) for each in those.values()]]
    finally:
        light.end()
    for each in reports:
        bit_equal(reports[0], each)
        assert (each["rounds"], each["rounds_lost"], each["participants"]) == (4, 0, 3)
        assert same(expected(4 * ROUND, set())[0], each["parameters"], 1e-12)


def test_who_is_done_leaves_and_is_not_waited_for(lighthouse: Lighthouse) -> None:
    with replicas(CONFIG, [0, 1, 2], lighthouse.address) as those:
        for each in [each.order("train", ROUND) for each in those.values()]:
            each.answer()
        those[2].ask("close")
        first, second = (each.answer() for each in [those[r].order("train", 2 * ROUND) for r in (0, 1)])
    bit_equal(first, second)
    assert first["participants"] == 2
    assert same(expected(2 * ROUND, {(2, 1)})[0], first["parameters"], 1e-12)
