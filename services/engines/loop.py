"""The thread that steps an engine, and the asyncio side that awaits it.

    generate() ─▶ waiting ──admit──▶ engine: step, step, step ─▶ answers
    update()   ─▶ changes ──load between two steps──┘
    abort()    ─▶ aborts  ──before the next step────┘

Every turn of the thread: take out what was aborted, then either apply a change of weights or admit waiting requests,
then step. While a change is in the queue nothing is admitted, so an update never waits behind new requests; it applies
at once (`in_flight`) or when the running ones have finished (`drain`). While the weights are on `hold`, changes wait
and requests are admitted as if there were none; a hold ends by itself.

An engine that raises in a step cannot be trusted with another: the loop fails everything pending with the cause and is
dead from then on. A change that raises is only that change's failure.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from services.engines.engine import Engine, EngineConfig, EngineError, Generation, GenerationRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LoopStats:
    """What the loop has done so far. Tokens are counted when their request is answered."""

    version: int
    tokens: int  # sampled
    prompt_tokens: int
    cached_tokens: int  # of the prompt tokens, those not computed again
    busy_s: float  # in steps and updates
    idle_s: float  # with nothing to do
    running: int
    waiting: int
    updates: int
    failed_updates: int
    dead: str | None  # why the loop serves nobody any more


@dataclass(slots=True, eq=False)
class _Pending:
    """An answer that somebody awaits."""

    request: GenerationRequest
    answer: Future[Generation] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _Change:
    """Something that must be alone with the engine, between two steps."""

    what: str
    apply: Callable[[], None]
    drain: bool
    holds: bool = False  # of the hold itself, which waits neither for requests nor for a hold
    answer: Future[None] = field(default_factory=Future)


class EngineLoop:
    """Owns `engine` and its thread from construction to `stop`. Every method may be called from any thread."""

    def __init__(self, engine: Engine, config: EngineConfig, name: str = "engine") -> None:
        self._engine = engine
        self._config = config
        self._wake = threading.Condition()  # guards everything below
        self._waiting: dict[str, _Pending] = {}
        self._running: dict[str, _Pending] = {}
        self._changes: deque[_Change] = deque()
        self._aborts: list[str] = []
        self._held_until = 0.0  # on time.monotonic's clock
        self._end: Exception | None = None  # stopped or dead, and why
        self._dead: str | None = None
        self._work = "idle"  # what the thread is at, for the message of whoever waits too long
        self._since = time.monotonic()
        self._busy_s = self._idle_s = 0.0
        self._tokens = self._prompt_tokens = self._cached_tokens = self._updates = self._failed_updates = 0
        self._thread = threading.Thread(target=self._run, name=f"{name}-loop", daemon=True)
        self._thread.start()

    # -- asyncio side --------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate for one request, batched with all others that are awaited now.

        ValueError if it does not fit the model, EngineError if the loop stopped or died, TimeoutError after
        `request_limit_s`. A caller that is cancelled or gives up takes its request out of the engine.
        """
        pending = _Pending(request)
        pending.answer.set_running_or_notify_cancel()  # finished by whoever takes it out; a caller's cancel cannot
        with self._wake:
            self._check_alive()
            if request.id in self._waiting or request.id in self._running:
                raise ValueError(f"request {request.id} is in the engine already; give every request its own id")
            self._waiting[request.id] = pending
            self._wake.notify()
        answer = asyncio.wrap_future(pending.answer)
        try:
            await asyncio.wait([answer], timeout=self._config.request_limit_s)
            if answer.done():
                return answer.result()
            raise TimeoutError(
                f"request {request.id} took longer than request_limit_s={self._config.request_limit_s:g} s: "
                f"{self._place_of(request.id)}; {self._doing()}"
            )
        finally:
            if answer.cancel():  # nobody waits for it any more
                self.abort(request.id)

    async def update(self, version: int, tensors: Mapping[str, torch.Tensor], *, partial: bool = False) -> None:
        """Load weights between two steps, before any request that has not started yet; `partial` as in the engine.

        Raises what the engine raised (the old weights and version are then still in use), EngineError if the loop
        stopped or died, TimeoutError after `update_limit_s`: its message says whether the update was withdrawn or had
        begun. `tensors` must not change while they may be read, which is until this returns or was withdrawn.
        """
        drain = self._config.update == "drain"
        try:
            load = functools.partial(self._engine.load_weights, version, tensors, partial=partial)
            await self._change(_Change(f"update to version {version}", load, drain))
        except Exception:
            self._failed_updates += 1
            raise
        self._updates += 1

    async def release_weights(self) -> None:
        """Free the engine's weights when the running requests have finished; they are needed again before the next."""
        await self._change(_Change("release of the weights", self._engine.release_weights, drain=True))

    async def hold(self, seconds: float) -> int:
        """Keep the weights in use for so long from now on, 0: no longer; returns their version.

        It comes before changes that wait, and after one that has begun. A later hold replaces it. The wait of a change
        counts against its `update_limit_s`.
        """
        held: list[int] = []

        def begin() -> None:
            with self._wake:
                self._held_until = time.monotonic() + seconds
            held.append(self._engine.version)

        await self._change(_Change("hold of the weights", begin, drain=False, holds=True))
        return held[0]

    async def _change(self, change: _Change) -> None:
        change.answer.set_running_or_notify_cancel()
        with self._wake:
            self._check_alive()
            if change.holds:
                self._changes.appendleft(change)
            else:
                self._changes.append(change)
            self._wake.notify()
        answer = asyncio.wrap_future(change.answer)
        try:
            await asyncio.wait([answer], timeout=self._config.update_limit_s)
            if answer.done():
                return answer.result()
            raise TimeoutError(
                f"the {change.what} took longer than update_limit_s={self._config.update_limit_s:g} s: "
                f"{self._state_of(change)}; {self._doing()}"
            )
        finally:
            answer.cancel()
            with self._wake:
                if change in self._changes:  # given up before it began: new requests may start again
                    self._changes.remove(change)
                    self._wake.notify()

    def abort(self, request_id: str) -> None:
        """Finish a request as it is: whoever awaits it gets what it has so far. Unknown ids are ignored."""
        with self._wake:
            pending = self._waiting.pop(request_id, None)
            if pending is not None:
                pending.answer.set_result(Generation(request_id, [], [], [], "abort"))
            elif request_id in self._running:
                self._aborts.append(request_id)
                self._wake.notify()

    async def stop(self, limit_s: float = 30.0) -> None:
        """End the thread after the step it is in; pending requests fail with EngineError. TimeoutError if it hangs."""
        with self._wake:
            self._end = self._end or EngineError("the engine loop was stopped")
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, limit_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine loop did not stop within {limit_s:g} s: {self._doing()}")

    def stats(self) -> LoopStats:
        with self._wake:
            since = time.monotonic() - self._since
            idle = self._work == "idle"
            return LoopStats(
                version=self._engine.version,
                tokens=self._tokens,
                prompt_tokens=self._prompt_tokens,
                cached_tokens=self._cached_tokens,
                busy_s=self._busy_s + (0.0 if idle else since),
                idle_s=self._idle_s + (since if idle else 0.0),
                running=len(self._running),
                waiting=len(self._waiting),
                updates=self._updates,
                failed_updates=self._failed_updates,
                dead=self._dead,
            )

    def _check_alive(self) -> None:
        if self._end is not None:
            raise self._end

    def _place_of(self, request_id: str) -> str:
        with self._wake:
            place = "running" if request_id in self._running else "waiting"
            return f"it is {place}, with {len(self._running)} running and {len(self._waiting)} waiting"

    def _state_of(self, change: _Change) -> str:
        with self._wake:
            if change not in self._changes:
                return "it has begun and may still land"
            running = ", ".join(islice(self._running, 5)) or "none"
            return f"it was withdrawn, the weights are the old ones; requests still running: {running}"

    def _doing(self) -> str:
        with self._wake:
            return f"the engine has been at '{self._work}' for {time.monotonic() - self._since:.1f} s"

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # whatever ended the thread, nobody may wait for it any longer
            self._die(error)
        self._fail_pending()

    def _turn(self) -> bool:
        """One turn. False when the loop was stopped."""
        with self._wake:
            self._now("idle")
            while not (self._end or self._waiting or self._running or self._change_is_due()):
                self._wake.wait(max(0.0, self._held_until - time.monotonic()) if self._changes else None)
            self._now("step")
            if self._end:
                return False
            aborts, self._aborts = self._aborts, []
            due = self._change_is_due()
            change = self._next_change() if due else None
            admitted = [] if due else self._next_requests()
        for request_id in aborts:
            self._answer(self._engine.abort(request_id))
        if change:
            self._apply(change)
        for pending in admitted:
            self._submit(pending)
        for generation in self._engine.step():
            self._answer(generation)
        return True

    def _now(self, work: str) -> None:
        """Account for the time since the last call, and begin `work`."""
        now = time.monotonic()
        if self._work == "idle":
            self._idle_s += now - self._since
        else:
            self._busy_s += now - self._since
        self._work, self._since = work, now

    def _change_is_due(self) -> bool:
        return bool(self._changes) and (self._changes[0].holds or time.monotonic() >= self._held_until)

    def _next_change(self) -> _Change | None:
        if not (self._changes[0].drain and self._running):
            return self._changes.popleft()
        return None

    def _next_requests(self) -> list[_Pending]:
        room = self._engine.capacity - len(self._running)
        admitted = [self._waiting.pop(key) for key in list(islice(self._waiting, room))]
        self._running.update((pending.request.id, pending) for pending in admitted)
        return admitted

    def _apply(self, change: _Change) -> None:
        with self._wake:
            self._now(change.what)
        try:
            change.apply()
        except Exception as error:  # the engine is as it was; whoever asked for the change learns why
            change.answer.set_exception(error)
        else:
            change.answer.set_result(None)

    def _submit(self, pending: _Pending) -> None:
        try:
            self._engine.submit(pending.request)
        except (ValueError, EngineError) as error:  # this request's fault, or the moment's; the others go on
            with self._wake:
                del self._running[pending.request.id]
            pending.answer.set_exception(error)

    def _answer(self, generation: Generation | None) -> None:
        if generation is None:
            return
        with self._wake:
            pending = self._running.pop(generation.id)
            self._tokens += len(generation.token_ids)
            self._prompt_tokens += len(pending.request.prompt_ids)
            self._cached_tokens += generation.cached_tokens
        pending.answer.set_result(generation)

    def _die(self, error: BaseException) -> None:
        with self._wake:
            self._dead = f"{type(error).__name__}: {error}"
            self._end = EngineError(f"the engine died ({self._dead}); place the generator again")
            self._end.__cause__ = error

    def _fail_pending(self) -> None:
        with self._wake:
            self._now("idle")
            answers: list[Future] = [pending.answer for pending in (*self._waiting.values(), *self._running.values())]
            answers += [change.answer for change in self._changes]
            self._waiting.clear()
            self._running.clear()
            self._changes.clear()
            end = self._end
        for answer in answers:
            answer.set_exception(end)
