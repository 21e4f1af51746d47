"""How weights travel from the trainer to its readers: the settings of the weight plane."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.weights.region import Via


class WeightsConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    transport: Literal["auto", "rdma", "torchstore"] = Field(
        "auto",
        description="rdma: snapshots that readers copy from memory (shared memory on one host). torchstore: a tensor "
        "store, slower, for readers that want another sharding than the trainer's. auto: rdma.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Type in which weights are published; auto: the one that the trainer computes with."
    )
    delta: Literal["auto", "off"] = Field(
        "auto",
        description="auto: a reader that has the version before fetches only what changed, where that is less than "
        "half (bf16 weights, small steps). off: always everything, which on one host is faster.",
    )
    slots: int = Field(2, ge=2, description="Versions kept in memory: the current one and those still being read.")
    max_lease_s: float = Field(
        10.0, gt=0, description="Seconds a reader may take for one pull; a publish waits at most that long for it."
    )
    block_timeout_s: float = Field(
        5.0,
        gt=0,
        description="Seconds without one RDMA block, or beyond a slow network's time for one tensor of a store, after "
        "which the owner of the weights counts as dead.",
    )
    part_limit_s: float = Field(
        120.0, gt=0, description="Longest that one rank of the trainer may take to copy or to seal its part, seconds."
    )
    attempts: int = Field(3, ge=1, description="Pulls tried before the reader stays on the version it has.")
    retry_pause_s: float = Field(0.2, ge=0, description="Seconds between two attempts; doubled each time.")
    via: Via = Field("auto", description='"auto": shared memory on one host, else RDMA; "shm" or "rdma" force one.')

    @model_validator(mode="after")
    def _torchstore_has_its_own_ways(self) -> WeightsConfig:
        if self.transport != "torchstore":
            return self
        if "delta" not in self.model_fields_set:
            self.delta = "off"
        if self.delta != "off":
            raise ValueError(
                'transport "torchstore" sends whole tensors: remove weights.delta, or set weights.transport = "rdma"'
            )
        if self.via != "auto":
            raise ValueError(
                f'via "{self.via}" is a way of transport "rdma": remove weights.via, or set weights.transport = "rdma"'
            )
        return self
