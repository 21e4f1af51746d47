"""The actor around a rollout buffer: what it answers while the buffer works, and when it gives up."""

import asyncio
import inspect
import shutil
import threading

import pytest

from actors.rollout_buffer import RolloutBufferActor
from mesh.messages import Rollout, Sequence, Turn, VersionSpan
from services.rollouts.config import BufferConfig
from services.rollouts.journal import JournalError
from services.runs.checkpoints import Checkpoints

LIMIT_S = 30.0


def actor_in(folder, sample_every=1, **settings):
    config = BufferConfig(**{"group_size": 2, "groups_per_batch": 1, **settings})
    return RolloutBufferActor("buffer-0", config, 7, str(folder), sample_every)


async def call(actor, endpoint, *args):
    """An endpoint's own coroutine, without a mesh."""
    method = inspect.unwrap(getattr(type(actor), endpoint)._method)
    return await asyncio.wait_for(method(actor, *args), LIMIT_S)


def rollout(lease, version=0, text="act", status="finished", reason=""):
    sequence = Sequence([1, 2, 3], [0.0, -0.5, -0.5], [(1, 3)], [VersionSpan(version, 1, 3)])
    turns, sequences = [Turn(0, 1, 3, text, "seen")], [sequence]
    if status == "failed":
        turns, sequences = [], []
    reward = None if status == "failed" else float(lease.member)
    return Rollout(
        lease.rollout_id, lease.task, lease.member, lease.id, sequences, turns, [], status, reward=reward, reason=reason
    )


async def deliver(actor, version=0, text="act", count=2):
    for lease in await call(actor, "claim", "g", version, count, [], 0.0):
        assert await call(actor, "put", rollout(lease, version, text))


def test_status_answers_and_work_waits_its_turn_while_the_buffer_saves(tmp_path):
    async def scenario():
        actor = actor_in(tmp_path)
        await actor.setup()
        loop = asyncio.create_task(actor.run())
        await deliver(actor)
        assert (await call(actor, "accounts"))["ready"] == 1
        began, goes_on = threading.Event(), threading.Event()
        save, order = actor.buffer.save, []

        def slow_save(path, step):
            began.set()
            assert goes_on.wait(LIMIT_S)
            order.append("saved")
            return save(path, step)

        actor.buffer.save = slow_save
        saving = asyncio.create_task(call(actor, "save", str(tmp_path / "step-0"), 0))
        await asyncio.to_thread(began.wait, LIMIT_S)
        taking = asyncio.create_task(call(actor, "take", 0, 1.0))
        taking.add_done_callback(lambda _: order.append("taken"))
        status = await call(actor, "status")
        assert not saving.done()
        assert status["accounts"]["issued"] == 1
        assert status["busy_s"] > 0
        goes_on.set()
        assert (await saving)["ready"] == 1
        assert len((await taking).groups) == 1
        assert order == ["saved", "taken"]
        actor.finishing.set()
        await loop
        await actor.teardown()

    asyncio.run(scenario())


def test_a_caller_that_waits_is_answered_by_what_comes_meanwhile_and_counts_as_idle(tmp_path):
    async def scenario():
        actor = actor_in(tmp_path)
        await actor.setup()
        taking = asyncio.create_task(call(actor, "take", 0, LIMIT_S))
        await asyncio.sleep(0.2)
        assert actor.busy.seconds < 0.2
        await deliver(actor)
        assert (await taking).id == 0
        await actor.teardown()

    asyncio.run(scenario())


def test_an_actor_that_did_not_start_is_torn_down(tmp_path):
    async def scenario():
        await actor_in(tmp_path).teardown()
        owner = actor_in(tmp_path / "run")
        await owner.setup()
        other = RolloutBufferActor("buffer-1", owner.config, 8, str(tmp_path / "run"), 1)
        other_setup = asyncio.create_task(other.setup())
        await owner.teardown()
        with pytest.raises((ValueError, JournalError)):
            await other_setup
        await other.teardown()

    asyncio.run(scenario())


def test_after_a_rewind_the_samples_of_the_new_course_replace_the_old_ones(tmp_path):
    async def scenario():
        actor = actor_in(tmp_path, max_staleness=0)
        await actor.setup()
        await call(actor, "save", str(tmp_path / "step-0"), 0)
        for step in range(2):
            await deliver(actor, step, text="the first course")
            assert await call(actor, "take", step, 1.0)
            await call(actor, "trained", step)
        await call(actor, "move_to", 0)  # the rollouts of version 1 are discarded, those of version 0 are kept
        assert await call(actor, "take", 0, 1.0)
        await call(actor, "trained", 0)
        await deliver(actor, 1, text="another course")
        assert await call(actor, "take", 1, 1.0)
        sample = tmp_path / "rollouts" / "step-000001.md"
        assert "another course" in sample.read_text()
        assert "the first course" not in sample.read_text()
        await actor.teardown()

    asyncio.run(scenario())


async def starve(actor):
    """Claim and fail until no new task comes."""
    for _ in range(20):
        for lease in await call(actor, "claim", "g", 0, 8, [], 0.0):
            await call(actor, "put", rollout(lease, status="failed", reason="no such tool server"))
    assert await call(actor, "claim", "g", 0, 8, [], 0.0) == []


def test_a_run_whose_every_task_fails_ends_the_actor_with_the_reasons(tmp_path):
    async def scenario():
        actor = actor_in(tmp_path)
        await actor.setup()
        loop = asyncio.create_task(actor._guarded_run())
        await starve(actor)
        await asyncio.wait_for(loop, LIMIT_S)
        assert actor.failure.startswith("Starved: the last ")
        assert "failed: no such tool server (" in actor.failure
        await actor.teardown()

    asyncio.run(scenario())


def test_in_its_place_another_one_ends_at_the_first_claim_unless_training_starts_again(tmp_path):
    async def scenario():
        actor = actor_in(tmp_path)
        await actor.setup()
        await starve(actor)
        await actor.teardown()

        replaced = actor_in(tmp_path)
        await replaced.setup()
        await call(replaced, "claim", "g", 0, 1, [], 0.0)
        await asyncio.wait_for(replaced._guarded_run(), LIMIT_S)
        assert replaced.failure.startswith("Starved")
        await replaced.teardown()

        resumed = actor_in(tmp_path)
        await resumed.setup()
        loop = asyncio.create_task(resumed._guarded_run())
        await call(resumed, "move_to", 0)
        await deliver(resumed)
        assert (await call(resumed, "take", 0, 1.0)).id == 0
        resumed.finishing.set()
        await loop
        assert resumed.failure is None
        await resumed.teardown()

    asyncio.run(scenario())


def test_a_buffer_whose_journal_is_lost_goes_on_from_the_newest_checkpoint(tmp_path):
    async def scenario():
        actor = actor_in(tmp_path)
        await actor.setup()
        await deliver(actor)
        await call(actor, "take", 0, 0.0)
        await call(actor, "trained", 0)
        with Checkpoints(tmp_path / "checkpoints").writing(1) as path:
            await call(actor, "save", str(path / "buffer"), 1)
        await actor.teardown()
        shutil.rmtree(tmp_path / "buffer")
        again = actor_in(tmp_path)
        await again.setup()
        await call(again, "move_to", 1)
        (lease, _) = await call(again, "claim", "g", 1, 2, [], 0.0)
        assert (lease.task.index, (await call(again, "accounts"))["trained"]) == (1, 1)
        await again.teardown()

    asyncio.run(scenario())
