"""What a user may set about the outer loop."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DilocoConfig(BaseModel):
    """Settings of `services.diloco`, for a run of several replicas or one that shares an object store with others."""

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
        30.0,
        gt=0,
        description="Longest all-reduce, and longest transfer of its state to a replica that heals; a peer that stops "
        "in one of them costs this at most.",
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
    def _times_fit_each_other(self) -> DilocoConfig:
        # Each pair: a time that must be over before the other is, how many times it must fit in, and why.
        for short, times, long, why in (
            ("heartbeat_s", 3, "heartbeat_timeout_s", "one late sign of life would count as a death"),
            ("heartbeat_timeout_s", 1, "join_s", "a sync would go on without a replica before it is known to be dead"),
            ("join_s", 1, "quorum_s", "a quorum would be asked for again before slower replicas may come"),
            ("collective_s", 1, "quorum_s", "a replica would stop waiting for one that is held up by a dead peer"),
            ("connect_s", 1, "quorum_s", "one try to connect would use up the wait for a quorum"),
            ("quorum_s", 1, "give_up_s", "a replica would fail before it has asked a second time"),
            ("poll_s", 1, "grace_s", "nobody would look at the store in the time that others have to come"),
        ):
            floor, value = times * getattr(self, short), getattr(self, long)
            if value < floor or (times == 1 and value == floor):
                least = f"at least {times} x {short}" if times > 1 else f"longer than {short}"
                raise ValueError(f"{long} {value:g} must be {least} ({getattr(self, short):g}), or {why}: raise {long}")
        if self.first_grace_s < self.grace_s:
            raise ValueError(
                f"first_grace_s {self.first_grace_s:g} is shorter than grace_s {self.grace_s:g}, but the first round "
                "waits for starts: raise first_grace_s"
            )
        return self

    @model_validator(mode="after")
    def _no_contradictions(self) -> DilocoConfig:
        if self.sync_every % self.fragments:
            raise ValueError(
                f"sync_every {self.sync_every} is no multiple of fragments {self.fragments}: every fragment is synced "
                "once in sync_every steps, so set it to e.g. "
                f"{self.fragments * max(1, self.sync_every // self.fragments)}"
            )
        if self.fragment_sync_delay >= self.sync_every // self.fragments:
            raise ValueError(
                f"fragment_sync_delay {self.fragment_sync_delay} must be less than sync_every / fragments "
                f"({self.sync_every // self.fragments}): a fragment would be sent again before it arrived"
            )
        return self
