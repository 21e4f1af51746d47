import pytest
from pydantic import ValidationError

from services.teachers import TeacherConfig, TeachersConfig, default_teachers, missing_api_keys


def teacher(**fields: object) -> TeacherConfig:
    return TeacherConfig(**({"name": "t", "base_url": "https://host/v1", "model": "m"} | fields))


def test_the_default_set_is_three_priced_vendors_behind_one_key() -> None:
    teachers = default_teachers()
    models = [t.model for t in teachers]
    assert models == ["anthropic/claude-opus-4.7", "openai/gpt-5", "deepseek/deepseek-v4-pro"]
    assert all(t.usd_per_million_prompt > 0 and t.usd_per_million_completion > 0 for t in teachers)
    assert {t.api_key_env for t in teachers} == {"OPENROUTER_API_KEY"}
    assert TeachersConfig().teachers == teachers


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"base_url": "host/v1"}, "absolute http or https URL"),
        ({"base_url": "https://user:pass@host/v1"}, "api_key_env"),
        ({"extra_body": {"n": 3}}, "leave them out"),
        ({"extra_body": {"x": object()}}, "cannot be sent as JSON"),
        ({"weight": 0}, "greater than 0"),
        ({"usd_per_million_prompt": float("nan")}, "finite"),
    ],
)
def test_a_bad_teacher_is_refused_with_advice(fields: dict[str, object], advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        teacher(**fields)


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"teachers": [teacher(), teacher()]}, "share the name t"),
        ({"teachers": [teacher()], "agreement_threshold": 2}, "lower it or add teachers"),
        ({"max_total_usd": 0}, "raise max_total_usd"),
        ({"backoff_base_s": 5, "backoff_max_s": 1}, "lower the first"),
    ],
)
def test_contradictions_are_refused_with_the_fix(fields: dict[str, object], advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        TeachersConfig(**fields)


def test_a_key_pasted_into_the_wrong_field_is_refused_and_not_repeated() -> None:
    for field, value in [("api_key_env", "sk-very-secret"), ("base_url", "https://sk-very-secret@host/v1")]:
        with pytest.raises(ValidationError) as refusal:
            teacher(**{field: value})
        assert "very-secret" not in str(refusal.value)
        assert "very-secret" not in repr(refusal.value)


def test_missing_keys_are_named_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_KEY", "k")
    monkeypatch.setenv("BLANK_KEY", " ")
    monkeypatch.delenv("UNSET_KEY", raising=False)
    teachers = [teacher(api_key_env=name) for name in ("UNSET_KEY", "SET_KEY", "BLANK_KEY", "UNSET_KEY", None)]
    assert missing_api_keys(teachers) == ["BLANK_KEY", "UNSET_KEY"]
