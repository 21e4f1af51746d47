"""A model in this process as the teacher: a real engine on the tiny model, behind the real client and ledger."""

import asyncio

import pytest
from pydantic import ValidationError

from actors.teacher_pool import TeacherPoolConfig
from mesh.messages import TraceState
from services.demo.warm_start import demo_model
from services.engines import EngineConfig, EngineLoop
from services.engines.engine import EngineError
from services.engines.transformers_engine import TransformersEngine
from services.models import load_tokenizer
from services.teachers import Budget, ChatClient, Ledger, TeachersConfig, replay_trace
from services.teachers.engine_teacher import EngineTeacher, VLLMTeacherConfig

STATE = TraceState("t0/0#0", [{"role": "user", "content": "3 plus 4"}], "add 3 4")


@pytest.fixture(scope="module")
def folder():
    return str(demo_model("easy"))


def ask(folder, ledger, states, *, samples=3, engine=None, **pool):
    """Replay `states` to `samples` voices of the tiny model; returns the results."""
    tokenizer = load_tokenizer(folder)
    config = engine or EngineConfig(max_length=200, max_batch=8, threads=1)
    voices = VLLMTeacherConfig(path=folder, name="tiny", samples=samples).voices()
    teachers = TeachersConfig(**{"teachers": voices, "agreement_threshold": 1, "max_tokens": 24,
                                 "instructions": None, "max_total_usd": 0.0, **pool})  # fmt: skip

    async def scenario():
        loop = EngineLoop(TransformersEngine(folder, config), config)
        try:
            teacher = EngineTeacher(loop, tokenizer, [tokenizer.eos_token_id])
            async with ChatClient(teachers, ledger, teacher) as client:
                return await replay_trace(states, teachers.teachers, client=client)
        finally:
            await loop.stop()

    return asyncio.run(scenario())


def test_every_voice_is_an_independent_sample_that_costs_nothing(folder, tmp_path):
    results = ask(folder, Ledger(tmp_path / "ledger.jsonl", Budget(0.0)), [STATE], samples=6, temperature=2.0)
    assert [r.teacher for r in results] == [f"tiny-{i}" for i in range(6)]
    answers = [r.text for r in results if r.text is not None]
    assert len(set(answers)) > 1
    assert all(r.cost_usd == 0 and r.prompt_tokens > 0 for r in results)


def test_an_answer_is_taken_from_the_ledger_and_is_the_same_when_asked_anew(folder, tmp_path):
    first = ask(folder, Ledger(tmp_path / "one.jsonl", Budget(0.0)), [STATE])
    again = ask(folder, Ledger(tmp_path / "one.jsonl", Budget(0.0)), [STATE])
    other = ask(folder, Ledger(tmp_path / "two.jsonl", Budget(0.0)), [STATE])
    assert all(r.from_ledger for r in again if r.text is not None)
    assert any(r.text is not None for r in first)
    assert [r.text for r in first] == [r.text for r in again] == [r.text for r in other]


def test_a_conversation_too_long_for_the_model_is_an_error_of_that_call_alone(folder, tmp_path):
    long = TraceState("t1/0#0", [{"role": "user", "content": "3 plus 4 " * 40}], "x")
    results = ask(folder, Ledger(tmp_path / "ledger.jsonl", Budget(0.0)), [STATE, long], samples=1, temperature=0.0)
    assert results[0].error is None
    assert "leaves no room" in results[1].error


def test_a_cut_off_answer_is_no_answer(folder, tmp_path):
    (result,) = ask(folder, Ledger(tmp_path / "ledger.jsonl", Budget(0.0)), [STATE], samples=1, max_tokens=2)
    assert result.text is None
    assert "raise max_tokens" in result.error


def test_a_dead_engine_is_no_answer_but_an_error_of_the_whole_pool(folder, tmp_path, monkeypatch):
    def broken(engine):
        raise RuntimeError("no memory left")

    monkeypatch.setattr(TransformersEngine, "step", broken)
    with pytest.raises(EngineError, match="no memory left"):
        ask(folder, Ledger(tmp_path / "ledger.jsonl", Budget(0.0)), [STATE], samples=1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"backend": "vllm"}, "set teachers.vllm.path"),
        ({"backend": "vllm", "vllm": {"path": "m", "samples": 1}}, "exceeds teachers.vllm.samples"),
        ({"backend": "vllm", "vllm": {"path": "m", "engine": {"engine": "transformers"}}}, 'must be "vllm"'),
        ({"backend": "vllm", "vllm": {"path": "m"}, "pool": {"temperature": 0.0}}, "samples alike"),
    ],
)
def test_settings_that_could_make_no_pair_are_refused(settings, said):
    with pytest.raises(ValidationError, match=said):
        TeacherPoolConfig.model_validate(settings)


def test_the_engine_of_a_teacher_is_vllm_unless_said_otherwise():
    config = TeacherPoolConfig.model_validate({"backend": "vllm", "vllm": {"path": "m", "engine": {"max_batch": 4}}})
    assert (config.vllm.engine.engine, config.vllm.engine.max_batch) == ("vllm", 4)
    assert [teacher.name for teacher in config.asked(None).teachers] == ["local-0", "local-1", "local-2"]
