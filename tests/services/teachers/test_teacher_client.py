import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_teacher import FaultyTeacher, drop, ok, raw, states, status, wait_until

from mesh.messages import TeacherCallResult, TraceState
from services.teachers import Budget, ChatClient, Ledger, TeacherConfig, TeachersConfig, replay_trace

PRICES = {"usd_per_million_prompt": 1000.0, "usd_per_million_completion": 1000.0}


def run(
    ledger: Ledger, teachers: list[TeacherConfig], asked: list[TraceState], **settings: Any
) -> list[TeacherCallResult]:
    config = TeachersConfig(
        **(
            {
                "teachers": teachers,
                "agreement_threshold": 1,
                "max_tokens": 20,
                "backoff_base_s": 0.01,
                "backoff_max_s": 0.02,
            }
            | settings
        )
    )

    async def replay() -> list[TeacherCallResult]:
        async with ChatClient(config, ledger) as client:
            return await replay_trace(asked, teachers, client=client)

    return asyncio.run(replay())


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "teachers.jsonl", Budget(100.0))


def test_rate_limits_and_outages_are_retried_and_cost_nothing(faulty: FaultyTeacher, ledger: Ledger) -> None:
    faulty.script["t"] = [status(429, {"Retry-After": "0"}), status(500), status(503), ok("fine")]
    [result] = run(ledger, [faulty.config("t", **PRICES)], states(1))
    assert (result.text, result.error, result.prompt_tokens, result.completion_tokens) == ("fine", None, 10, 5)
    assert faulty.by_model["t"] == 4
    assert result.cost_usd == pytest.approx(0.015)
    assert ledger.budget.spent_usd == pytest.approx(0.015)
    assert ledger.budget.reserved_usd == 0


