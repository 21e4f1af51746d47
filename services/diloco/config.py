"""What a user may set about the outer loop."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DilocoConfig(BaseModel):
    """Settings of `services.diloco`. Used when a run has more than one replica, or shares an object store with others."""

    model_config = ConfigDict(extra="forbid")

    sync_every: int = Field(10, ge=1, description="Inner steps in which every fragment is synced once.")
    fragments: int = Field(1, ge=1, description="Parts of the model that are synced in turn (Streaming DiLoCo).")
    fragment_sync_delay: int = Field(
        0, ge=0, description="Inner steps that training goes on while a fragment's bytes move."
    )
    fragment_update_alpha: float = Field(
        0.0, ge=0, le=1, description="How much of the local parameters is kept when a fragment is synced; 0: nothing."
    )
    outer_lr: float = Field(0.7, gt=0, description="Learning rate of the outer SGD.")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of the outer SGD.")
    nesterov: bool = Field(True, description="Nesterov momentum in the outer SGD.")
    weighting: Literal["tokens", "uniform"] = Field(
        "tokens",
        description="What a replica's contribution counts for: the tokens it trained since the last sync, or 1.",
    )
    compression: Literal["none", "bf16", "topk"] = Field(
        "none", description="How pseudo-gradients are compressed; topk keeps the rest for later (error feedback)."
    )
    topk_ratio: float = Field(0.1, gt=0, le=1, description="Share of a tensor's elements that compression topk sends.")
    transport: Literal["torchft", "object_store"] = Field(
        "torchft", description="How replicas meet: a lighthouse and gloo (torchft), or files in a store (object_store)."
    )
    min_replicas: int = Field(1, ge=1, description="A sync needs at least this many replicas; fewer wait.")

    host: str = Field(
        "127.0.0.1", description="Address of this host at which other replicas reach it; nothing listens elsewhere."
    )
    lighthouse_port: int = Field(
        0, ge=0, le=65535, description="Port of the lighthouse; 0: a free one, kept for the run."
    )
    heartbeat_s: float = Field(0.1, gt=0, description="Seconds between two signs of life of a replica.")
    heartbeat_timeout_s: float = Field(5.0, gt=0, description="A replica silent for this long is not waited for.")
    join_s: float = Field(60.0, gt=0, description="Longest wait of a sync for a replica that lives and is slower.")
    collective_s: float = Field(
        30.0, gt=0, description="Longest all-reduce; a peer that dies in it costs this at most."
    )
    quorum_s: float = Field(90.0, gt=0, description="Longest wait for a quorum before it is asked for again.")
    connect_s: float = Field(10.0, gt=0, description="Longest connection to the lighthouse or to a peer.")
    give_up_s: float = Field(600.0, gt=0, description="A replica that gets no sync done in this time fails.")

    uri: str | None = Field(None, description="Of the object store: a path, s3://, gs://, hf://, memory://.")
    first_rank: int = Field(0, ge=0, description="Rank of this run's first replica among those that share the store.")
    world_size: int | None = Field(None, ge=1, description="Replicas that share the store; unset: this run's.")
    grace_s: float = Field(
        30.0, gt=0, description="Object store: once min_replicas came, others may come for this long."
    )
    first_grace_s: float = Field(300.0, gt=0, description="The same in the first round, because starts take longer.")
    poll_s: float = Field(0.5, gt=0, description="Seconds between two looks at the object store.")
    keep_rounds: int = Field(3, ge=2, description="Rounds whose files stay in the object store.")

    @model_validator(mode="after")
    def _no_contradictions(self) -> DilocoConfig:
        if self.sync_every % self.fragments:
            raise ValueError(
                f"sync_every {self.sync_every} is no multiple of fragments {self.fragments}: every fragment is synced "
                f"once in sync_every steps, so set it to e.g. {self.fragments * max(1, self.sync_every // self.fragments)}"
            )
        if self.fragment_sync_delay >= self.sync_every // self.fragments:
            raise ValueError(
                f"fragment_sync_delay {self.fragment_sync_delay} must be less than sync_every / fragments "
                f"({self.sync_every // self.fragments}): a fragment would be sent again before it arrived"
            )
        return self
