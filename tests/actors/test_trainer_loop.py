"""What ends a trainer and what does not, and what a stop leaves behind: a real learner among fake actors."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trainer_actors import batch

from actors import trainer as module
from actors import trainer_team
from actors.replicas import Look
from actors.trainer import SAVE_LIMIT_S, TEACHER_PATIENCE_S, Prepared, TrainerActor, finish_limit
from actors.trainer_part import TrainerConfig, TrainerSettings
from mesh.binding import Binding, CallTimeout, MemberDied, NoMember, RemoteFailure
from services.demo.tokenizer import build_tokenizer
from services.diloco.config import DilocoConfig
from services.losses.policy import PolicyConfig
from services.telemetry.spans import Spans
from services.training.config import ReplayConfig, SDPOConfig
from services.training.plan import Hinted
from services.weights.config import WeightsConfig
from services.weights.logits import LogitsStore

LIMIT_S = 60.0


class Buffer:
    """Gives any batch, after the errors it was told to raise. `gate(batch_id)` False: that batch is not complete."""

    def __init__(self, errors=(), gate=lambda batch_id: True):
        self.errors, self.gate, self.calls = list(errors), gate, []

    async def call(self, endpoint, *args):
        self.calls.append((endpoint.__name__, args[0]))
        if endpoint.__name__ != "take":
            return None
        await asyncio.sleep(0.001)
        if self.errors:
            raise self.errors.pop(0)
        return batch(args[0]) if self.gate(args[0]) else None


class Teacher:
    """Answers with rows of zeros for every turn token. `release` hangs where it was told to."""

    bound = True

    def __init__(self, release_hangs=False):
        self.store, self.release_hangs, self.releases = LogitsStore(), release_hangs, []

    async def call(self, endpoint, argument, asker=None):
        if endpoint.__name__ == "release":
            self.releases.append(argument)
            if self.release_hangs:
                await asyncio.Event().wait()
            return await self.store.release(argument)
        offsets = [4 * n for n in range(len(argument) + 1)]
        vocab = len(build_tokenizer())
        return await self.store.put(torch.zeros(offsets[-1], vocab), offsets, teacher_version=0)


def make_trainer(model_path, tmp_path, buffer=None, teacher=None, *, alpha=0.0, sdpo=None, **config):
    settings = TrainerSettings(
        TrainerConfig(**{"steps": 3, **config}), PolicyConfig(max_completion_length=8),
        SDPOConfig(alpha=alpha, **(sdpo or {})), ReplayConfig(beta=0.0), WeightsConfig(via="shm"), model_path,
        1.0, "none", 0,
    )  # fmt: skip
    actor = TrainerActor("trainer-0", settings, str(tmp_path))
    actor.buffer = buffer or Buffer()
    if teacher is not None:
        actor.bindings["sdpo_teacher"] = teacher
    return actor


def endpoint(actor, name):
    """The function behind an endpoint, as its actor's method."""
    return inspect.unwrap(getattr(type(actor), name)._method).__get__(actor)


async def run_to_its_end(actor):
    await actor.setup()
    await asyncio.wait_for(actor._guarded_run(), LIMIT_S)
    await actor.teardown()
    return actor.failure


async def started(actor):
    await actor.setup()
    actor._loop_task = asyncio.create_task(actor._guarded_run())


async def until(condition):
    give_up_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.01)


def checkpoints(tmp_path):
    return sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))


# ---- the buffer ------------------------------------------------------------------------------------------------------


def test_a_buffer_that_refuses_a_batch_ends_the_trainer_with_its_reason(model_path, tmp_path):
    refusal = RemoteFailure("rollout_buffer.take failed: ValueError: batch 0 cannot be taken", "ValueError")
    buffer = Buffer([refusal])
    failure = asyncio.run(run_to_its_end(make_trainer(model_path, tmp_path, buffer)))
    assert failure == "RemoteFailure: rollout_buffer.take failed: ValueError: batch 0 cannot be taken"
    assert [call for call in buffer.calls if call[0] == "take"] == [("take", 0)]
    assert checkpoints(tmp_path) == []


