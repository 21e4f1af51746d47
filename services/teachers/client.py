"""Asks teachers: how many at once, how long, how often again, and every cent accounted for.

The way of one call:

```
  same question in flight? wait for it ─▶ in the ledger? that is the answer
      ─▶ wait for a free slot of this teacher
            ─▶ Ledger.begin (reserve, on disk) ─▶ post_chat ─▶ Ledger.end (settle, on disk)
                  ▲                                                  │
                  └── pause (Retry-After or backoff) ◀── refused ────┴── answered, unusable, unknown ─▶ result
```

The start is on disk before a byte is sent, because a process killed in between would otherwise pay again. Each attempt
is a start and an end of its own, so that a process killed during a pause leaves no call of unknown outcome behind. A
call keeps its slot while it pauses: a teacher that limits the rate is asked less.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakValueDictionary

import httpx

from mesh.messages import TeacherCallResult, TraceState
from services.teachers.budget import BudgetExceeded, cost_usd, worst_case_usd
from services.teachers.config import TeacherConfig, TeachersConfig
from services.teachers.ledger import Entry, Ledger
from services.teachers.protocol import Attempt, MissingKey, chat_body, post_chat, read_api_key

# Shorter than the 5 s after which common servers close an idle connection: a request sent into a closing connection
# is a call of unknown outcome.
KEEPALIVE_EXPIRY_S = 2.0

# A request is not sent when less than this share of its limit is left: it would be paid for and time out.
LEAST_SHARE = 0.05


@dataclass(slots=True)
class _Call:
    """One (state, teacher) question on its way."""

    teacher: TeacherConfig
    state_id: str
    body: bytes
    key: str  # of the ledger: equal questions have equal keys
    worst_usd: float
    repeat_unknown: bool
    started: float  # time.monotonic()
    least_s: float  # time that must be left to send a request
    cost_usd: float = 0.0

    def failed(self, error: str) -> TeacherCallResult:
        return TeacherCallResult(
            state_id=self.state_id,
            teacher=self.teacher.name,
            text=None,
            error=error,
            cost_usd=self.cost_usd,
            seconds=time.monotonic() - self.started,
        )

    def from_entry(self, entry: Entry) -> TeacherCallResult:
        """An earlier call's answer. It costs nothing now."""
        error = entry.error
        if entry.outcome in ("started", "unknown"):
            error = (
                f"an earlier call was sent and its outcome is unknown ({entry.error or 'it was interrupted'}); it may "
                "have been paid, so it is not repeated; set repeat_unknown to ask again"
            )
        return TeacherCallResult(
            state_id=self.state_id,
            teacher=self.teacher.name,
            text=entry.text,
            error=error,
            prompt_tokens=entry.prompt_tokens,
            completion_tokens=entry.completion_tokens,
            seconds=time.monotonic() - self.started,
            from_ledger=True,
        )


def call_key(teacher: TeacherConfig, messages: list[dict[str, str]], max_tokens: int, temperature: float | None) -> str:
    """SHA-256 of everything that shapes the answer; not of the URL, since a local server's port changes every run."""
    asked = [teacher.name, teacher.model, messages, max_tokens, temperature, teacher.extra_body]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode("ascii")).hexdigest()


class Send(Protocol):
    """One attempt at one request, within `limit_s` seconds; what goes wrong is an `Attempt` as well."""

    async def __call__(self, teacher: TeacherConfig, body: bytes, key: str | None, limit_s: float) -> Attempt: ...


