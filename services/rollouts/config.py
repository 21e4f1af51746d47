"""What a user may set about the rollout buffer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.rollouts.advantages import Scaling


class BufferConfig(BaseModel):
    """Settings of `services.rollouts.buffer.RolloutBuffer`."""

    model_config = ConfigDict(extra="forbid")

    group_size: int = Field(8, ge=1, description="Rollouts of one task; their rewards are each other's baseline.")
    groups_per_batch: int = Field(4, ge=1, description="Groups that one optimizer step trains.")
    total_batches: int | None = Field(
        None, ge=1, description="Batches of the whole run; nothing is generated that they do not need. None: no end."
    )
    max_staleness: int = Field(
        2, ge=0, description="A group with a token older than this many optimizer steps is dropped. 0: on-policy."
    )
    stale_tasks: Literal["drop", "retry"] = Field(
        "drop", description="What becomes of a stale group's task: dropped, or generated again with newer weights."
    )
    lease_s: float = Field(
        300.0, gt=0, description="Seconds a generator has for one rollout before its member is given to another."
    )
    max_attempts: int = Field(
        3, ge=1, description="Leases of one member that may end without a rollout before the member is given up."
    )
    incomplete: Literal["refill", "ship"] = Field(
        "refill",
        description="A member whose rollout failed or came too late: attempted again (refill), or given up (ship).",
    )
    min_group_size: int = Field(
        2, ge=1, description="A group is trained without its given-up members when this many are left, else dropped."
    )
    dead_groups: Literal["keep", "drop"] = Field(
        "keep", description="Groups whose rewards are all equal: trained with advantage 0, or replaced (DAPO)."
    )
    advantage_scaling: Scaling = Field(
        "none", description="Divide advantages by the group's or the batch's standard deviation, or not at all."
    )
    advantage_eps: float = Field(1e-4, ge=0, description="Added to that standard deviation.")
    max_pairs: int = Field(64, ge=0, description="Preference pairs per batch; the newest stay, the others are counted.")
    pair_max_age: int = Field(
        32, ge=0, description="A pair whose rejected action is older than this many batches is left out."
    )
    replay_which: Literal["errors", "none"] = Field(
        "errors",
        description="Rollouts that teachers are asked about: those with a turn that the environment refused, or none. "
        "They are asked about these turns only.",
    )
    replay_lease_s: float = Field(600.0, gt=0, description="Seconds before an unanswered replay is given out again.")
    replay_attempts: int = Field(2, ge=1, description="Times that one rollout is given out for replay.")
    replay_queue: int = Field(256, ge=1, description="Rollouts that wait for teachers; the oldest leave first.")
    keep_saves: int = Field(
        3, ge=1, description="Newest saves that `rewind` can go back to; older journal segments are deleted."
    )

    @model_validator(mode="after")
    def _no_contradictions(self) -> BufferConfig:
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size {self.min_group_size} is more than group_size {self.group_size}: no group could ever "
                f"be trained; set min_group_size to {self.group_size} or less"
            )
        if self.incomplete == "ship" and self.group_size > 1 and self.min_group_size == self.group_size:
            raise ValueError(
                "incomplete='ship' ships groups without their failed members, but min_group_size equals group_size, "
                f"so each would be dropped; set min_group_size below {self.group_size} or incomplete='refill'"
            )
        if self.dead_groups == "drop" and self.group_size == 1:
            raise ValueError(
                "a group of one is always dead, so dead_groups='drop' would drop everything; "
                "set group_size to 2 or more, or dead_groups='keep'"
            )
        return self
