"""Which questions the SDPO teacher answers and what it keeps: a real teacher and store, asked without a mesh."""

from __future__ import annotations

import asyncio
import inspect
import threading

import pytest
import torch

from actors.sdpo_teacher import SDPOTeacherActor, Superseded
from mesh.messages import HintedContext, Task
from services.demo.tiny_model import TinyModelConfig, build_model
from services.demo.tokenizer import build_tokenizer
from services.environments.config import EnvironmentConfig
from services.training.hinted import HintedTeacherConfig
from services.weights.logits import LogitsGone, read_logits
from services.weights.snapshots import WeightsConfig

LIMIT_S = 30.0
ASKED = [HintedContext([5, 6, 7], [8, 9], Task("t0", 0, 0), [])]


def make_teacher(model_path, **config):
    settings = HintedTeacherConfig(**{"align": "turn", **config})
    weights = WeightsConfig(via="shm", attempts=7)
    actor = SDPOTeacherActor("sdpo-teacher-0", settings, model_path, "http://nowhere", EnvironmentConfig(), weights)
    actor._probe_due = 1000  # there is no environment to measure in
    return actor


def ask(actor):
    return inspect.unwrap(SDPOTeacherActor.logits._method)(actor, ASKED)


async def rows_of(ref):
    return torch.cat([rows.clone() async for _, rows in read_logits(ref, 64, via="shm")])


def test_a_question_is_not_answered_after_a_newer_one_came(model_path):
    async def scenario():
        actor = make_teacher(model_path)
        await actor.setup()
        computed, go, answer = [], threading.Event(), actor.teacher.aligned_logits

        def slow(contexts):
            computed.append(contexts)
            assert go.wait(LIMIT_S)
            return answer(contexts)

        actor.teacher.aligned_logits = slow
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


def test_the_stores_limits_are_those_of_the_configuration(model_path):
    async def scenario():
        actor = make_teacher(model_path, logits={"max_bytes": 4200, "ttl_s": 7.0})
        await actor.setup()
        assert actor.store.config.ttl_s == 7.0
        with pytest.raises(RuntimeError, match="exceed max_bytes=4200"):
            await ask(actor)
        await actor.teardown()

    asyncio.run(scenario())


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
