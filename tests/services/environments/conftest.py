"""The real toolbox server, started once, and a fake environment whose faults a test chooses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from services.environments import EnvironmentConfig, ServerProcess, ToolboxConfig

SERVER_SESSIONS = 16
SILENCE = "(silence)"


@pytest.fixture(scope="session")
def toolbox_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the hard level, which has operators with and without hints, with room for 16 sessions."""
    config = EnvironmentConfig(toolbox=ToolboxConfig(level="hard"))
    command = config.server_command()
    command[command.index("--max-sessions") + 1] = str(SERVER_SESSIONS)
    with ServerProcess(command, tmp_path_factory.mktemp("toolbox") / "server.log", ready_timeout_s=120) as server:
        yield f"http://127.0.0.1:{server.port}"


@dataclass
class FakeEnvironment:
    """An OpenEnv server whose observation spells out its state: `7:a|b` after actions a and b of seed 7.

    `before_reply(connection, message)` runs before each reply. What it returns, if anything, is sent instead; after
    `SILENCE` the connection gets no reply any more.
    """

    before_reply: Callable[[int, dict[str, Any]], Awaitable[dict[str, Any] | str | None]]
    takes_replay: bool = False
    url: str = ""
    connections: int = 0
    received: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, socket: ServerConnection) -> None:
        number, self.connections = self.connections, self.connections + 1
        seed, actions = -1, []
        try:
            async for raw in socket:
                message = json.loads(raw)
                self.received.append((number, message))
                data = message.get("data", {})
                if message["type"] == "close":
                    return
                if message["type"] == "reset":
                    seed, actions = data["seed"], list(data.get("replay", [])) if self.takes_replay else []
                elif message["type"] == "step":
                    actions.append(data["message"])
                reply: Any = self.state_reply(seed) if message["type"] == "state" else self.observation(seed, actions)
                reply = await self.before_reply(number, message) or reply
                if reply == SILENCE:
                    await self.over.wait()
                    return
                await socket.send(reply if isinstance(reply, str) else json.dumps(reply))
        except ConnectionClosed:
            return  # the client left; it is the client that the tests look at

    def observation(self, seed: int, actions: list[str]) -> dict[str, Any]:
        fields: dict[str, Any] = {"content": f"{seed}:{'|'.join(actions)}"}
        if self.takes_replay:
            fields["turn"] = len(actions)
        return {"type": "observation", "data": {"observation": fields, "reward": None, "done": False}}

    def state_reply(self, seed: int) -> dict[str, Any]:
        return {"type": "state", "data": {"seed": seed}}


@pytest.fixture
def fake_environment() -> Callable[..., Any]:
    @asynccontextmanager
    async def run(
        before_reply: Callable[[int, dict[str, Any]], Awaitable[Any]] | None = None, takes_replay: bool = False
    ) -> AsyncIterator[FakeEnvironment]:
        async def nothing(connection: int, message: dict[str, Any]) -> None:
            await asyncio.sleep(0)

        fake = FakeEnvironment(before_reply or nothing, takes_replay)
        async with serve(fake.handle, "127.0.0.1", 0, close_timeout=0.5) as server:
            fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            try:
                yield fake
            finally:
                fake.over.set()

    return run
