"""A member that lives in several procs: one in the table, one to call, and one that lives and dies as a whole."""

import asyncio
import contextlib
import os
import signal
from dataclasses import replace

import pytest
from mesh_actors import Crew, CrewLeader, CrewPeer

from mesh.binding import Binding
from mesh.supervision import StartFailed, SupervisionConfig, Supervisor
from mesh.topology import Place, ProcSpec

QUICK = {"heartbeat_s": 0.2, "hang_s": 3.0, "max_restarts": 2, "window_s": 60.0, "start_s": 30.0}


@contextlib.asynccontextmanager
async def crew(host, tmp_path, procs=3, args=(), **proc):
    """One member of `procs` procs, watched."""
    supervisor = Supervisor(host, SupervisionConfig(**QUICK), log=print)
    binding = Binding[Crew]("worker", patience_s=15.0)
    supervisor.listeners.append(binding.update)
    spec = ProcSpec(log_path=str(tmp_path / "crew-0.log"), **proc)
    try:
        await supervisor.place([Place("worker", "crew-0", CrewLeader, args, spec, procs, CrewPeer)])
        watch = asyncio.create_task(supervisor.watch())
        yield supervisor, binding
    finally:
        if "watch" in locals():
            watch.cancel()
            await asyncio.wait({watch})
        await supervisor.stop()


async def until(condition):
    for _ in range(150):
        if condition():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it did not come within 15 s")


async def placed_again(binding):
    await until(lambda: [member.incarnation for member in binding.table.members] == [1])


def running(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}") and "Z" not in state(pid)]


def state(pid):
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
    return "Z"


def test_the_table_shows_the_leader_and_the_leader_reaches_its_peers(host, tmp_path):
    async def scenario():
        async with crew(host, tmp_path, threads=2, devices=("4", "6", "7")) as (supervisor, binding):
            assert [member.name for member in binding.table.members] == ["crew-0"]
            ranks = await binding.call(Crew.ranks)
            assert [each["rank"] for each in ranks] == [0, 1, 2]
            assert [each["RANK"] for each in ranks] == ["0", "1", "2"]
            assert [each["CUDA_VISIBLE_DEVICES"] for each in ranks] == ["4", "6", "7"]
            assert {(each["WORLD_SIZE"], each["OMP_NUM_THREADS"]) for each in ranks} == {("3", "2")}
            assert {each["pid"] for each in ranks} == {known.pid for known in supervisor.processes}
            await until(lambda: "crew-0" in supervisor.health)
            health = supervisor.health["crew-0"]
            assert [health["pid"], *[peer["pid"] for peer in health["peers"]]] == [each["pid"] for each in ranks]
            assert all(peer["running"] for peer in health["peers"])
        logs = sorted(path.name for path in tmp_path.iterdir())
        assert logs == ["crew-0.1.log", "crew-0.2.log", "crew-0.log"]

    asyncio.run(scenario())


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_one_lost_proc_takes_the_whole_member_down_and_all_are_placed_again(host, tmp_path, blow):
    async def scenario():
        async with crew(host, tmp_path, procs=2) as (supervisor, binding):
            before = [each["pid"] for each in await binding.call(Crew.ranks)]
            os.kill(before[1], blow)
            await placed_again(binding)
            after = [each["pid"] for each in await binding.call(Crew.ranks)]
            assert len(after) == 2
            assert not set(after) & set(before)
            assert running(before) == []
            assert supervisor.deaths == {"worker": 1}
        assert running(after) == []

    asyncio.run(scenario())


def test_a_peer_whose_loop_fails_takes_the_member_down_with_its_own_reason(host, tmp_path):
    async def scenario():
        said = []
        async with crew(host, tmp_path, procs=2, args=("", "the disk is on fire")) as (supervisor, binding):
            supervisor.log = said.append
            await placed_again(binding)
        assert any("crew-0 is lost (RuntimeError: the disk is on fire)" in line for line in said)

    asyncio.run(scenario())


def test_a_peer_that_cannot_start_says_why(host, tmp_path):
    async def scenario():
        with pytest.raises(StartFailed, match=r"crew-0 did not start: .*crew-0/1 failed: ValueError: no model"):
            async with crew(host, tmp_path, procs=2, args=("no model",)):
                pass

    asyncio.run(scenario())


def test_each_proc_has_a_log_of_its_own():
    spec = ProcSpec(log_path="/runs/x/logs/trainer-0.log")
    assert [spec.log_of(rank) for rank in range(2)] == ["/runs/x/logs/trainer-0.log", "/runs/x/logs/trainer-0.1.log"]
    assert replace(spec, log_path=None).log_of(1) is None
