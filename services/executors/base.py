"""What executors share: the launch of all replicas, the wait for them, their results.

A back end says how one replica is started, looked at and ended, and where its log is.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar, cast

from services.executors.guard import LIMIT_REACHED
from services.executors.protocol import ALIVE, ReplicaFailed, ReplicaResult, ReplicaSpec, ReplicaStatus
from services.executors.results import check_store, read_record

T = TypeVar("T")

TAIL_LINES = 40
TAIL_BYTES = 8192


class Unreachable(ConnectionError):
    """The back end did not answer. What it would have said is unknown; the replica may live."""


def entrypoint_command(spec: ReplicaSpec, rank: int, launch: str, python: str = "python") -> list[str]:
    """The command line of one replica."""
    return [
        *(python, "-m", "services.executors.replica_entrypoint", "--target", spec.target),
        *("--rank", str(rank), "--world-size", str(spec.world_size), "--uri", spec.uri),
        *("--payload", json.dumps(spec.payload), "--launch", launch),
    ]


class Executor(ABC):
    """A `ServerlessExecutor` but for the back end's own five methods, each bounded, each safe to call from a thread."""

    poll_s = 1.0  # between two looks, in `collect` and `stream_logs`
    at_once = 16  # calls to the back end at the same time

    def __init__(self) -> None:
        self._spec: ReplicaSpec | None = None
        self._launch = ""
        self._statuses: list[ReplicaStatus] = []

    # ---- the back end's ------------------------------------------------------------------------------------------

    @abstractmethod
    def _start(self, rank: int, spec: ReplicaSpec, launch: str) -> None:
        """Start or queue one replica."""

    @abstractmethod
    def _look(self, rank: int) -> ReplicaStatus:
        """How it is. Unreachable when that is not known now."""

    @abstractmethod
    def _end(self, rank: int) -> None:
        """End it, if it runs or was started at all, and return when it has ended."""

    @abstractmethod
    def _tail(self, rank: int) -> str:
        """The end of its log."""

    @abstractmethod
    def stream_logs(self, rank: int, follow: bool = True) -> Iterator[str]: ...

    def _forget(self) -> None:
        """Release what is left of a launch that is over."""
        self._spec, self._statuses = None, []

    # ---- the same for all ----------------------------------------------------------------------------------------

    def launch_replicas(self, spec: ReplicaSpec) -> None:
        if self._spec is not None and any(status.state in ALIVE for status in self.poll()):
            raise RuntimeError("replicas of an earlier launch still run: collect() or cancel() them first")
        check_store(spec.uri)
        self._forget()
        self._spec, self._launch = spec, secrets.token_hex(8)
        self._statuses = [ReplicaStatus(rank, "pending") for rank in range(spec.world_size)]
        failures = self._for_all(range(spec.world_size), lambda rank: self._start(rank, spec, self._launch))
        if failures:
            rank, error = min(failures.items())
            left = self._for_all(range(spec.world_size), self._end)  # a start that failed may have started it
            self._forget()
            rest = "".join(f"; replica {r} could not be ended and may still run: {why}" for r, why in left.items())
            raise RuntimeError(f"replica {rank} could not be started ({error}); the others are ended{rest}") from error

    def poll(self) -> list[ReplicaStatus]:
        def look(rank: int) -> None:
            before = self._statuses[rank]
            try:
                self._statuses[rank] = self._look(rank)
            except Unreachable as error:
                self._statuses[rank] = ReplicaStatus(rank, before.state, before.exit_code, str(error))

        self._raise(self._for_all([s.rank for s in self._known() if s.state in ALIVE], look))
        return list(self._statuses)

    def cancel(self) -> None:
        def end(rank: int) -> None:
            with contextlib.suppress(Unreachable):  # then it is ended unseen
                self._statuses[rank] = self._look(rank)
            if self._statuses[rank].state in ALIVE:
                self._end(rank)
                self._statuses[rank] = ReplicaStatus(rank, "cancelled", None, "it was cancelled")

        self._raise(self._for_all([status.rank for status in self._statuses if status.state in ALIVE], end))

    def collect(self, timeout_s: float, allow_failures: bool = False) -> list[ReplicaResult]:
        until = time.monotonic() + timeout_s
        while left := [status for status in self.poll() if status.state in ALIVE]:
            if time.monotonic() > until:
                names = ", ".join(f"{s.rank} ({s.state}{': ' if s.detail else ''}{s.detail})" for s in left)
                raise TimeoutError(
                    f"replicas {names} have not ended within {timeout_s:g} s; they go on: collect again, or cancel()"
                )
            time.sleep(min(self.poll_s, max(0.0, until - time.monotonic())))
        results = [self._result(status) for status in self._known()]
        failed = [result for result in results if result.error]
        if failed and not allow_failures:
            raise ReplicaFailed(failed[0], results)
        return results

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _result(self, status: ReplicaStatus) -> ReplicaResult:
        assert self._spec is not None
        record = read_record(self._spec.uri, status.rank, self._launch) or {}
        code = record.get("exit_code") if status.exit_code is None else status.exit_code
        error = ""
        if status.state == "cancelled":
            error = "it was cancelled"
        elif status.state == "failed":
            # Its own word and the back end's: a replica whose host goes away only says that it was ended.
            said = [why for why in (record.get("error"), status.detail) if why]
            error = "; ".join(said) or _describe(code, self._spec.limit_s)
        elif "value" not in record:
            error = record.get("error") or f"it ended well but left no result in {self._spec.uri}"
        state = "failed" if error and status.state == "succeeded" else status.state
        return ReplicaResult(status.rank, state, record.get("value"), code, self._tail_or_why(status.rank), error)

    def _tail_or_why(self, rank: int) -> str:
        try:
            return "\n".join(self._tail(rank).splitlines()[-TAIL_LINES:])
        except Exception as error:  # a log that cannot be had must not hide the results
            return f"(its log could not be read: {type(error).__name__}: {error})"

    def _known(self) -> list[ReplicaStatus]:
        if self._spec is None:
            raise RuntimeError("nothing was launched: call launch_replicas() first")
        return self._statuses

    def _for_all(self, ranks: Iterable[int], work: Callable[[int], None]) -> dict[int, Exception]:
        """Do it for these ranks at once; what went wrong, by rank."""
        failures: dict[int, Exception] = {}

        def one(rank: int) -> None:
            try:
                work(rank)
            except Exception as error:
                failures[rank] = error

        with ThreadPoolExecutor(self.at_once) as pool:
            list(pool.map(one, ranks))
        return failures

    @staticmethod
    def _raise(failures: dict[int, Exception]) -> None:
        if failures:
            rank, error = min(failures.items())
            raise RuntimeError(f"replica {rank}: {error}") from error


