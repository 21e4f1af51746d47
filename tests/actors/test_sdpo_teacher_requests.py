"""Which questions the SDPO teacher answers and what it keeps: a real teacher and store, asked without a mesh."""

from __future__ import annotations

import asyncio
import inspect
import threading

import pytest
import torch

from actors.sdpo_teacher import SDPOTeacherActor, Superseded
from mesh.binding import MemberRef, RoleTable
from mesh.messages import HintedContext, Task
from services.demo.tiny_model import TinyModelConfig, build_model
from services.demo.tokenizer import build_tokenizer
from services.environments.config import EnvironmentConfig
from services.losses.topk import top_k_rows
from services.training.hinted import HintedTeacherConfig
from services.weights.config import WeightsConfig
from services.weights.logits import LogitsFull, LogitsGone, read_logits

LIMIT_S = 30.0
ASKED = [HintedContext([5, 6, 7], [8, 9], Task("t0", 0, 0), [])]


def make_teacher(model_path, **config):
    settings = HintedTeacherConfig(**{"align": "turn", **config})
    weights = WeightsConfig(via="shm", attempts=7)
    actor = SDPOTeacherActor("sdpo-teacher-0", settings, model_path, "http://nowhere", EnvironmentConfig(), weights)
    actor._probe_due = 1000  # there is no environment to measure in
    return actor


def ask(actor, asker="trainer-0/0"):
    return inspect.unwrap(SDPOTeacherActor.logits._method)(actor, ASKED, asker)


async def tell(actor, *trainers, revision):
    """What the supervisor says of the trainers, each a name and how often its place was filled before."""
    members = tuple(MemberRef(name, None, incarnation, b"packed") for name, incarnation in trainers)
    bind = inspect.unwrap(SDPOTeacherActor.bind._method)
    await bind(actor, {"trainer": RoleTable("trainer", members, revision=revision)})


def held_up(actor):
    """Makes the teacher wait in the middle of every answer; returns what it was asked and the event to go on."""
    computed, go, align = [], threading.Event(), actor.teacher.align

    def slow(contexts):
        computed.append(contexts)
        assert go.wait(LIMIT_S)
        return align(contexts)

    actor.teacher.align = slow
    return computed, go


async def rows_of(ref):
    return torch.cat([rows.clone() async for _, rows in read_logits(ref, 64, via="shm")])


def test_a_question_is_not_answered_after_a_newer_one_came(model_path):
    async def scenario():
        actor = make_teacher(model_path)
        await actor.setup()
        computed, go = held_up(actor)
        asking = []
        for _ in range(3):
            asking.append(asyncio.create_task(ask(actor)))
            await asyncio.sleep(0.01)  # each is on its way before the next
        go.set()
        in_work, queued, newest = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), LIMIT_S)
        assert isinstance(in_work, Superseded)
        assert isinstance(queued, Superseded)
        assert str(queued) == "question 2 was given up: its asker is at question 3 by now"
        assert len(computed) == 2  # the queued one cost nothing
        assert (await rows_of(newest)).shape == (2, len(build_tokenizer()))
        assert actor.store.held == 1  # the one that was in work pins no memory
        assert (actor.counts["requests"], actor.counts["superseded"]) == (1, 2)
        await actor.teardown()

    asyncio.run(scenario())


def test_only_the_two_newest_answers_are_kept_when_nobody_releases_them(model_path):
    async def scenario():
        actor = make_teacher(model_path)
        await actor.setup()
        refs = [await ask(actor) for _ in range(4)]
        assert actor.store.held == 2
        expected = await rows_of(refs[3])
        assert torch.equal(await rows_of(refs[2]), expected)
        for gone in refs[:2]:
            with pytest.raises(LogitsGone):
                await rows_of(gone)
        assert actor.store.nbytes == 2 * (4096 + 4 * expected.numel())  # regions, a header page each, were used again
        await actor.teardown()

    asyncio.run(scenario())


@pytest.mark.parametrize("row_chunk", [1, 100])
def test_rows_are_those_of_the_teacher_in_the_form_that_is_configured(model_path, row_chunk):
    async def scenario():
        actor = make_teacher(model_path, row_chunk=row_chunk, logits={"dtype": "bfloat16", "top_k": 4})
        await actor.setup()
        ref = await ask(actor)
        assert (ref.rows, ref.row_offsets, ref.dtype, ref.top_k) == (2, [0, 2], "bfloat16", 4)
        (rows,) = [rows.clone() async for _, rows in read_logits(ref, 64, via="shm")]
        expected = top_k_rows(actor.teacher.align(ASKED).read(0, 2), 4)
        assert torch.equal(rows.indices.long(), expected.indices)
        torch.testing.assert_close(rows.values.float(), expected.values, rtol=2**-8, atol=0)
        await actor.teardown()

    asyncio.run(scenario())


def test_answers_that_do_not_fit_are_refused_with_the_remedy_and_leave_nothing_behind(model_path):
    async def scenario():
        actor = make_teacher(model_path, logits={"max_bytes": 4200, "ttl_s": 7.0})
        await actor.setup()
        assert actor.store.config.ttl_s == 7.0
        with pytest.raises(LogitsFull, match="max_bytes = 4200"):
            await ask(actor)
        assert "raise max_bytes" in actor.figures()["trouble"]
        assert actor.store.held == 0
        await actor.teardown()

    asyncio.run(scenario())