def test_a_buffer_that_is_gone_for_a_while_is_asked_again(model_path, tmp_path):
    errors = [NoMember("it has no member"), CallTimeout("no answer"), MemberDied("it died")]
    actor = make_trainer(model_path, tmp_path, Buffer(errors), prefetch=False)
    assert asyncio.run(run_to_its_end(actor)) is None
    assert (actor.step_n, actor.trouble) == (3, "take: it died")
    assert checkpoints(tmp_path) == ["step-3"]


# ---- publishing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_publish_that_failed_is_tried_again_while_the_batch_that_needs_it_is_waited_for(
    model_path, tmp_path, prefetch
):
    async def scenario():
        buffer = Buffer()
        actor = make_trainer(model_path, tmp_path, buffer, steps=2, prefetch=prefetch)
        await actor.setup()
        copy, step = actor.publisher.copy, actor.team.part.learner.step
        stepping, tried = threading.Event(), []
        # On-policy: batch k is made from version k, and by nobody before it is there.
        buffer.gate = lambda batch_id: actor.publisher.version == batch_id

        async def fails_twice(version):
            assert not stepping.is_set()  # it would copy weights that change
            tried.append(version)
            if tried.count(1) <= 2 and version == 1:
                raise OSError("no space")
            return await copy(version)

        def watched(*args):
            stepping.set()
            try:
                return step(*args)
            finally:
                stepping.clear()

        actor.publisher.copy, actor.team.part.learner.step = fails_twice, watched
        await asyncio.wait_for(actor._guarded_run(), LIMIT_S)
        assert actor.failure is None
        assert tried == [1, 1, 1, 2]
        assert actor._reports[-1]["metrics"]["weights/publish_failures"] == 2.0
        await actor.teardown()

    asyncio.run(scenario())


# ---- stopping --------------------------------------------------------------------------------------------------------


def test_the_time_a_stop_may_take_follows_the_longest_step_within_what_callers_allow():
    assert finish_limit(0.0) == finish_limit(20.0) == 120.0
    assert finish_limit(100.0) == 360.0
    assert finish_limit(10_000.0) + SAVE_LIMIT_S < TrainerActor.finish_limit_s


def test_a_trainer_allows_for_a_step_as_long_as_those_it_did(model_path, tmp_path, monkeypatch):
    async def scenario():
        actor = make_trainer(model_path, tmp_path, steps=1)
        await actor.setup()
        clock, step = [0.0], actor.team.part.learner.step

        def long_step(*args):
            clock[0] += 100.0
            return step(*args)

        actor.team.part.learner.step = long_step
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
        assert actor.finish_limit_s == 120.0
        await asyncio.wait_for(actor._guarded_run(), LIMIT_S)
        assert actor.finish_limit_s == 360.0
        await actor.teardown()

    asyncio.run(scenario())


def test_a_loop_that_is_cancelled_between_steps_still_saves(model_path, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "finish_limit", lambda longest: 0.1)

    async def scenario():
        buffer = Buffer()
        actor = make_trainer(model_path, tmp_path, buffer)
        take = buffer.call

        async def hangs_after_two(called, *args):
            if (called.__name__, args[0]) == ("take", 2):
                await asyncio.Event().wait()
            return await take(called, *args)

        buffer.call = hangs_after_two
        await started(actor)
        await until(lambda: len(actor._reports) == 2)
        await asyncio.wait_for(endpoint(actor, "finish")(), LIMIT_S)
        assert actor._loop_task.cancelled()

    asyncio.run(scenario())
    assert checkpoints(tmp_path) == ["step-2"]


def test_a_step_that_is_cut_off_is_not_saved_and_says_so(model_path, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "finish_limit", lambda longest: 0.1)

    async def scenario():
        actor = make_trainer(model_path, tmp_path)
        await actor.setup()
        step, entered, go = actor.team.part.learner.step, threading.Event(), threading.Event()

        def slow(plan, hinted):
            if plan.batch.id == 1:
                entered.set()
                assert go.wait(LIMIT_S)
            return step(plan, hinted)

        actor.team.part.learner.step = slow
        actor._loop_task = asyncio.create_task(actor._guarded_run())
        try:
            await until(entered.is_set)
            await asyncio.wait_for(endpoint(actor, "finish")(), LIMIT_S)
            assert actor.failure.startswith("RuntimeError: batch 1 was being trained when the loop ended")
            with pytest.raises(RuntimeError, match="continue from the newest checkpoint"):
                await endpoint(actor, "checkpoint")()
        finally:
            go.set()

    asyncio.run(scenario())
    assert checkpoints(tmp_path) == []


