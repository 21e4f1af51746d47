"""The actor around torchft's lighthouse, where trainer replicas learn who takes part in a sync.

It keeps no state that a run needs: one that died is placed again on the same port, and the next sync forms anew.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mesh.actor import MeshActor
from services.diloco.config import DilocoConfig


class LighthouseActor(MeshActor):
    """Endpoints of `mesh.roles.Lighthouse`."""

    def __init__(self, name: str, config: DilocoConfig, port: int) -> None:
        super().__init__(name)
        self.config, self.port = config, port
        self.address = ""

    async def setup(self) -> None:
        from services.diloco.lighthouse import Lighthouse  # here: whoever only places this actor needs no torchft

        self.lighthouse = await asyncio.to_thread(Lighthouse, self.config, self.port)
        self.address = self.lighthouse.address

    async def run(self) -> None:
        await self.finishing.wait()

    async def teardown(self) -> None:
        if hasattr(self, "lighthouse"):
            await asyncio.to_thread(self.lighthouse.close)

    def figures(self) -> dict[str, Any]:
        return {"address": self.address}
