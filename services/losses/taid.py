"""TAID: distillation toward a target that moves from the student itself to the teacher (2501.16937).

The target is softmax((1 - t) sg(student logits) + t teacher logits) and the loss its cross-entropy with the student. At
t = 0 the target is the student: the loss is its entropy and the gradient exactly the zero of p - p, no teacher signal.
The scheduler raises t faster while the loss falls.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from services.losses.divergence import check_temperature, log_probs
from services.losses.reduction import at_least_float32, normalized

MOMENTUM = 0.99
STEP = 5e-4


def taid_rows(student_logits: Tensor, teacher_logits: Tensor, t: float | None, *, temperature: float = 1.0) -> Tensor:
    """Cross-entropy of the interpolated target at each position: (..., V), (..., V) -> (...), float32 or float64.

    Not minus the target's entropy: the value does not tend to 0. ValueError for t missing or outside [0, 1].
    """
    if t is None or not 0 <= t <= 1:
        raise ValueError(f"TAID needs t in [0, 1] (it is {t}): pass the scheduler's current t")
    check_temperature(temperature)
    student = at_least_float32(student_logits).detach() / temperature
    teacher = at_least_float32(teacher_logits).detach() / temperature
    target = torch.softmax((1 - t) * student + t * teacher, dim=-1)
    return -(target * log_probs(student_logits, temperature)).sum(-1)


def taid_loss(
    student_logits: Tensor, teacher_logits: Tensor, t: float | None, mask: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """`taid_rows` over (B, T, V), summed where `mask` (B, T), divided by the mask's sum. An empty mask gives 0."""
    rows = taid_rows(student_logits, teacher_logits, t, temperature=temperature)
    return normalized(torch.where(mask.bool(), rows, torch.zeros_like(rows)).sum(), mask.bool().sum())


class TAIDConfig(BaseModel):
    """How t moves over a run."""

    model_config = ConfigDict(extra="forbid")

    t_start: float = Field(default=0.4, ge=0, le=1, description="t at the first step.")
    t_end: float = Field(default=1.0, ge=0, le=1, description="t is never above this.")
    total_steps: int = Field(gt=0, description="Steps after which the linear floor has reached t_end.")
    disable_adaptive: bool = Field(default=False, description="Follow the linear floor alone, whatever the loss does.")

    @model_validator(mode="after")
    def _rising(self) -> TAIDConfig:
        if self.t_start > self.t_end:
            raise ValueError(f"t_start {self.t_start} is above t_end {self.t_end}: t only rises; swap them")
        return self


class TAIDScheduler:
    """Holds t, which never falls and is at least on the line from t_start to t_end.

    `update(loss, step)` after a step gives the t of the next one. The first finite loss only seeds; a loss that is
    not finite says nothing, so only the floor moves. `state_dict` goes into the checkpoint.
    """

    def __init__(self, config: TAIDConfig) -> None:
        self.config = config
        self.t = config.t_start
        self.momentum = 0.0
        self.previous: float | None = None

    def update(self, loss: float, step: int) -> float:
        config = self.config
        floor = config.t_start + (config.t_end - config.t_start) * step / config.total_steps
        if config.disable_adaptive or (self.previous is not None and not math.isfinite(loss)):
            self._raise_to(floor)
            return self.t
        if self.previous is None:
            self.previous = loss if math.isfinite(loss) else None
            return self.t
        change = (self.previous - loss) / (self.previous + 1e-15)
        self.momentum = MOMENTUM * self.momentum + (1 - MOMENTUM) * change
        self._raise_to(max(floor, self.t + STEP * _sigmoid(self.momentum) * (1 - self.t)))
        self.previous = loss
        return self.t

    def _raise_to(self, t: float) -> None:
        self.t = max(self.t, min(self.config.t_end, t))

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t, "momentum": self.momentum, "previous": self.previous}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t, self.momentum, self.previous = state["t"], state["momentum"], state["previous"]


def _sigmoid(x: float) -> float:
    """Without overflow for large negative x."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