# ---- the SDPO teacher ------------------------------------------------------------------------------------------------


def test_a_step_does_not_wait_for_a_teacher_that_nobody_plays(model_path, tmp_path):
    actor = make_trainer(model_path, tmp_path, alpha=0.5, steps=2)
    teacher = actor.bindings["sdpo_teacher"]
    assert isinstance(teacher, Binding)
    assert teacher.patience_s == TEACHER_PATIENCE_S < 5.0
    assert asyncio.run(run_to_its_end(actor)) is None
    assert [report["metrics"]["sdpo/missing"] for report in actor._reports] == [1.0, 1.0]
    assert teacher.counts.calls == 0
    assert "sdpo teacher" in actor.trouble


def test_a_question_that_the_teacher_did_not_answer_is_a_step_without_the_channel(model_path, tmp_path):
    class Refuses(Teacher):
        async def call(self, called, argument, asker=None):
            raise RemoteFailure("sdpo_teacher.logits failed: Superseded: question 1 was given up", "Superseded")

    actor = make_trainer(model_path, tmp_path, teacher=Refuses(), alpha=0.5, steps=1)
    assert asyncio.run(run_to_its_end(actor)) is None
    assert actor._reports[0]["metrics"]["sdpo/missing"] == 1.0


def test_a_release_that_hangs_holds_up_neither_training_nor_the_end(model_path, tmp_path):
    async def scenario():
        teacher = Teacher(release_hangs=True)
        actor = make_trainer(model_path, tmp_path, teacher=teacher, alpha=0.5)
        assert await run_to_its_end(actor) is None
        await teacher.store.close()
        assert len(teacher.releases) == 3  # each was asked for
        assert [report["metrics"]["sdpo/missing"] for report in actor._reports] == [0.0, 0.0, 0.0]
        assert all(report["metrics"]["sdpo/grad_norm"] > 0 for report in actor._reports)
        assert all(task.done() for task in actor._background)

    asyncio.run(scenario())


def test_what_was_read_is_released(model_path, tmp_path):
    async def scenario():
        teacher = Teacher()
        actor = make_trainer(model_path, tmp_path, teacher=teacher, alpha=0.5)
        assert await run_to_its_end(actor) is None
        await until(lambda: teacher.store.held == 0)
        await teacher.store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("weights", ["initial", "live"])
def test_an_inline_teacher_speaks_with_the_weights_it_has_when_the_step_begins(model_path, tmp_path, weights):
    async def scenario():
        actor = make_trainer(
            model_path, tmp_path, alpha=0.5, sdpo={"teacher": "inline", "hinted": {"weights": weights}}
        )
        assert actor.config.prefetch
        assert await run_to_its_end(actor) is None
        metrics = [report["metrics"] for report in actor._reports]
        versions = {"initial": [0.0, 0.0, 0.0], "live": [0.0, 1.0, 2.0]}[weights]
        assert [figures["sdpo/teacher_version"] for figures in metrics] == versions
        assert [figures["sdpo/missing"] for figures in metrics] == [0.0, 0.0, 0.0]
        assert all(figures["sdpo/grad_norm"] > 0 for figures in metrics)

    asyncio.run(scenario())


# ---- reports ---------------------------------------------------------------------------------------------------------


def test_a_trainer_that_still_loads_has_no_weights_to_give_yet(model_path, tmp_path):
    actor = make_trainer(model_path, tmp_path)
    assert asyncio.run(endpoint(actor, "weights")(-1, 0.01)) is None


def test_reports_say_when_their_step_ended_and_which_trainer_made_them(model_path, tmp_path):
    began = time.time()
    first, second = (make_trainer(model_path, tmp_path / name) for name in ("a", "b"))
    for actor in (first, second):
        assert asyncio.run(run_to_its_end(actor)) is None
    times = [report["finished_at"] for report in first._reports]
    assert times == sorted(times)
    assert began <= times[0] <= times[-1] <= time.time()
    lives = [{report["life"] for report in actor._reports} for actor in (first, second)]
    assert [len(life) for life in lives] == [1, 1]
    assert lives[0] != lives[1]


