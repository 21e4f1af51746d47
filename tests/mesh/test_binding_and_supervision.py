"""Real procs, really killed: what a holder of a binding sees, and what the supervisor does about it."""

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from mesh_actors import Worker, WorkerActor

from mesh.binding import Binding, CallTimeout, MemberDied, NoMember, RemoteFailure, RoleTable
from mesh.supervision import RestartPolicy, RoleKeepsDying, StartFailed, SupervisionConfig, Supervisor
from mesh.topology import Place

QUICK = {"heartbeat_s": 0.2, "hang_s": 3.0, "max_restarts": 2, "window_s": 60.0, "start_s": 30.0}


@contextlib.asynccontextmanager
async def workers(host, count=2, args=(), spare=False, **config):
    supervisor = Supervisor(host, SupervisionConfig(**{**QUICK, **config}), log=print)
    binding = Binding[Worker]("worker", patience_s=15.0)
    supervisor.listeners.append(binding.update)
    try:
        await supervisor.place([Place("worker", f"worker-{i}", WorkerActor, args, spare=spare) for i in range(count)])
        watch = asyncio.create_task(supervisor.watch())
        yield supervisor, binding, watch
    finally:
        if "watch" in locals():
            watch.cancel()
            await asyncio.wait({watch})
        await supervisor.stop()


async def pids(supervisor):
    answers = await asyncio.gather(*[placed.handle.status.call_one() for placed in supervisor.placed.values()])
    return {answer["name"]: answer["pid"] for answer in answers}


def test_calls_go_to_the_least_loaded_member(host):
    async def scenario():
        async with workers(host) as (_, binding, _):
            answers = await asyncio.gather(*[binding.call(Worker.work, 0.3) for _ in range(6)])
            names = [a.split(":")[0] for a in answers]
            assert names.count("worker-0") == names.count("worker-1") == 3

    asyncio.run(scenario())


def test_a_killed_member_fails_its_pending_calls_at_once_and_safe_ones_are_answered_by_another(host):
    async def scenario():
        async with workers(host) as (supervisor, binding, _):
            victim = (await pids(supervisor))["worker-0"]
            calls = [asyncio.create_task(binding.call(Worker.work, 2.0)) for _ in range(4)]
            unsafe = [asyncio.create_task(binding.call(Worker.spend, 15.0)) for _ in range(2)]
            await asyncio.sleep(0.5)
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            answers = await asyncio.gather(*calls)
            assert all(a.startswith(("worker-1", "worker-0")) for a in answers)
            assert not any(a.endswith(f":{victim}") for a in answers)
            done, pending = await asyncio.wait(unsafe, timeout=10, return_when=asyncio.FIRST_COMPLETED)
            assert time.monotonic() - killed < 10
            with pytest.raises(MemberDied, match=r"worker\.spend on worker-0"):
                done.pop().result()
            for task in pending:
                task.cancel()
            assert binding.counts.retries >= 2

    asyncio.run(scenario())


def test_a_dead_member_is_placed_again_and_holders_learn_of_it(host):
    async def scenario():
        async with workers(host, count=1) as (supervisor, binding, _):
            victim = (await pids(supervisor))["worker-0"]
            os.kill(victim, signal.SIGKILL)
            answer = await binding.call(Worker.work, 0.0)
            assert answer != f"worker-0:{victim}"
            assert binding.table.members[0].incarnation == 1
            assert supervisor.deaths == {"worker": 1}

    asyncio.run(scenario())


def test_a_stopped_process_is_noticed_by_its_silence_killed_and_replaced(host):
    async def scenario():
        async with workers(host, count=1) as (supervisor, binding, _):
            victim = (await pids(supervisor))["worker-0"]
            os.kill(victim, signal.SIGSTOP)
            for _ in range(200):
                if binding.table.members and binding.table.members[0].incarnation == 1:
                    break
                await asyncio.sleep(0.1)
            assert (await binding.call(Worker.work, 0.0)) != f"worker-0:{victim}"
            with pytest.raises(ProcessLookupError):
                os.kill(victim, 0)

    asyncio.run(scenario())


def test_a_role_that_keeps_dying_ends_with_its_own_error(host):
    async def scenario():
        async with workers(host, count=1, args=("", "the disk is on fire"), max_restarts=1) as (_, _, watch):
            with pytest.raises(RoleKeepsDying, match=r"worker-0 died 2 times in a row; .*the disk is on fire"):
                await asyncio.wait_for(asyncio.shield(watch), 30)

    asyncio.run(scenario())


def test_a_call_to_a_frozen_member_fails_when_the_member_is_given_up_for_dead(host):
    async def scenario():
        async with workers(host) as (supervisor, _, _):
            frozen = Binding[Worker]("worker", patience_s=0.0).only("worker-0")
            frozen.update(supervisor.tables["worker"])
            supervisor.listeners.append(frozen.update)
            os.kill((await pids(supervisor))["worker-0"], signal.SIGSTOP)
            with pytest.raises(MemberDied, match=r"worker\.spend on worker-0: .*lost while the call"):
                await frozen.call_within(600.0, Worker.spend, 1.0)

    asyncio.run(scenario())


