"""Actors that the mesh tests place: they live in an importable module, as spawned procs need."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, Protocol

from monarch.actor import concurrent_endpoint

from mesh.actor import MeshActor
from mesh.binding import Binding
from mesh.roles import Member, contract


class Worker(Member, Protocol):
    @contract(20.0, retry=True)
    async def work(self, seconds: float) -> str: ...

    @contract(20.0, retry=False)
    async def spend(self, seconds: float) -> str: ...

    @contract(0.5, retry=False)
    async def slow(self, seconds: float) -> str: ...

    @contract(5.0, retry=True)
    async def fail(self, text: str) -> str: ...

    @contract(5.0, retry=True)
    async def spin(self, seconds: float) -> str: ...


class WorkerActor(MeshActor):
    def __init__(self, name: str, fail_setup: str = "", fail_run: str = "") -> None:
        super().__init__(name, roles=("worker",))
        self.fail_setup, self.fail_run = fail_setup, fail_run
        self.calls = 0

    async def setup(self) -> None:
        if self.fail_setup:
            raise ValueError(self.fail_setup)

    async def run(self) -> None:
        if self.fail_run:
            raise RuntimeError(self.fail_run)
        await self.finishing.wait()

    def figures(self) -> dict[str, Any]:
        return {"calls": self.calls}

    @concurrent_endpoint
    async def work(self, seconds: float) -> str:
        self.calls += 1
        await asyncio.sleep(seconds)
        return f"{self.name}:{os.getpid()}"

    @concurrent_endpoint
    async def spend(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return self.name

    @concurrent_endpoint
    async def slow(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return self.name

    @concurrent_endpoint
    async def fail(self, text: str) -> str:
        raise KeyError(text)

    @concurrent_endpoint
    async def spin(self, seconds: float) -> str:
        def busy() -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                sum(range(1000))

        await asyncio.to_thread(busy)
        return self.name


class Crew(Worker, Protocol):
    @contract(20.0, retry=False)
    async def ranks(self) -> list[dict[str, Any]]: ...


class CrewActor(WorkerActor):
    """The leader of several procs: it starts its peers and answers for them."""

    async def setup(self) -> None:
        await super().setup()
        await asyncio.gather(*[Binding[Member].to(peer).call(Member.start) for peer in self.peers])

    @concurrent_endpoint
    async def ranks(self) -> list[dict[str, Any]]:
        others = await asyncio.gather(*[Binding[Crew].to(peer).call(Crew.ranks) for peer in self.peers])
        names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        own = {"pid": os.getpid(), "rank": self.rank, **{name: os.environ.get(name) for name in names}}
        return [own, *(one for other in others for one in other)]


class CrewPeer(CrewActor):
    """`fail_setup` and `fail_run` are meant for the peers: the leader of this crew has neither."""


class CrewLeader(CrewActor):
    def __init__(self, name: str, fail_setup: str = "", fail_run: str = "") -> None:
        super().__init__(name)
