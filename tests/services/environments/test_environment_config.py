from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.environments import EnvironmentConfig, ToolboxConfig
from services.environments.connection import socket_url


def test_without_a_url_the_bundled_toolbox_is_used() -> None:
    config = EnvironmentConfig()
    assert config.toolbox == ToolboxConfig()
    assert config.hint_modules == ["services.environments.toolbox.hints"]
    assert EnvironmentConfig(**config.model_dump()) == config


def test_another_server_brings_only_the_hints_that_are_named() -> None:
    config = EnvironmentConfig(url="https://envs.example:8000", action_field="code", hints=["my.hints"])
    assert config.toolbox is None
    assert config.hint_modules == ["my.hints"]


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"url": "http://h:1", "toolbox": {"level": "easy"}}, "remove url"),
        ({"url": "localhost:8000"}, "write it like http://host:8000"),
        ({"action_field": "code"}, "set url"),
        ({"toolbox": {"level": "medium"}}, "use one of"),
        ({"toolbox": {"max_turns": 1}}, "too few"),
        ({"toolbox": {"error_penalty": -1}}, "use 0 or more"),
        ({"toolbox": {"grader": "lax"}}, "sound"),
        ({"max_sessions": 0}, "max_sessions"),
        ({"step_limit_s": 0}, "step_limit_s"),
        ({"reopens": 3}, "reopens"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_advice(settings: dict[str, object], advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        EnvironmentConfig.model_validate(settings)


def test_the_server_command_carries_the_settings_and_room_for_every_client() -> None:
    config = EnvironmentConfig(
        toolbox=ToolboxConfig(
            level="hard", max_turns=7, error_penalty=0.5, words="plain", operands=4, grader="exploitable"
        ),
        max_sessions=10,
    )
    command = config.server_command(host="0.0.0.0", port=8123, clients=3)
    options = dict(zip(command[4:-1:2], command[5:-1:2], strict=True))
    assert command[-1] == "--lifeline"
    assert int(options.pop("--max-sessions")) >= 30
    assert options == {
        "--host": "0.0.0.0",
        "--port": "8123",
        "--level": "hard",
        "--max-turns": "7",
        "--error-penalty": "0.5",
        "--words": "plain",
        "--operands": "4",
        "--grader": "exploitable",
    }


def test_a_server_that_somebody_else_runs_has_no_command() -> None:
    with pytest.raises(ValueError, match="not ours to start"):
        EnvironmentConfig(url="http://h:1").server_command()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:8000", "ws://h:8000/ws"),
        ("https://h/envs/shop/", "wss://h/envs/shop/ws"),
        ("ws://h:1/ws", "ws://h:1/ws"),
        ("wss://h?key=k", "wss://h/ws?key=k"),
    ],
)
def test_a_base_url_becomes_the_address_of_its_socket(url: str, address: str) -> None:
    assert socket_url(url) == address
