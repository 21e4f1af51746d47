"""The plain server processes of a local run: the bundled environment and the bundled teachers.

They are no actors: they speak open protocols, so that any OpenEnv server and any OpenAI-compatible API can stand in
their place. One that dies is started again on the port that its clients know.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from launch.config import Config
from services.environments.process import ServerFailure, ServerProcess


class LocalServers:
    """Starts what the configuration needs and does not name by URL; `urls` has their addresses by name."""

    def __init__(self, config: Config, logs: Path) -> None:
        self.config, self.logs = config, logs
        self.urls: dict[str, str] = {}
        self.restarts = 0
        self._processes: dict[str, ServerProcess] = {}

    async def start(self) -> None:
        """Start all, then wait until each answers. ServerFailure says which did not, with the end of its log."""
        for name in self._wanted():
            self._processes[name] = self._process(name, port=0)
            self._processes[name].start()
        for name, process in self._processes.items():
            port = await asyncio.to_thread(process.wait_ready)
            self.urls[name] = f"http://127.0.0.1:{port}"

    async def revive(self, log: Callable[[str], None]) -> None:
        """Start again what died, on its old port. ServerFailure when it does not come up."""
        for name, process in self._processes.items():
            if process.alive:
                continue
            log(f"the {name} server ended (exit code {process.exit_code}); starting it again")
            self.restarts += 1
            again = self._process(name, port=int(self.urls[name].rpartition(":")[2]))
            again.start()
            await asyncio.to_thread(again.wait_ready)
            self._processes[name] = again

    async def stop(self) -> None:
        await asyncio.gather(*[asyncio.to_thread(process.stop) for process in self._processes.values()])

    @property
    def environment_url(self) -> str:
        return self.config.environment.url or self.urls["environment"]

    def _wanted(self) -> list[str]:
        names = [] if self.config.environment.url else ["environment"]
        return [*names, "teachers"] if self.config.teachers.backend == "local" and self.config.replay.beta else names

    def _process(self, name: str, port: int) -> ServerProcess:
        if name == "environment":
            clients = self.config.generator.count + 1  # the SDPO teacher tries hinted actions out
            command = self.config.environment.server_command(port=port, clients=clients)
        else:
            command = self._teacher_command(port)
        return ServerProcess(command, self.logs / f"{name}-server.log", ready_timeout_s=120.0)

    def _teacher_command(self, port: int) -> list[str]:
        local, toolbox = self.config.teachers.local, self.config.environment.toolbox
        if toolbox is None:
            raise ServerFailure(
                'the bundled teachers know the bundled toolbox only: set teachers.backend = "http" (or "none" with '
                "replay.beta = 0) for another environment"
            )
        settings = {
            "--port": port,
            "--teachers": local.count,
            "--level": toolbox.level,
            "--error-rate": local.error_rate,
            "--delay-s": local.delay_s,
        }
        arguments = [str(part) for pair in settings.items() for part in pair]
        return [sys.executable, "-P", "-m", "services.teachers.local_server", *arguments, "--lifeline"]
