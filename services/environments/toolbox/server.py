"""The toolbox as an OpenEnv server, and the command that runs it.

    python -m services.environments.toolbox.server --port 0 --level easy

It prints one line, `{"port": 40123}`, once it accepts connections. Importing OpenEnv costs seconds of CPU, so only this
process does it; clients speak the protocol (`services.environments.client`). With `--lifeline` the server ends when its
standard input does: a parent holds the other end, and however it dies, no server outlives it.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import socket
from collections.abc import Sequence
from typing import Any

import uvicorn
from openenv.core import Environment, create_app

from services.environments.process import watch_lifeline
from services.environments.toolbox.grammar import LEVELS, OPERANDS, Outcome, Toolbox
from services.environments.toolbox.leaks import GRADERS
from services.environments.toolbox.models import ToolboxAction, ToolboxObservation, ToolboxState
from services.environments.toolbox.wording import WORDINGS

SHUTDOWN_LIMIT_S = 2


class ToolboxEnvironment(Environment[ToolboxAction, ToolboxObservation, ToolboxState]):
    """One session: a `Toolbox`, and the transcript of its episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True  # OpenEnv allows a single session otherwise

    def __init__(
        self,
        level: str = "easy",
        max_turns: int = 5,
        error_penalty: float = 0.2,
        words: str = "terse",
        operands: int = OPERANDS,
        grader: str = "sound",
    ) -> None:
        super().__init__()
        self.toolbox = Toolbox(level, max_turns, error_penalty, words, operands, grader)
        self._state = ToolboxState()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        replay: Sequence[str] = (),
        **_: Any,
    ) -> ToolboxObservation:
        """Start the episode of `seed` (a random one without) and take the actions `replay`.

        Returns the observation after the last of them, so a client that lost its session is where it was.
        ValueError when the episode is over before the last action of `replay`.
        """
        seed = random.randrange(2**31) if seed is None else seed
        query = self.toolbox.reset(seed)
        self._state = ToolboxState(episode_id=episode_id, seed=seed, transcript=[{"role": "user", "content": query}])
        observation = self._observe(Outcome(query))
        for index, message in enumerate(replay):
            if observation.done:
                raise ValueError(
                    f"replay holds {len(replay)} actions, but the episode of seed {seed} is over after {index}"
                )
            observation = self.step(ToolboxAction(message=message))
        return observation

    def step(self, action: ToolboxAction, timeout_s: float | None = None, **_: Any) -> ToolboxObservation:
        """Take one action. A failing call is an observation with `error_kind`; RuntimeError when no episode runs."""
        outcome = self.toolbox.step(action.message)
        self._state.step_count += 1
        self._state.done = outcome.done
        self._state.transcript += [
            {"role": "assistant", "content": action.message},
            {"role": "tool", "content": outcome.content},
        ]
        return self._observe(outcome)

    @property
    def state(self) -> ToolboxState:
        return self._state

    def _observe(self, outcome: Outcome) -> ToolboxObservation:
        fields = {
            "content": outcome.content,
            "turn": self._state.step_count,
            "error_kind": outcome.error_kind,
            "hint_template_key": outcome.hint_template_key,
            "hint_context": outcome.hint_context,
        }
        return ToolboxObservation(reward=outcome.reward, done=outcome.done, metadata=dict(fields), **fields)


class AnnouncingServer(uvicorn.Server):
    """Prints the port that it really has (`--port 0` picks a free one) once it accepts connections."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            print(json.dumps({"port": sockets[0].getsockname()[1]}), flush=True)


def serve(arguments: argparse.Namespace) -> None:
    """Serve until a signal, or the end of the lifeline. OSError when the address is taken."""
    factory = functools.partial(
        ToolboxEnvironment,
        arguments.level,
        arguments.max_turns,
        arguments.error_penalty,
        arguments.words,
        arguments.operands,
        arguments.grader,
    )
    factory()  # before anything listens, because settings that the task refuses must end the process with their reason
    # `session_timeout` stays unset: it would close the environment of a session that merely waits for the model.
    app = create_app(
        factory, ToolboxAction, ToolboxObservation, env_name="toolbox", max_concurrent_envs=arguments.max_sessions
    )
    server = AnnouncingServer(
        uvicorn.Config(
            app,
            log_level="warning",
            ws_per_message_deflate=False,
            ws_ping_timeout=300.0,  # a client whose event loop is held up by a long step of its engine is not dead
            timeout_graceful_shutdown=SHUTDOWN_LIMIT_S,
        )
    )
    with socket.create_server((arguments.host, arguments.port), backlog=1024) as listener:
        if arguments.lifeline:
            watch_lifeline(functools.partial(setattr, server, "should_exit", True), SHUTDOWN_LIMIT_S + 3)
        server.run(sockets=[listener])


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="services.environments.toolbox.server", description="The toolbox over OpenEnv."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 picks a free one")
    parser.add_argument("--level", choices=sorted(LEVELS), default="easy", help="which operators the task has")
    parser.add_argument("--max-turns", type=int, default=5, help="actions before the episode ends unsolved")
    parser.add_argument("--error-penalty", type=float, default=0.2, help="reward lost per refused turn")
    parser.add_argument("--words", choices=sorted(WORDINGS), default="terse", help="how the toolbox speaks")
    parser.add_argument("--operands", type=int, default=OPERANDS, help="numbers in a query")
    parser.add_argument("--grader", choices=GRADERS, default="sound", help="exploitable: it shows the answer to cheats")
    parser.add_argument("--max-sessions", type=int, default=64, help="sessions at once")
    parser.add_argument("--lifeline", action="store_true", help="end when standard input ends")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    serve(parse_arguments())
