"""The actor that scores rollouts, each call in a process that can be killed (`services.rewards`)."""

from __future__ import annotations

from typing import Any

from monarch.actor import concurrent_endpoint
from pydantic import BaseModel, ConfigDict, Field

from mesh.actor import MeshActor
from mesh.messages import Rollout
from services.rewards.sandbox import RewardConfig, RewardSandbox


class RewarderConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: int = Field(1, ge=1, description="Rewarder actors.")
    reward: RewardConfig = Field(default_factory=lambda: RewardConfig(), description="What is scored, and how.")


class RewarderActor(MeshActor):
    """Endpoints of `mesh.roles.Rewarder`."""

    def __init__(self, name: str, config: RewardConfig) -> None:
        super().__init__(name)
        self.sandbox = RewardSandbox(config)
        self.scored = 0
        self.unscorable = 0
        self.trouble = ""

    async def setup(self) -> None:
        await self.sandbox.start()

    async def run(self) -> None:
        await self.finishing.wait()

    async def teardown(self) -> None:
        await self.sandbox.close()

    def figures(self) -> dict[str, Any]:
        return {"scored": self.scored, "unscorable": self.unscorable, "trouble": self.trouble}

    @concurrent_endpoint
    async def score(self, rollout: Rollout) -> Rollout:
        with self.busy:
            scored = await self.sandbox.score(rollout)
        self.scored += 1
        if scored.reward is None:
            self.unscorable += 1
            self.trouble = scored.reason
        return scored
