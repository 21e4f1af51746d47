"""Which environment a run uses, and how patiently. Shared by the client and by whoever starts the bundled server."""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from services.environments.toolbox.grammar import OPERANDS, Toolbox
from services.environments.toolbox.leaks import Grader

TOOLBOX_HINTS = "services.environments.toolbox.hints"


class ToolboxConfig(BaseModel):
    """The bundled environment's task."""

    model_config = ConfigDict(extra="forbid")

    level: str = Field(default="easy", description="Which operators the task has: a key of toolbox.grammar.LEVELS.")
    max_turns: int = Field(default=5, description="Actions before an episode ends unsolved.")
    error_penalty: float = Field(default=0.2, description="Reward lost per refused turn of a solved episode.")
    words: str = Field(
        default="terse",
        description="How it speaks: terse, for the demo's model, which reads characters; plain, for a language model.",
    )
    operands: int = Field(default=OPERANDS, description="Numbers in a query; each but the first takes one tool call.")
    grader: Grader = Field(
        default="sound",
        description="exploitable: a grader that agents can cheat, to test what notices them (safety.monitor).",
    )

    @model_validator(mode="after")
    def _playable(self) -> ToolboxConfig:
        # Refuses what the task cannot be, with the fix.
        Toolbox(self.level, self.max_turns, self.error_penalty, self.words, self.operands, self.grader)
        return self


class EnvironmentConfig(BaseModel):
    """Which OpenEnv server to use and how long to wait for it. Without `url`, the bundled toolbox is started."""

    model_config = ConfigDict(extra="forbid")

    url: str | None = Field(
        default=None, description="An OpenEnv server's base URL (http, https, ws or wss); unset: the bundled toolbox."
    )
    toolbox: ToolboxConfig | None = Field(
        default=None, description="Settings of the bundled toolbox; filled with its defaults when there is no url."
    )
    max_sessions: int = Field(
        default=64, ge=1, description="Sessions at once, per client; at most what the server allows."
    )
    slot_limit_s: float = Field(
        default=900.0, gt=0, description="Longest wait, in seconds, for one of the max_sessions to become free."
    )
    open_limit_s: float = Field(
        default=60.0,
        gt=0,
        description="Longest time, in seconds, for connecting and the first reset. A server that refuses, restarts or "
        "has all its sessions taken is tried again within it.",
    )
    step_limit_s: float = Field(
        default=30.0, gt=0, description="Longest wait, in seconds, for the reply to one message."
    )
    reopen: int = Field(
        default=2, ge=0, description="How often one call may replace a lost session before the episode fails."
    )
    action_field: str = Field(
        default="message", min_length=1, description="Field of the action that takes the agent's text."
    )
    observation_field: str = Field(
        default="content", min_length=1, description="Field of the observation that the agent reads."
    )
    hints: list[str] = Field(
        default_factory=list, description="Import paths of modules that register hint templates when imported."
    )

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is not None:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
                raise ValueError(f"{url!r} is no server URL; write it like http://host:8000")
        return url

    @model_validator(mode="after")
    def _one_environment(self) -> EnvironmentConfig:
        if self.url is not None and self.toolbox is not None:
            raise ValueError("url and toolbox name two environments; remove url to use the bundled toolbox, or toolbox")
        if self.url is None:
            if (self.action_field, self.observation_field) != ("message", "content"):
                raise ValueError(
                    "the bundled toolbox uses action_field 'message' and observation_field 'content'; "
                    "remove both settings, or set url to another environment"
                )
            self.toolbox = self.toolbox or ToolboxConfig()
        return self

    @property
    def hint_modules(self) -> list[str]:
        """`hints`, with the bundled environment's own first where it is used."""
        return [TOOLBOX_HINTS, *self.hints] if self.url is None else list(self.hints)

    def server_command(self, host: str = "127.0.0.1", port: int = 0, clients: int = 1) -> list[str]:
        """The command of a bundled server for `clients` clients of this config, for a `ServerProcess`.

        It allows a few more sessions than the clients open: the server frees one a moment after its client left.
        ValueError when `url` names a server that somebody else runs.
        """
        if self.toolbox is None:
            raise ValueError(f"the environment at {self.url} is not ours to start; remove url to use the bundled one")
        settings = {
            "--host": host,
            "--port": port,
            "--level": self.toolbox.level,
            "--max-turns": self.toolbox.max_turns,
            "--error-penalty": self.toolbox.error_penalty,
            "--words": self.toolbox.words,
            "--operands": self.toolbox.operands,
            "--grader": self.toolbox.grader,
            "--max-sessions": self.max_sessions * clients + 8,
        }
        arguments = [str(part) for pair in settings.items() for part in pair]
        # -P: a folder named like one of our packages, where the run is started, must not be imported instead of it.
        return [sys.executable, "-P", "-m", "services.environments.toolbox.server", *arguments, "--lifeline"]
