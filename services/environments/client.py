"""Episodes on any OpenEnv server: many sessions at once, each call bounded, lost sessions replaced.

```
reset ──▶ open ──step──▶ open ──step──▶ ... done
            │ time-out, closed socket, cancelled call
            ▼
          lost: the connection is cut, never read again
            │ new connection, reset(seed, replay = actions so far), then the call is sent again
            ▼
          open, in the same state
```

A new session is brought to the old one's state by the server, if its `reset` takes `replay`, else by stepping through
the actions again. That it *is* the same state is checked against what the agent has read. What cannot be mended is an
`EnvironmentFailure`, which callers must not score: it says nothing about the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from services.environments.config import EnvironmentConfig
from services.environments.connection import Connection, ErrorReply, SessionLost

PROBE_SEED = 0
OPEN_PAUSES_S = (0.1, 0.2, 0.5, 1.0)  # between attempts to open a session; the last one repeats


@dataclass(slots=True)
class Observation:
    """What the environment answered. `reward` None: it said nothing, which is not 0."""

    content: str
    turn: int  # actions taken so far; 0 after reset
    reward: float | None = None
    done: bool = False
    error_kind: str | None = None
    hint_template_key: str | None = None  # None: this failure has no template
    hint_context: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)  # every field of the reply but the content


class EnvironmentFailure(Exception):
    """The environment failed, not the agent: the episode has no score. Names the server, seed, turn and cause.

    `code` is the server's own error code where it replied with an error.
    """

    def __init__(self, url: str, seed: int | None, turn: int, cause: str, code: str | None = None) -> None:
        super().__init__(url, seed, turn, cause, code)  # all of them, so that it survives pickling between actors
        self.url, self.seed, self.turn, self.cause, self.code = url, seed, turn, cause, code

    def __str__(self) -> str:
        where = "" if self.seed is None else f" at turn {self.turn} of seed {self.seed}"
        return f"environment {self.url} failed{where}: {self.cause}"


class EnvironmentClient:
    """Opens sessions on the server at `url`, at most `config.max_sessions` at once. Belongs to one event loop."""

    def __init__(self, url: str, config: EnvironmentConfig) -> None:
        self.url = url
        self.config = config
        self.lost_sessions = 0  # so far; a metric of the environment's health
        self._slots = asyncio.Semaphore(config.max_sessions)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """One session, closed at the end. EnvironmentFailure when none becomes free within `slot_limit_s`."""
        limit_s = self.config.slot_limit_s
        try:
            async with asyncio.timeout(limit_s):
                await self._slots.acquire()
        except TimeoutError as error:
            cause = (
                f"all {self.config.max_sessions} sessions stayed taken for {limit_s:g} s; run fewer episodes at once, "
                f"or raise max_sessions (and the server's own limit)"
            )
            raise EnvironmentFailure(self.url, None, 0, cause) from error
        session = Session(self)
        try:
            yield session
        finally:
            try:
                await session.close()
            finally:
                self._slots.release()

    async def probe(self, limit_s: float = 20.0) -> Observation:
        """Prove that the server plays: one reset within `limit_s` seconds, tried once. Outside of `max_sessions`.

        EnvironmentFailure says in one sentence what is wrong: nothing listens, it is no OpenEnv server, it is silent or
        full, its reset fails, or its observations lack `observation_field`.
        """
        connection = None
        try:
            connection = await Connection.open(self.url, limit_s)
            reply = await connection.ask("reset", {"seed": PROBE_SEED}, limit_s)
            return read_observation(reply, 0, self.config.observation_field)
        except (SessionLost, ErrorReply, ValueError) as error:
            code = error.code if isinstance(error, ErrorReply) else None
            cause = f"{error}; check that an OpenEnv server runs at this URL and has a session free"
            raise EnvironmentFailure(self.url, None, 0, cause, code) from error
        finally:
            if connection is not None:
                await connection.close()


class Session:
    """Episodes, one after the other, on one server. Its calls are made one at a time.

    A call takes at most `reopen + 1` times `open_limit_s + (actions so far + 1) * step_limit_s`.
    """

    def __init__(self, client: EnvironmentClient) -> None:
        self.seed: int | None = None
        self.actions: list[str] = []  # those that were answered
        self._contents: list[str] = []  # what the agent read: after the reset, then after each action
        self._client = client
        self._config = client.config
        self._connection: Connection | None = None

    async def reset(self, seed: int) -> Observation:
        """Start the episode of `seed`. EnvironmentFailure when no session can be had, or the environment refuses."""
        self.seed, self.actions, self._contents = seed, [], []
        observation = self._read(await self._exchange("reset", {"seed": seed}), turn=0)
        self._contents.append(observation.content)
        return observation

    async def step(self, text: str) -> Observation:
        """Take one action. EnvironmentFailure when the environment replies with an error or stays unreachable."""
        self._check_started()
        reply = await self._exchange("step", {self._config.action_field: text})
        observation = self._read(reply, turn=len(self.actions) + 1)
        self.actions.append(text)
        self._contents.append(observation.content)
        return observation

    async def state(self, turn: int | None = None) -> list[dict[str, str]]:
        """The chat that the agent saw when it took action `turn` (default: when it takes the next one).

        Messages `{"role", "content"}`: the query (user), then per turn an action (assistant) and what it gave (tool).
        Read from the server's `transcript` where its state has one, else from this session's own record.
        IndexError for a turn that the episode has not reached.
        """
        self._check_started()
        turn = len(self.actions) if turn is None else turn
        if not 0 <= turn <= len(self.actions):
            raise IndexError(f"turn {turn} of seed {self.seed}: the episode has had {len(self.actions)} actions so far")
        transcript = (await self.server_state()).get("transcript")
        chat = transcript if _is_chat(transcript) else self._record()
        return chat[: 2 * turn + 1]

    async def server_state(self) -> dict[str, Any]:
        """The server's state of this episode as it is."""
        self._check_started()
        return await self._exchange("state", None)

    async def close(self) -> None:
        """Leave the server; bounded, and safe to repeat."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _exchange(self, kind: str, data: dict[str, Any] | None) -> dict[str, Any]:
        """One message and its reply, on a new session in the same state whenever the one in use is lost."""
        try:
            for _ in range(self._config.reopen + 1):
                try:
                    if self._connection is not None and self._connection.in_step:
                        return await self._connection.ask(kind, data, self._config.step_limit_s)
                    self._cut()
                    connection, reply = await self._open()
                    if kind == "reset":
                        return reply
                    return await connection.ask(kind, data, self._config.step_limit_s)
                except SessionLost as error:
                    self._client.lost_sessions += 1
                    lost = error
            raise self._failure(f"{lost}; gave up after {self._config.reopen + 1} lost sessions") from lost
        except ErrorReply as error:
            raise self._failure(str(error), error.code) from error

    async def _open(self) -> tuple[Connection, dict[str, Any]]:
        """A connection whose session stands where this episode does, and the reply that brought it there."""
        connection, reply = await self._open_and_reset()
        if _turn_of(reply) != len(self.actions):  # the server's reset knows no replay
            for action in self.actions:
                data = {self._config.action_field: action}
                reply = await connection.ask("step", data, self._config.step_limit_s)
        if self._contents:
            self._check_same_state(self._read(reply, turn=len(self.actions)))
        return connection, reply

    async def _open_and_reset(self) -> tuple[Connection, dict[str, Any]]:
        """Try within `open_limit_s`. A session is there only after the first reply: a full server closes instead."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.open_limit_s
        for pause_s in itertools.chain(OPEN_PAUSES_S, itertools.repeat(OPEN_PAUSES_S[-1])):
            try:
                self._connection = await Connection.open(self._client.url, deadline - loop.time())
                return self._connection, await self._reset_with_replay(self._connection, deadline - loop.time())
            except SessionLost as error:
                self._cut()
                lost = error
            if loop.time() + pause_s >= deadline:
                break
            await asyncio.sleep(pause_s)
        raise self._failure(
            f"no session within {self._config.open_limit_s:g} s: {lost}; check that the server runs and allows "
            f"{self._config.max_sessions} sessions at once for every client (max_sessions)"
        ) from lost

    async def _reset_with_replay(self, connection: Connection, limit_s: float) -> dict[str, Any]:
        if self.actions:
            with contextlib.suppress(ErrorReply):  # from a server that refuses arguments it does not know
                return await connection.ask("reset", {"seed": self.seed, "replay": self.actions}, limit_s)
        return await connection.ask("reset", {"seed": self.seed}, limit_s)

    def _check_same_state(self, observation: Observation) -> None:
        if observation.content != self._contents[-1]:
            raise self._failure(
                f"a lost session cannot be restored, because after the same {len(self.actions)} actions the server "
                f"says {observation.content!r} where it said {self._contents[-1]!r}; make it depend on the seed only"
            )

    def _read(self, reply: dict[str, Any], turn: int) -> Observation:
        try:
            return read_observation(reply, turn, self._config.observation_field)
        except ValueError as error:
            raise self._failure(str(error)) from error

    def _record(self) -> list[dict[str, str]]:
        chat = [{"role": "user", "content": self._contents[0]}]
        for action, content in zip(self.actions, self._contents[1:], strict=True):
            chat += [{"role": "assistant", "content": action}, {"role": "tool", "content": content}]
        return chat

    def _check_started(self) -> None:
        if not self._contents:
            raise RuntimeError("this session has no episode: call reset(seed) first")

    def _cut(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def _failure(self, cause: str, code: str | None = None) -> EnvironmentFailure:
        return EnvironmentFailure(self._client.url, self.seed, len(self.actions), cause, code)


def read_observation(reply: dict[str, Any], turn: int, content_field: str) -> Observation:
    """An OpenEnv reply `{observation, reward, done}` as an `Observation`. ValueError when it has no `content_field`.

    A server that declares no `hint_template_key` gets the default template of its `error_kind`; one that declares it as
    null says that this failure has no template.
    """
    fields = _fields(reply)
    if content_field not in fields:
        raise ValueError(
            f"the environment's observation has no field {content_field!r}; set observation_field to one of "
            f"{sorted(fields)}"
        )
    content = fields.pop(content_field)
    reward = reply.get("reward")
    return Observation(
        content=content if isinstance(content, str) else json.dumps(content),
        turn=turn,
        reward=None if reward is None else float(reward),
        done=bool(reply.get("done")),
        error_kind=fields.get("error_kind"),
        hint_template_key=fields.get("hint_template_key", fields.get("error_kind")),
        hint_context={name: str(value) for name, value in (fields.get("hint_context") or {}).items()},
        metadata=fields,
    )


def _fields(reply: dict[str, Any]) -> dict[str, Any]:
    """The observation's fields, those that a server sends inside `metadata` among them."""
    observation = dict(reply.get("observation") or {})
    return {**(observation.pop("metadata", None) or {}), **observation}


def _is_chat(transcript: Any) -> TypeGuard[list[dict[str, str]]]:
    return isinstance(transcript, list) and all(
        isinstance(m, dict) and {"role", "content"} <= set(m) for m in transcript
    )


def _turn_of(reply: dict[str, Any]) -> int:
    """The number of actions that the server says it has taken; 0 where it does not say."""
    turn = _fields(reply).get("turn")
    return turn if isinstance(turn, int) else 0