def test_an_answer_that_fails_half_way_frees_its_memory(model_path):
    async def scenario():
        actor = make_teacher(model_path, row_chunk=1)
        await actor.setup()
        write, writes = actor._write, []

        def fails(writer, rows, start):
            writes.append(start)
            if start == 1:
                raise OSError("no memory")
            write(writer, rows, start)

        actor._write = fails
        with pytest.raises(OSError, match="no memory"):
            await ask(actor)
        assert (writes, actor.store.held) == ([0, 1], 0)
        await actor.teardown()

    asyncio.run(scenario())


# ---- who asks --------------------------------------------------------------------------------------------------------


def test_the_procs_of_a_trainer_do_not_supersede_each_other(model_path):
    async def scenario():
        actor = make_teacher(model_path)
        await actor.setup()
        refs = [await ask(actor, f"trainer-0/{rank}") for _ in range(3) for rank in range(2)]
        assert actor.store.held == 4  # two for each
        assert {len(await rows_of(ref)) for ref in refs[2:]} == {2}
        _, go = held_up(actor)
        both = [asyncio.create_task(ask(actor, f"trainer-0/{rank}")) for rank in range(2)]
        go.set()
        assert [ref.rows for ref in await asyncio.wait_for(asyncio.gather(*both), LIMIT_S)] == [2, 2]
        assert actor.counts["superseded"] == 0
        await actor.teardown()

    asyncio.run(scenario())


def test_what_a_trainer_was_given_is_released_when_it_dies(model_path):
    async def scenario():
        actor = make_teacher(model_path)
        await actor.setup()
        await tell(actor, ("trainer-0", 0), ("trainer-1", 3), revision=1)
        given = [await ask(actor, asker) for asker in ("trainer-0/0", "trainer-0/1", "trainer-1/0")]
        await tell(actor, ("trainer-0", 0), ("trainer-1", 3), revision=2)
        assert actor.store.held == 3
        await tell(actor, ("trainer-1", 3), revision=3)
        assert actor.store.held == 1  # both procs of the trainer went with it
        for gone in given[:2]:
            with pytest.raises(LogitsGone):
                await rows_of(gone)
        assert len(await rows_of(given[2])) == 2
        await actor.teardown()

    asyncio.run(scenario())


def test_a_trainer_that_is_placed_again_may_ask_before_everybody_knows_it(model_path):
    async def scenario():
        actor = make_teacher(model_path)
        await actor.setup()
        await tell(actor, ("trainer-0", 0), revision=1)
        await ask(actor)
        await tell(actor, revision=2)
        assert actor.store.held == 0
        early = await ask(actor)
        await tell(actor, ("trainer-0", 1), revision=3)
        assert len(await rows_of(early)) == 2
        await tell(actor, ("trainer-0", 2), revision=4)  # died, and the vacant place was missed
        assert actor.store.held == 0
        await actor.teardown()

    asyncio.run(scenario())


def test_a_question_whose_asker_died_is_not_answered(model_path):
    async def scenario():
        actor = make_teacher(model_path)
        await actor.setup()
        await tell(actor, ("trainer-0", 0), revision=1)
        _, go = held_up(actor)
        asking = asyncio.create_task(ask(actor))
        await asyncio.sleep(0.01)
        await tell(actor, revision=2)
        go.set()
        with pytest.raises(Superseded, match="question 1 was given up: trainer-0 died meanwhile"):
            await asyncio.wait_for(asking, LIMIT_S)
        assert actor.store.held == 0
        await actor.teardown()

    asyncio.run(scenario())


def test_rows_that_nobody_releases_expire_while_nobody_asks(model_path):
    async def scenario():
        actor = make_teacher(model_path, logits={"ttl_s": 0.05})
        await actor.setup()
        await ask(actor)
        await asyncio.sleep(0.1)
        assert actor.store.held == 1
        running = asyncio.create_task(actor.run())
        await asyncio.sleep(0.05)
        assert actor.store.held == 0
        actor.finishing.set()
        await asyncio.wait_for(running, LIMIT_S)
        await actor.teardown()

    asyncio.run(scenario())


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_weights_are_followed_as_the_configuration_says(model_path, monkeypatch):
    async def scenario():
        actor = make_teacher(model_path, weights="ema", ema=0.9)
        await actor.setup()
        policy = build_model(TinyModelConfig(hidden_size=32, intermediate_size=48, layers=2, heads=1), 1)
        seen = []

        async def newest(reader, lease, release, newer_than):
            seen.append((reader.config.attempts, newer_than))
            actor.finishing.set()
            return 40, dict(policy.named_parameters())

        monkeypatch.setattr("actors.weights_follower.pull_newest", newest)
        await asyncio.wait_for(actor.run(), LIMIT_S)
        assert seen == [(7, 0)]
        assert actor.teacher.version == 40
        await actor.teardown()

    asyncio.run(scenario())
