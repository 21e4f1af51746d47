"""What a user may set about the optimizer and the two channels beside the policy gradient."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.losses.preference import PreferenceConfig
from services.losses.sdpo import SDPOLossConfig
from services.training.hinted import HintedTeacherConfig


class OptimizerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lr: float = Field(5e-4, gt=0, allow_inf_nan=False, description="Peak learning rate of AdamW.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's moment decays.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="The policy channel's gradient is clipped to this norm.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises to lr.")
    schedule: Literal["constant", "linear", "cosine"] = Field("linear", description="How the rate falls to its end.")
    final_lr: float = Field(0.2, ge=0, le=1, description="The rate at the last step, as a fraction of lr.")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of `step` (from 0) in a run of `steps`."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        fall = {"constant": 0.0, "linear": progress, "cosine": (1 - math.cos(math.pi * progress)) / 2}[self.schedule]
        return self.lr * (1 - (1 - self.final_lr) * fall)


class SDPOConfig(BaseModel):
    """Channel 2: distillation of the hinted policy into the unhinted one, at the turns that failed."""

    model_config = ConfigDict(extra="forbid")

    alpha: float = Field(0.2, ge=0, description="Weight of the channel; 0 turns it off.")
    teacher: Literal["actor", "inline"] = Field(
        "actor",
        description="Where the teacher's logits come from: its own actor over RDMA, or the trainer's process (inline). "
        "An inline teacher has the initial weights until the first step after a start or resume, and measures no "
        "hinted accuracy, so that min_hinted_accuracy never skips its channel.",
    )
    loss: SDPOLossConfig = Field(default_factory=lambda: SDPOLossConfig(), description="The divergence.")
    hinted: HintedTeacherConfig = Field(default_factory=lambda: HintedTeacherConfig(), description="The teacher.")
    max_sites: int = Field(64, ge=1, description="Failing turns distilled per step; more are left out evenly, counted.")
    min_hinted_accuracy: float = Field(
        0.3, ge=0, le=1, description="The channel is skipped while the teacher's hinted accuracy is below this."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="The channel's gradient is clipped to this norm on its own.")
    wait_s: float = Field(30.0, gt=0, description="Longest wait for the teacher's logits; then the step goes without.")

    @model_validator(mode="after")
    def _the_loss_has_the_rows_it_needs(self) -> SDPOConfig:
        self.loss.check_rows(self.hinted.logits.top_k)
        return self


class ReplayConfig(BaseModel):
    """Channel 3: preference pairs from outside teachers that agree where the student did something else."""

    model_config = ConfigDict(extra="forbid")

    beta: float = Field(0.1, ge=0, description="Weight of the channel; 0 turns it off.")
    loss: PreferenceConfig = Field(
        default_factory=lambda: PreferenceConfig(beta=0.3, nll_weight=0.3), description="The preference objective."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="The channel's gradient is clipped to this norm on its own.")