class ChatClient:
    """Asks any number of teachers from one event loop. Use it as `async with ChatClient(config, ledger) as client`.

    `send` makes the attempts; None posts them over HTTP.
    """

    def __init__(self, config: TeachersConfig, ledger: Ledger, send: Send | None = None) -> None:
        self.config = config
        self.ledger = ledger
        self._send = send or self._post
        # The slots bound the connections; a limit shared by all would let one silent teacher starve the others.
        # A proxy of the environment is not for servers on this host.
        self._http = httpx.AsyncClient(
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_EXPIRY_S
            ),
            mounts={"all://127.0.0.1": None, "all://localhost": None, "all://[::1]": None},
        )
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._jitter = random.Random()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. The ledger stays open: it belongs to the caller."""
        await self._http.aclose()

    async def ask(
        self, teacher: TeacherConfig, state: TraceState, *, limit_s: float | None = None
    ) -> TeacherCallResult:
        """One teacher's answer about one state, or the reason why there is none; within `limit_s` seconds.

        The limit (`replay_limit_s` by default) includes the wait for a free slot; the teacher's own `timeout_s` begins
        when it has one. Only LedgerError is raised: without accounts nothing may be spent.
        """
        config = self.config
        limit_s = config.replay_limit_s if limit_s is None else limit_s
        messages = state.messages
        if config.instructions is not None:
            messages = [{"role": "system", "content": config.instructions}, *messages]
        body = chat_body(teacher, messages, config.max_tokens, config.temperature)
        worst_usd = worst_case_usd(teacher, body, len(messages), config.max_tokens)
        call = _Call(
            teacher=teacher,
            state_id=state.state_id,
            body=body,
            key=call_key(teacher, messages, config.max_tokens, config.temperature),
            worst_usd=worst_usd,
            repeat_unknown=config.repeat_unknown or worst_usd == 0,
            started=time.monotonic(),
            least_s=LEAST_SHARE * min(limit_s, teacher.timeout_s),
        )
        asking = self._asking.setdefault(call.key, asyncio.Lock())
        slots = self._slots.setdefault(teacher.name, asyncio.Semaphore(teacher.max_concurrency))
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(limit_s):
                    # Members of a group begin with the same state: the first asks, the others take its answer.
                    await held.enter_async_context(asking)
                    earlier = self.ledger.find(call.key, repeat_unknown=call.repeat_unknown)
                    if earlier is not None:
                        return call.from_entry(earlier)
                    await held.enter_async_context(slots)
                    if time.monotonic() + call.least_s > call.started + limit_s:
                        raise TimeoutError
            except TimeoutError:
                return call.failed(f"not asked: {teacher.name} had no free slot within {limit_s:g} s")
            deadline = min(call.started + limit_s, time.monotonic() + teacher.timeout_s)
            return await self._call(call, deadline)

    async def _call(self, call: _Call, deadline: float) -> TeacherCallResult:
        """Attempts until one counts, the retries are used up, or the deadline leaves no room for another."""
        config, teacher = self.config, call.teacher
        tries = 0
        try:
            api_key = read_api_key(teacher)
            while True:
                entry = await asyncio.to_thread(
                    self.ledger.begin,
                    call.key,
                    teacher=teacher.name,
                    model=teacher.model,
                    state_id=call.state_id,
                    worst_usd=call.worst_usd,
                    repeat_unknown=call.repeat_unknown,
                )
                if not entry.new:
                    return call.from_entry(entry)
                left_s = deadline - time.monotonic()
                if left_s >= call.least_s:
                    attempt = await self._send(teacher, call.body, api_key, left_s)
                else:  # the start took long to get onto the disk
                    attempt = Attempt("refused", error=f"not sent: too little was left of {teacher.name}'s limit")
                tries += 1
                result = await self._end(call, entry, attempt, tries)
                pause_s = self._pause_s(attempt, tries)
                wanted = attempt.retry or (attempt.outcome == "unknown" and call.repeat_unknown)
                if not wanted or tries > config.max_retries or time.monotonic() + pause_s + call.least_s > deadline:
                    return result
                await asyncio.sleep(pause_s)
        except (BudgetExceeded, MissingKey) as refusal:
            return call.failed(str(refusal))

    async def _end(self, call: _Call, entry: Entry, attempt: Attempt, tries: int) -> TeacherCallResult:
        """Settle the attempt: at its real price where the server told it, else at the worst case."""
        if attempt.outcome == "refused":
            cost = 0.0
        elif attempt.prompt_tokens is not None and attempt.completion_tokens is not None:
            cost = cost_usd(call.teacher, attempt.prompt_tokens, attempt.completion_tokens)
        else:
            cost = call.worst_usd
        error = attempt.error
        if error is not None and tries > 1:
            error = f"{error} (attempt {tries})"
        call.cost_usd += cost
        result = TeacherCallResult(
            state_id=call.state_id,
            teacher=call.teacher.name,
            text=attempt.text,
            error=error,
            prompt_tokens=attempt.prompt_tokens or 0,
            completion_tokens=attempt.completion_tokens or 0,
            cost_usd=call.cost_usd,
            seconds=time.monotonic() - call.started,
        )
        await asyncio.to_thread(
            self.ledger.end,
            entry,
            attempt.outcome,
            cost_usd=cost,
            text=result.text,
            error=result.error,
            prompt_tokens=result.prompt_tokens,
            completion_tokens=result.completion_tokens,
            seconds=result.seconds,
        )
        return result

    async def _post(self, teacher: TeacherConfig, body: bytes, key: str | None, limit_s: float) -> Attempt:
        return await post_chat(self._http, teacher, body, key, limit_s)

    def _pause_s(self, attempt: Attempt, tries: int) -> float:
        """The server's Retry-After, cut to the limit; else exponential backoff with jitter, seconds."""
        if attempt.retry_after_s is not None:
            return min(attempt.retry_after_s, self.config.max_retry_after_s)
        longest = min(self.config.backoff_max_s, self.config.backoff_base_s * 2 ** (tries - 1))
        return longest * self._jitter.uniform(0.5, 1.0)
