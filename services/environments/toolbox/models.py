"""What the toolbox's server and its clients send each other. Only the server's process imports this (and OpenEnv)."""

from __future__ import annotations

from openenv.core import Action, Observation, State
from pydantic import Field


class ToolboxAction(Action):
    message: str = Field(description="The agent's turn as it was generated, e.g. `sum(3,4)`.")


class ToolboxObservation(Observation):
    """`reward` and `done` are inherited.

    Everything is a declared field because OpenEnv 0.3.0 leaves `metadata` out of its replies; `metadata` holds the same
    for servers that send it.
    """

    content: str = Field(description="What the agent reads: the query, a tool's value, or an error such as `e:name`.")
    turn: int = Field(default=0, ge=0, description="Actions taken so far in this episode.")
    error_kind: str | None = Field(default=None, description="Why the turn was refused; None when it was not.")
    hint_template_key: str | None = Field(
        default=None, description="The hint template for this failure, if it has one."
    )
    hint_context: dict[str, str] = Field(default_factory=dict, description="Values for the template's fields.")


class ToolboxState(State):
    """`episode_id` and `step_count` are inherited."""

    seed: int | None = Field(default=None, description="Seed of the running episode; None before the first reset.")
    transcript: list[dict[str, str]] = Field(
        default_factory=list,
        description="The chat so far: messages {role, content}; the agent at turn t saw the first 2t + 1 of them.",
    )
    done: bool = Field(default=False, description="Whether the episode is over.")