class FileLogExecutor(Executor):
    """An executor whose replicas' logs can be read from any byte on."""

    @abstractmethod
    def _read_log(self, rank: int, offset: int) -> bytes:
        """A part of the log from `offset` on, empty at its end; a negative offset counts from the end."""

    def _tail(self, rank: int) -> str:
        return self._read_log(rank, -TAIL_BYTES).decode(errors="replace")

    def stream_logs(self, rank: int, follow: bool = True) -> Iterator[str]:
        offset, rest = 0, b""
        while True:
            over = self.poll()[rank].state not in ALIVE  # asked before reading, so that the last words are not missed
            part = self._read_log(rank, offset)
            offset += len(part)
            *lines, rest = (rest + part).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if not part and (over or not follow):
                break
            if not part:
                time.sleep(self.poll_s)
        if rest:
            yield rest.decode(errors="replace")


def bounded(limit_s: float, what: str, call: Callable[[], T]) -> T:
    """Call something of an SDK that may wait for ever. Unreachable after `limit_s`; the call itself cannot be ended."""
    answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put((call(), None))
        except BaseException as error:
            answer.put((None, error))

    threading.Thread(target=ask, name=what, daemon=True).start()  # a daemon does not hold the program's end up
    try:
        value, error = answer.get(timeout=limit_s)
    except queue.Empty:
        raise Unreachable(f"{what}: no answer within {limit_s:g} s") from None
    if error is not None:
        raise error
    return cast(T, value)


def _describe(code: int | None, limit_s: float) -> str:
    if code == LIMIT_REACHED:
        return f"it ran longer than its limit_s of {limit_s:g}"
    if code is not None and code > 128:
        return f"it was killed by signal {code - 128}"
    return "it ended by an error"
