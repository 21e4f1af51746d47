"""Settings of the guard rails of a run, and the rules between them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.safety.monitor import MonitorConfig


class GuardConfig(BaseModel):
    """When a `HeldOutGuard` fires. Its clock are *ticks*: updates that bring a held-out score."""

    model_config = ConfigDict(extra="forbid")

    min_steps: int = Field(20, ge=0, description="Warm-up: before this step nothing fires.")
    smoothing: float = Field(
        0.7,
        ge=0,
        lt=1,
        description="How much of its previous value a smoothed figure keeps per evaluation; 0: no smoothing.",
    )
    patience: int = Field(
        5,
        ge=1,
        description="Evaluations in a row with a falling held-out score and a rising in-loop reward after which the "
        "guard fires.",
    )
    min_decline: float = Field(
        0.1, ge=0, description="What the smoothed held-out score must have lost over those evaluations together."
    )
    gap_limit: float | None = Field(
        None,
        gt=0,
        description="Fires when in-loop reward minus held-out score, both smoothed, exceeds what it was at the end of "
        "the warm-up by this much; unset: never.",
    )
    kl_hard_stop: float | None = Field(
        None,
        gt=0,
        description="Fires when a step's KL to the initial policy, in nats per token, reaches this; unset: never.",
    )


class SafetyConfig(GuardConfig):
    """Evaluation on held-out tasks while a run trains, and what its guard does about it. Off unless configured."""

    evaluate_every: int | None = Field(
        None, ge=1, description="Steps between two evaluations on held-out tasks; unset: no evaluation and no guard."
    )
    held_out_tasks: int = Field(32, ge=1, description="Held-out tasks of an evaluation, the same ones every time.")
    score: Literal["reward", "environment"] = Field(
        "reward",
        description="What an evaluation measures: the reward that trains, or the environment's own, where reward "
        "functions of yours stand in for it in training.",
    )
    hold_s: float = Field(
        60.0,
        gt=0,
        description="Longest time that an evaluation may take, and that generators keep the weights which it judges.",
    )
    on_fire: Literal["stop", "warn"] = Field(
        "stop", description="When the guard fires: stop ends the run in order; warn only says so."
    )

    monitor: MonitorConfig = Field(
        default_factory=lambda: MonitorConfig(), description="What flags rollouts that go for the grader; always on."
    )

    @property
    def on(self) -> bool:
        return self.evaluate_every is not None

    @model_validator(mode="after")
    def _a_guard_needs_an_evaluation(self) -> SafetyConfig:
        # By their values: a configuration that was written down names every setting.
        settings = [(name, field) for name, field in type(self).model_fields.items() if name != "monitor"]
        idle = [name for name, field in settings if getattr(self, name) != field.default]
        if not self.on and idle:
            raise ValueError(
                f"{idle[0]} = {getattr(self, idle[0])} guards nothing without held-out scores: set evaluate_every, "
                f"e.g. 10, or leave {', '.join(idle)} out"
            )
        return self