def test_retry_after_decides_the_pause_and_is_cut_to_the_limit(
    faulty: FaultyTeacher, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.script["t"] = [
        status(429, {"Retry-After": "0.25"}),
        status(429, {"Retry-After": "9999"}),
        status(429, {"Retry-After": "Fri, 01 Jan 2100 00:00:00 GMT"}),
        status(503),
        ok("fine"),
    ]
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def record(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("services.teachers.client.asyncio.sleep", record)
    [result] = run(ledger, [faulty.config("t")], states(1), max_retry_after_s=3.0)
    assert result.text == "fine"
    assert pauses[:3] == [0.25, 3.0, 3.0]
    assert 0 < pauses[3] <= 0.02


def test_a_pause_beyond_the_deadline_gives_up_at_once_with_the_servers_words(
    faulty: FaultyTeacher, ledger: Ledger
) -> None:
    faulty.script["t"] = [status(429, {"Retry-After": "50"}, b'{"error": {"message": "slow down"}}')]
    [result] = run(ledger, [faulty.config("t", timeout_s=10.0)], states(1))
    assert result.error == "HTTP 429: slow down"
    assert faulty.by_model["t"] == 1


def test_retries_are_bounded(faulty: FaultyTeacher, ledger: Ledger) -> None:
    faulty.script["t"] = [status(500)]
    [result] = run(ledger, [faulty.config("t")], states(1), max_retries=2)
    assert result.error is not None
    assert "HTTP 500" in result.error
    assert faulty.by_model["t"] == 3


def test_a_refusal_that_no_retry_helps_is_asked_once(faulty: FaultyTeacher, ledger: Ledger) -> None:
    faulty.script["t"] = [status(400, body=b'{"error": {"message": "no such model"}}')]
    [result] = run(ledger, [faulty.config("t")], states(1))
    assert result.error == "HTTP 400: no such model"
    assert faulty.by_model["t"] == 1


def test_a_dead_server_is_never_charged(faulty: FaultyTeacher, ledger: Ledger) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = faulty.config("dead", base_url=f"http://127.0.0.1:{unused.getsockname()[1]}/v1", **PRICES)
        [result] = run(ledger, [dead], states(1), max_retries=1)
    assert result.error is not None
    assert result.error.startswith("no connection to http://127.0.0.1")
    assert ledger.budget.remaining_usd == 100.0


def test_malformed_and_silent_teachers_fail_alone(
    faulty: FaultyTeacher, ledger: Ledger, hang: Callable[[Any, dict[str, Any]], None]
) -> None:
    faulty.script |= {"garbage": [raw(b"<html>")], "silent": [hang], "empty": [ok("")], "good": [ok("fine")]}
    teachers = [faulty.config(name) for name in ("garbage", "empty", "good")]
    teachers.insert(1, faulty.config("silent", timeout_s=1.0, max_concurrency=2))
    results = run(ledger, teachers, states(2), max_retries=0)
    assert [(r.state_id, r.teacher) for r in results] == [(s.state_id, t.name) for s in states(2) for t in teachers]
    assert [r.text for r in results] == [None, None, None, "fine"] * 2
    errors = [r.error or "" for r in results[:4]]
    assert "no JSON object" in errors[0]
    assert "no reply" in errors[1]
    assert "holds no text" in errors[2]


def test_other_teachers_finish_while_one_is_silent(
    faulty: FaultyTeacher, ledger: Ledger, hang: Callable[[Any, dict[str, Any]], None]
) -> None:
    faulty.script["silent"] = [hang]
    silent, good = faulty.config("silent", max_concurrency=2), faulty.config("good", max_concurrency=2)
    config = TeachersConfig(teachers=[silent, good], replay_limit_s=60)

    async def scenario() -> None:
        async with ChatClient(config, ledger) as client:
            blocked = asyncio.create_task(replay_trace(states(5), [silent], client=client))
            results = await asyncio.wait_for(replay_trace(states(5), [good], client=client), 20)
            assert [r.text for r in results] == ["answer"] * 5
            assert not blocked.done()
            blocked.cancel()
            await asyncio.wait([blocked])
            assert blocked.cancelled()

    asyncio.run(scenario())


def test_a_server_that_drips_bytes_does_not_outlive_the_deadline(faulty: FaultyTeacher, ledger: Ledger) -> None:
    def drip(handler: Any, request: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        while not faulty.release.wait(0.02):
            handler.wfile.write(b" ")

    faulty.script["t"] = [drip]
    [result] = run(ledger, [faulty.config("t", timeout_s=1.0, **PRICES)], states(1))
    assert result.error is not None
    assert "no reply" in result.error
    assert result.cost_usd == ledger.budget.spent_usd > 0


def test_waiting_for_a_slot_is_bounded_and_names_the_teacher(
    faulty: FaultyTeacher, ledger: Ledger, hang: Callable[[Any, dict[str, Any]], None]
) -> None:
    faulty.script["t"] = [hang]
    results = run(ledger, [faulty.config("t", max_concurrency=1, **PRICES)], states(3), replay_limit_s=1.0)
    assert "no reply" in (results[0].error or "")
    assert all(r.error == "not asked: t had no free slot within 1 s" for r in results[1:])
    assert faulty.by_model["t"] == 1


def test_calls_in_flight_are_bounded_per_teacher(faulty: FaultyTeacher, ledger: Ledger) -> None:
    limits = {"a": 2, "b": 5}

    def until_all_slots_are_used(handler: Any, request: dict[str, Any]) -> None:
        model = request["model"]
        wait_until(lambda: faulty.peak[model] >= limits[model], f"the use of all slots of {model}", 10)
        time.sleep(0.01)  # room for one call too many
        ok("fine")(handler, request)

    faulty.script |= {"a": [until_all_slots_are_used], "b": [until_all_slots_are_used]}
    results = run(ledger, [faulty.config(name, max_concurrency=n) for name, n in limits.items()], states(10))
    assert [r.text for r in results] == ["fine"] * 20
    assert dict(faulty.peak) == limits


def test_a_lost_priced_call_keeps_its_worst_case_as_spent_and_is_not_repeated(
    faulty: FaultyTeacher, ledger: Ledger
) -> None:
    faulty.script["t"] = [drop, ok("fine")]
    [result] = run(ledger, [faulty.config("t", **PRICES)], states(1))
    assert "may have been charged" in (result.error or "")
    assert ledger.budget.spent_usd == result.cost_usd > 0.1
    [again] = run(ledger, [faulty.config("t", **PRICES)], states(1))
    assert "set repeat_unknown" in (again.error or "")
    assert faulty.by_model["t"] == 1
    [repeated] = run(ledger, [faulty.config("t", **PRICES)], states(1), repeat_unknown=True)
    assert repeated.text == "fine"
    assert ledger.budget.spent_usd == pytest.approx(result.cost_usd + 0.015)


def test_a_lost_free_call_is_asked_again(faulty: FaultyTeacher, ledger: Ledger) -> None:
    faulty.script["t"] = [drop, drop, ok("fine")]
    [result] = run(ledger, [faulty.config("t")], states(1))
    assert result.text == "fine"


def test_a_reply_without_usage_costs_its_worst_case(faulty: FaultyTeacher, ledger: Ledger) -> None:
    faulty.script["t"] = [ok("fine", usage=None)]
    [result] = run(ledger, [faulty.config("t", **PRICES)], states(1))
    assert result.text == "fine"
    assert result.cost_usd == ledger.budget.spent_usd > 0.1


def test_answers_come_from_the_ledger_and_cost_nothing_the_second_time(faulty: FaultyTeacher, tmp_path: Path) -> None:
    path = tmp_path / "teachers.jsonl"
    faulty.script["odd"] = [raw(b"<html>")]
    teachers = [faulty.config("t", **PRICES), faulty.config("odd", **PRICES)]
    first = run(Ledger(path, Budget(100.0)), teachers, states(3))
    ledger = Ledger(path, Budget(100.0))
    moved = [t.model_copy(update={"base_url": "http://127.0.0.1:9/v1"}) for t in teachers]
    second = run(ledger, moved, states(3))
    assert [(r.text, r.error) for r in second] == [(r.text, r.error) for r in first]
    assert all(r.from_ledger and r.cost_usd == 0 for r in second)
    assert not any(r.from_ledger for r in first)
    assert set(faulty.asked.values()) == {1}
    assert ledger.budget.spent_usd == pytest.approx(sum(r.cost_usd for r in first))
    other = run(ledger, teachers, states(1), temperature=0.7)
    assert not any(r.from_ledger for r in other)


def test_equal_questions_at_the_same_time_are_paid_once(faulty: FaultyTeacher, ledger: Ledger) -> None:
    same = [TraceState(f"task/{i}#0", [{"role": "user", "content": "3+4"}], "mine") for i in range(6)]
    results = run(ledger, [faulty.config("t", **PRICES)], same)
    assert [r.text for r in results] == ["answer"] * 6
    assert [r.state_id for r in results] == [s.state_id for s in same]
    assert sum(r.from_ledger for r in results) == 5
    assert faulty.by_model["t"] == 1


def test_many_concurrent_calls_never_exceed_the_budget(faulty: FaultyTeacher, tmp_path: Path) -> None:
    budget = Budget(2.0)  # a call's worst case is about 0.6, its real price 0.015, so many fit, a few at a time
    ledger = Ledger(tmp_path / "l", budget)
    most = 0.0

    def watched(handler: Any, request: dict[str, Any]) -> None:
        nonlocal most
        most = max(most, budget.spent_usd + budget.reserved_usd)
        ok("fine", usage=(100, 20) if "question 7" in str(request) else (10, 5))(handler, request)

    faulty.script |= {"a": [watched], "b": [watched], "c": [drop]}
    teachers = [faulty.config(name, max_concurrency=10, **PRICES) for name in "abc"]
    results = run(ledger, teachers, states(25))
    refused = [r for r in results if r.error and r.error.startswith("not asked: the call may cost")]
    assert refused
    assert any(r.text for r in results)
    assert 0 < most <= 2.0 + 1e-9
    assert budget.spent_usd == pytest.approx(sum(r.cost_usd for r in results))
    assert budget.spent_usd <= 2.0
    assert sum(faulty.by_model.values()) == len(results) - len(refused)


def test_a_missing_key_fails_its_own_teacher_only(
    faulty: FaultyTeacher, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEACHER_TEST_KEY", raising=False)
    teachers = [faulty.config("closed", api_key_env="TEACHER_TEST_KEY"), faulty.config("open")]
    closed, opened = run(ledger, teachers, states(1))
    assert "set the environment variable TEACHER_TEST_KEY" in (closed.error or "")
    assert opened.text == "answer"
    assert faulty.by_model["closed"] == 0


def test_the_key_reaches_the_server_and_nothing_else(
    faulty: FaultyTeacher, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "sk-0123456789-very-secret"
    monkeypatch.setenv("TEACHER_TEST_KEY", secret)
    seen: list[str] = []

    def echo(code: int) -> Callable[[Any, dict[str, Any]], None]:
        def reply(handler: Any, request: dict[str, Any]) -> None:
            seen.append(handler.headers["Authorization"])
            words = f"you sent {handler.headers['Authorization']}"
            if code == 200:
                ok(words)(handler, request)
            else:
                status(code, body=json.dumps({"error": {"message": words}}).encode())(handler, request)

        return reply

    def lose(handler: Any, request: dict[str, Any]) -> None:
        seen.append(handler.headers["Authorization"])
        handler.close_connection = True

    faulty.script |= {"a": [echo(200)], "b": [echo(401)], "c": [echo(500)], "d": [lose]}
    teachers = [faulty.config(name, api_key_env="TEACHER_TEST_KEY") for name in "abcd"]
    dead = faulty.config("dead", base_url="http://127.0.0.1:1/v1", api_key_env="TEACHER_TEST_KEY")
    with caplog.at_level(logging.DEBUG):
        results = run(ledger, [*teachers, dead], states(2), max_retries=1)
    assert set(seen) == {f"Bearer {secret}"}
    assert "you sent Bearer [api key]" in (results[0].text or "")
    assert "you sent Bearer [api key]" in (results[1].error or "")
    assert "very-secret" not in repr(results)
    assert "very-secret" not in caplog.text
    assert "very-secret" not in ledger.path.read_text()
    assert "very-secret" not in repr(teachers) + str(teachers[0].model_dump())
