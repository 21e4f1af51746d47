import json
from datetime import UTC, datetime

import pytest
from faulty_teacher import completion

from services.teachers import TeacherConfig
from services.teachers.protocol import MissingKey, chat_body, read_api_key, read_reply, retry_after_seconds

TEACHER = TeacherConfig(name="t", base_url="https://host/v1", model="m", api_key_env="TEACHER_TEST_KEY")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        (" 0.5 ", 0.5),
        ("Tue, 02 Jan 2024 00:01:00 GMT", 60.0),
        ("Mon, 01 Jan 2024 00:00:00 GMT", 0.0),
        ("soon", None),
        ("-3", None),
        ("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", None),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after_seconds(value, now=datetime(2024, 1, 2, tzinfo=UTC)) == seconds


@pytest.mark.parametrize(
    ("status", "body", "outcome", "retry"),
    [
        (200, completion("hello"), "answered", False),
        (200, completion("hello", usage=None), "answered", False),
        (200, completion("hel", finish="length"), "unusable", False),
        (200, completion("hel", finish="content_filter"), "unusable", False),
        (200, completion("  "), "unusable", False),
        (200, completion(None), "unusable", False),
        (200, b"<html>", "unusable", False),
        (200, b"\xff\xfe\x00", "unusable", False),
        (200, b"[" * 100_000, "unusable", False),
        (200, b"[1, 2]", "unusable", False),
        (200, b'{"choices": []}', "unusable", False),
        (200, b'{"choices": [7]}', "unusable", False),
        (200, b'{"choices": {"a": 1}}', "unusable", False),
        (200, b'{"error": {"code": 502, "message": "upstream"}}', "refused", True),
        (200, b'{"error": {"code": 400, "message": "bad"}}', "refused", False),
        (400, b'{"error": {"message": "bad"}}', "refused", False),
        (401, b"", "refused", False),
        (302, b"", "refused", False),
        (429, b"slow down", "refused", True),
        (500, b"", "refused", True),
        (503, b"<html>", "refused", True),
    ],
)
def test_every_reply_has_one_meaning_for_the_bill(status: int, body: bytes, outcome: str, retry: bool) -> None:
    attempt = read_reply(status, {}, body, None)
    assert (attempt.outcome, attempt.retry) == (outcome, retry)
    assert (attempt.text is None) != (attempt.error is None)


@pytest.mark.parametrize("usage", [None, (-1, 5), ("10", 5), (True, 5), (1.5, 2)])
def test_senseless_usage_is_no_usage(usage: tuple[object, object] | None) -> None:
    attempt = read_reply(200, {}, completion("hello", usage=usage), None)
    assert (attempt.prompt_tokens, attempt.completion_tokens) == (None, None)


def test_a_key_that_the_server_repeats_is_cut_out_of_everything() -> None:
    key = "sk-" + "a" * 400
    for status, body in [
        (401, json.dumps({"error": {"message": f"bad key {key}"}}).encode()),
        (500, ("x" * 250 + key).encode()),
        (200, completion(f"your key is {key}")),
        (200, completion("", finish=key)),
        (200, f'{{"choices": "{key}"}}'.encode()),
    ]:
        attempt = read_reply(status, {}, body, key)
        assert "aaaa" not in repr(attempt)
        assert "[api key]" in repr(attempt)


def test_the_request_carries_known_roles_and_survives_any_text() -> None:
    messages = [
        {"role": "user", "content": "3+4"},
        {"role": "assistant", "content": "é \ud800"},
        {"role": "tool", "content": "7"},
        {"role": "hint", "content": "sum(a,b)"},
    ]
    teacher = TEACHER.model_copy(update={"extra_body": {"reasoning": {"effort": "low"}}})
    body = json.loads(chat_body(teacher, messages, 9, 0.5))
    assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user", "user"]
    assert [m["content"] for m in body["messages"]] == [m["content"] for m in messages]
    assert (body["max_tokens"], body["temperature"], body["reasoning"]) == (9, 0.5, {"effort": "low"})
    other = TEACHER.model_copy(update={"max_tokens_field": "max_completion_tokens"})
    body = json.loads(chat_body(other, messages, 9, None))
    assert body["max_completion_tokens"] == 9
    assert "temperature" not in body
    assert "max_tokens" not in body


def test_an_unset_or_unusable_key_is_an_error_that_names_only_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_TEST_KEY", raising=False)
    with pytest.raises(MissingKey, match="TEACHER_TEST_KEY"):
        read_api_key(TEACHER)
    for value in ("sk-secret\nsk-other", "sk-secrét", "Bearer sk-secret"):
        monkeypatch.setenv("TEACHER_TEST_KEY", value)
        with pytest.raises(MissingKey, match="TEACHER_TEST_KEY") as refusal:
            read_api_key(TEACHER)
        assert "sk-secr" not in str(refusal.value)
    monkeypatch.setenv("TEACHER_TEST_KEY", " sk-secret\n")
    assert read_api_key(TEACHER) == "sk-secret"