def test_a_spare_member_that_keeps_dying_is_given_up_and_the_last_one_ends_the_role(host):
    async def scenario():
        async with workers(host, spare=True, max_restarts=0) as (supervisor, binding, watch):
            victims = await pids(supervisor)
            os.kill(victims["worker-0"], signal.SIGKILL)
            give_up_at = time.monotonic() + 60.0
            while "worker-0" not in supervisor.given_up:
                assert time.monotonic() < give_up_at
                await asyncio.sleep(0.1)
            assert (await binding.call(Worker.work, 0.0)).startswith("worker-1:")
            os.kill(victims["worker-1"], signal.SIGKILL)
            with pytest.raises(RoleKeepsDying, match="worker-1 died 1 times in a row"):
                await asyncio.wait_for(asyncio.shield(watch), 60)

    asyncio.run(scenario())


def test_a_member_that_cannot_start_says_why(host):
    async def scenario():
        with pytest.raises(StartFailed, match="worker-0 did not start: ValueError: no model at /nowhere"):
            async with workers(host, count=1, args=("no model at /nowhere",)):
                pass

    asyncio.run(scenario())


def test_a_silent_member_is_a_timeout_that_names_it(host):
    async def scenario():
        async with workers(host, count=1) as (_, binding, _):
            with pytest.raises(CallTimeout, match=r"worker\.slow on worker-0: no answer within 0\.5 s"):
                await binding.call(Worker.slow, 5.0)

    asyncio.run(scenario())


def test_what_an_endpoint_raises_arrives_with_its_cause_and_the_member_lives(host):
    async def scenario():
        async with workers(host, count=1) as (_, binding, _):
            with pytest.raises(RemoteFailure, match="worker-0 failed: KeyError: 'no such thing'"):
                await binding.call(Worker.fail, "no such thing")
            assert (await binding.call(Worker.work, 0.0)).startswith("worker-0")
            assert binding.counts.retries == 0

    asyncio.run(scenario())


def test_status_is_answered_while_a_member_works(host):
    async def scenario():
        async with workers(host, count=1) as (_, binding, _):
            busy = asyncio.create_task(binding.call(Worker.spin, 3.0))
            slowest = 0.0
            for _ in range(10):
                began = time.monotonic()
                await binding.call(Worker.status)
                slowest = max(slowest, time.monotonic() - began)
            assert slowest < 0.5
            await busy

    asyncio.run(scenario())


def test_a_role_nobody_plays_is_an_error_within_the_patience():
    async def scenario():
        binding = Binding[Worker]("worker", patience_s=0.3)
        with pytest.raises(NoMember, match=r"worker\.work: it has no member"):
            await binding.call(Worker.work, 1.0)

    asyncio.run(scenario())


def test_an_older_table_changes_nothing():
    binding = Binding[Worker]("worker", RoleTable("worker", (), generation=1, revision=5))
    assert not binding.update(RoleTable("worker", (), generation=0, revision=4))
    assert binding.table.generation == 1


def test_the_restart_policy_counts_deaths_in_a_row_and_a_long_life_begins_a_new_row():
    policy = RestartPolicy(max_restarts=2, window_s=10)
    assert [policy.allows_restart(lived) for lived in (9.0, 0.0, 9.9)] == [True, True, False]
    assert policy.allows_restart(10.0)


def test_a_table_can_be_passed_on_without_importing_the_actors_it_names(host):
    async def scenario():
        async with workers(host, count=1) as (_, binding, _):
            table = pickle.dumps(binding.table)
            code = (
                "import pickle, sys; table = pickle.loads(sys.stdin.buffer.read()); "
                "print(table.members[0].name, 'mesh_actors' in sys.modules)"
            )
            read = await asyncio.to_thread(
                subprocess.run, [sys.executable, "-c", code], input=table, capture_output=True, check=True, timeout=60
            )
            assert read.stdout.decode().split() == ["worker-0", "False"]
            again = Binding[Worker]("worker", pickle.loads(table))
            assert (await again.call(Worker.work, 0.0)).startswith("worker-0")

    asyncio.run(scenario())


def test_members_that_die_together_are_all_noticed_at_once(host):
    async def scenario():
        async with workers(host, count=3, hang_s=60.0) as (supervisor, binding, _):
            victims = await pids(supervisor)
            for pid in victims.values():
                os.kill(pid, signal.SIGKILL)
            for _ in range(150):
                if sorted(m.incarnation for m in binding.table.members) == [1, 1, 1]:
                    break
                await asyncio.sleep(0.1)
            assert sorted(m.incarnation for m in binding.table.members) == [1, 1, 1]
            answers = await asyncio.gather(*[binding.call(Worker.work, 0.1) for _ in range(3)])
            assert not {int(answer.split(":")[1]) for answer in answers} & set(victims.values())

    asyncio.run(scenario())


def test_a_holder_that_missed_a_change_is_told_at_its_next_heartbeat(host):
    async def scenario():
        async with workers(host, count=1) as (supervisor, _, _):
            old = supervisor.tables["worker"]
            supervisor.tables["worker"] = replace(old, revision=old.revision + 5)  # changed while nobody was told
            for _ in range(50):
                status = await supervisor.placed["worker-0"].handle.status.call_one()
                if status["bindings"]["worker"]["revision"] == old.revision + 5:
                    break
                await asyncio.sleep(0.1)
            assert status["bindings"]["worker"]["revision"] == old.revision + 5

    asyncio.run(scenario())