def test_steps_are_told_once_to_who_knows_this_trainer_and_all_of_them_to_who_knows_another(model_path, tmp_path):
    async def scenario():
        actor = make_trainer(model_path, tmp_path)
        assert await run_to_its_end(actor) is None
        reports = endpoint(actor, "reports")
        for life, after, expected in [("", 7, [0, 1, 2]), (actor.life, 0, [1, 2]), (actor.life, 2, [])]:
            assert [report["step"] for report in await reports(life, after, 0.01)] == expected

    asyncio.run(scenario())


def test_waiting_for_logits_is_idle_and_the_rest_of_the_step_is_not(model_path, tmp_path, monkeypatch):
    async def scenario():
        actor = make_trainer(model_path, tmp_path, alpha=0.5, steps=1)
        clock = [0.0]
        actor.spans = Spans(lambda: clock[0])
        await actor.setup()

        def spend(seconds):
            clock[0] += seconds

        def read(count):
            spend(6.0)
            return torch.zeros(count, len(build_tokenizer()))

        actor.team.part.learner.policy_model.register_forward_pre_hook(lambda *_: spend(2.0))
        monkeypatch.setattr(trainer_team, "answer_to", lambda *_: Hinted.from_reader(read, [0, 4, 8]))
        made = batch(0)
        await actor._train(Prepared(made, actor.team.part.shares(made), [None]))
        await actor.teardown()
        metrics = actor._reports[0]["metrics"]
        assert metrics["seconds/trainer/step"] == 8.0
        assert metrics["seconds/trainer/wait_logits"] == 6.0
        assert metrics["idle/trainer"] == pytest.approx(6.0 / 8.0)

    asyncio.run(scenario())


# ---- other replicas --------------------------------------------------------------------------------------------------


class Others:
    """Stands for the other replicas: what each look at them shows, the last one from then on."""

    def __init__(self, *looks):
        self.looks = list(looks)

    async def look(self):
        return Look(self.looks.pop(0) if len(self.looks) > 1 else self.looks[0], all_done=False)


class Team:
    """Stands for a trainer's procs at a round; it heals in the sync that `heals_in` counts down to."""

    def __init__(self, heals_in, known=0):
        self.heals_in, self.tries = heals_in, 0
        self.part = SimpleNamespace(outer=SimpleNamespace(rounds=1, newest_round=known))

    async def catch_up(self, rounds, limit_s):
        self.tries += 1
        await asyncio.sleep(0.01)
        if self.tries < self.heals_in:
            return 2
        self.part.outer.rounds = rounds + 1
        return 2 * rounds


def behind(model_path, tmp_path, others, team, **diloco):
    actor = make_trainer(model_path, tmp_path)
    actor.settings = replace(actor.settings, diloco=DilocoConfig(**diloco))
    actor.others, actor.team, actor.behind = others, team, True
    begun = []

    async def begin():
        begun.append(actor.step_n)

    actor._begin = begin
    return actor, begun


def test_a_replica_that_is_behind_begins_where_it_healed_however_often_it_has_to_ask(model_path, tmp_path):
    actor, begun = behind(model_path, tmp_path, Others(5, 5, 6), Team(heals_in=3))
    asyncio.run(asyncio.wait_for(actor._catch_up(), LIMIT_S))
    assert (actor.behind, begun) == (False, [12])


def test_a_replica_whose_peers_died_goes_on_from_where_it_stands(model_path, tmp_path):
    actor, begun = behind(model_path, tmp_path, Others(5, 5, None), Team(heals_in=100))
    asyncio.run(asyncio.wait_for(actor._catch_up(), LIMIT_S))
    assert (actor.behind, actor.rounds, begun) == (False, 1, [2])


def test_a_replica_that_only_an_object_store_tells_of_others_gives_up_in_time(model_path, tmp_path):
    quick = {"heartbeat_timeout_s": 0.4, "join_s": 0.5, "collective_s": 0.2, "connect_s": 0.2, "quorum_s": 0.6}
    others, team = Others(None), Team(heals_in=10**6, known=9)
    actor, begun = behind(model_path, tmp_path, others, team, uri="store", give_up_s=1.0, **quick)
    with pytest.raises(TimeoutError, match="store shows round 9 and this replica is at 1, but nobody came"):
        asyncio.run(asyncio.wait_for(actor._catch_up(), LIMIT_S))
    assert begun == []
