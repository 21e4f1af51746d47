"""Which teachers there are and on what terms they are asked.

A key is never part of a configuration: a teacher names the environment variable that holds it, and the variable is read
at the moment of the call. So configurations can be printed, logged and written to the run's folder.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

DEFAULT_TEACHERS_FILE = Path(__file__).with_name("default_teachers.toml")

# Fields of the request that the client sets itself, or that would break the worst-case price (several choices) or the
# reading of the reply (streaming).
RESERVED_BODY_FIELDS = frozenset(
    {"model", "messages", "max_tokens", "max_completion_tokens", "temperature", "n", "best_of", "stream"}
)


class TeacherConfig(BaseModel):
    """One outside model behind an OpenAI-compatible chat-completions endpoint."""

    # Inputs are hidden in errors because a key pasted into the wrong field must not reach a log.
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    name: str = Field(
        description="Name of the teacher in results, ledger and metrics; unique within a set.", min_length=1
    )
    base_url: str = Field(description="Base URL of the API, up to and without `/chat/completions`.")
    model: str = Field(description="The model's name at that API.", min_length=1)
    api_key_env: str | None = Field(None, description="Environment variable that holds the key; None sends no key.")
    usd_per_million_prompt: float = Field(
        0.0,
        description="Price of a million prompt tokens, USD; an upper bound if it varies.",
        ge=0,
        allow_inf_nan=False,
    )
    usd_per_million_completion: float = Field(
        0.0, description="Price of a million completion tokens, USD; an upper bound.", ge=0, allow_inf_nan=False
    )
    weight: float = Field(1.0, description="Weight of this teacher's vote in a consensus.", gt=0, allow_inf_nan=False)
    max_concurrency: int = Field(8, description="Most calls in flight to this teacher.", ge=1)
    timeout_s: float = Field(
        60.0, description="Deadline of one call, retries and pauses included, seconds.", gt=0, allow_inf_nan=False
    )
    connect_timeout_s: float = Field(
        10.0, description="Limit for opening a connection, seconds.", gt=0, allow_inf_nan=False
    )
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = Field(
        "max_tokens", description="The API's name for the limit on completion tokens."
    )
    extra_body: dict[str, Any] = Field(
        default_factory=dict,
        description="More fields of the request, e.g. a reasoning effort; part of the ledger's key.",
    )

    @field_validator("base_url")
    @classmethod
    def _plain_http_url(cls, value: str) -> str:
        try:
            url = httpx.URL(value)
        except httpx.InvalidURL as error:
            raise ValueError(f"base_url is no URL ({error}); write it like https://host/v1") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError("base_url must be an absolute http or https URL such as https://host/v1")
        if url.userinfo or url.query or url.fragment:
            raise ValueError("base_url carries a user, a query or a fragment; give the key through api_key_env instead")
        return value.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def _name_of_a_variable(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
            raise ValueError(
                "api_key_env must be the NAME of an environment variable; put the key itself into that variable"
            )
        return value

    @model_validator(mode="after")
    def _extra_body_is_json_and_leaves_the_basics_alone(self) -> TeacherConfig:
        try:
            json.dumps(self.extra_body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"extra_body of teacher {self.name!r} cannot be sent as JSON: {error}") from error
        taken = sorted(RESERVED_BODY_FIELDS & self.extra_body.keys())
        if taken:
            raise ValueError(
                f"extra_body of teacher {self.name!r} sets {', '.join(taken)}: leave them out, the client does"
            )
        return self

    @property
    def free(self) -> bool:
        return self.usd_per_million_prompt == 0 and self.usd_per_million_completion == 0


def default_teachers() -> list[TeacherConfig]:
    """The teachers of `default_teachers.toml`."""
    return [TeacherConfig(**fields) for fields in tomllib.loads(DEFAULT_TEACHERS_FILE.read_text("utf-8"))["teachers"]]


class TeachersConfig(BaseModel):
    """The set of teachers, what they may cost together, and how their answers are merged."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    teachers: list[TeacherConfig] = Field(
        default_factory=default_teachers, description="The teachers; each is asked about every state.", min_length=1
    )
    max_total_usd: float = Field(
        5.0,
        description="What all calls of the run may cost together, USD, calls in flight included.",
        ge=0,
        allow_inf_nan=False,
    )
    agreement_threshold: int = Field(2, description="Fewest teachers that must agree for a preference pair.", ge=1)
    max_tokens: int = Field(2048, description="Most completion tokens of an answer, hidden reasoning included.", ge=1)
    instructions: str | None = Field(
        "You see an agent's work so far. Reply with the agent's next action only, exactly as the agent would send it: "
        "no explanation, no quotes, no code fence.",
        description="System message put before each state; None puts none.",
    )
    temperature: float | None = Field(
        None, description="Sampling temperature; None sends none (reasoning models refuse the field).", ge=0, le=2
    )
    replay_limit_s: float = Field(
        300.0, description="Limit of one replay, waiting for a free slot included, seconds.", gt=0, allow_inf_nan=False
    )
    max_retries: int = Field(5, description="Most further attempts after a refusal or a failed connection.", ge=0)
    backoff_base_s: float = Field(0.5, description="Pause before the first retry, doubled each time, seconds.", gt=0)
    backoff_max_s: float = Field(30.0, description="Longest such pause, seconds.", gt=0)
    max_retry_after_s: float = Field(60.0, description="A server's Retry-After is cut to this many seconds.", ge=0)
    repeat_unknown: bool = Field(
        False,
        description="Ask again when a priced call's outcome is unknown (time-out, lost connection, killed run): the "
        "answer may be paid twice, each time within the budget. Free teachers are always asked again.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> TeachersConfig:
        names = [teacher.name for teacher in self.teachers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"teachers share the name {', '.join(twice)}: give each its own")
        if self.agreement_threshold > len(names):
            raise ValueError(
                f"agreement_threshold is {self.agreement_threshold} but there are {len(names)} teachers, so no pair "
                "could ever be made: lower it or add teachers"
            )
        priced = [teacher.name for teacher in self.teachers if not teacher.free]
        if priced and self.max_total_usd == 0:
            raise ValueError(
                f"max_total_usd is 0 but {', '.join(priced)} cost money, so every call would be refused: "
                "raise max_total_usd or leave these teachers out"
            )
        if self.backoff_base_s > self.backoff_max_s:
            raise ValueError("backoff_base_s exceeds backoff_max_s: lower the first or raise the second")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Vote weight by teacher name, as `extract_preference_pairs` takes it."""
        return {teacher.name: teacher.weight for teacher in self.teachers}


def missing_api_keys(teachers: Iterable[TeacherConfig]) -> list[str]:
    """Names of environment variables that the teachers need and that are empty or unset; sorted, each once."""
    wanted = {teacher.api_key_env for teacher in teachers if teacher.api_key_env}
    return sorted(name for name in wanted if not os.environ.get(name, "").strip())
