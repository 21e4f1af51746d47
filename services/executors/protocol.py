"""What every executor does, and what goes in and comes out of it.

An executor launches the replicas of one `ReplicaSpec` at a time. Replicas need no network between them: they meet in
the object store at `uri`, where each also leaves its result. So `collect` is the same wherever they ran.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

State = Literal["pending", "running", "succeeded", "failed", "cancelled"]
ALIVE: tuple[State, ...] = ("pending", "running")

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PAYLOAD_BYTES = 96 * 1024  # it travels as one argument of a command, of which Linux allows 128 KiB


class ExecutorUnavailable(RuntimeError):
    """The executor cannot be used here: its package or its credentials are missing. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Replica:
    """What a target is called with: `target(replica) -> a value that JSON can hold`."""

    rank: int
    world_size: int
    uri: str
    payload: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """W replicas of one function.

    target       "package.module:function", importable where the replicas run
    world_size   how many; ranks are 0 .. world_size - 1
    uri          the object store in which they meet: a path, s3://, gs://, hf://
    payload      what each of them is given; JSON, at most 96 KiB, no secrets: it is part of a command line
    env          environment variables of the replicas, on top of those that the back end sets
    limit_s      seconds after which a replica that still runs is ended with exit code 124
    grace_s      seconds between SIGTERM and SIGKILL when a replica is ended

    ValueError says what is wrong. A relative path in `uri` is taken from the present folder.
    """

    target: str
    world_size: int
    uri: str
    payload: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    limit_s: float = 24 * 3600.0
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.target):
            raise ValueError(f'target {self.target!r} is no function: write "package.module:function"')
        if self.world_size < 1:
            raise ValueError(f"world_size {self.world_size} must be at least 1")
        if not self.uri or self.uri.startswith("memory:"):
            raise ValueError(f"uri {self.uri!r} is no store that replicas share: give a path, s3://, gs:// or hf://")
        if "://" not in self.uri:
            object.__setattr__(self, "uri", str(Path(self.uri).expanduser().absolute()))
        try:
            size = len(json.dumps(self.payload))
        except (TypeError, ValueError) as error:
            raise ValueError(f"payload is not JSON ({error}): give strings, numbers, lists and dicts of them") from None
        if not isinstance(self.payload, dict) or size > _PAYLOAD_BYTES:
            raise ValueError(
                f"payload must be a dict of at most {_PAYLOAD_BYTES} bytes of JSON (it has {size}): put more into the "
                "store, and its name into the payload"
            )
        if self.limit_s <= 0 or self.grace_s < 0:
            raise ValueError(f"limit_s {self.limit_s:g} must be positive and grace_s {self.grace_s:g} not negative")


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """`exit_code`: None while it runs and where the back end tells none; 128 + N after signal N. `detail`: why."""

    rank: int
    state: State
    exit_code: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """How a replica ended. `error` is empty for one that succeeded; `value` is what its target returned."""

    rank: int
    state: State
    value: Any
    exit_code: int | None
    log_tail: str
    error: str = ""


class ReplicaFailed(RuntimeError):
    """A replica failed or was cancelled. `results` has those of all ranks, the successful ones with their values."""

    def __init__(self, failed: ReplicaResult, results: Sequence[ReplicaResult] = ()) -> None:
        self.rank, self.exit_code, self.log_tail = failed.rank, failed.exit_code, failed.log_tail
        self.results = list(results) or [failed]
        others = [str(r.rank) for r in self.results if r.error and r.rank != failed.rank]
        more = f" (so did {', '.join(others)})" if others else ""
        code = "no exit code" if failed.exit_code is None else f"exit code {failed.exit_code}"
        super().__init__(
            f"replica {failed.rank} failed{more}: {failed.error} ({code}); its log ends with:\n"
            f"{failed.log_tail.rstrip() or '(nothing was written)'}"
        )


class ServerlessExecutor(Protocol):
    """Every method is bounded in time. `with executor:` cancels what still runs at the end of the block."""

    def launch_replicas(self, spec: ReplicaSpec) -> None:
        """Start all replicas; returns when they are started or queued. If one cannot be started, none is left running.

        RuntimeError while an earlier launch still runs.
        """

    def poll(self) -> list[ReplicaStatus]:
        """The state of every replica, by rank."""

    def stream_logs(self, rank: int, follow: bool = True) -> Iterator[str]:
        """The lines of a replica's log, from its start. With `follow`, until it has ended; else what there is now."""

    def cancel(self) -> None:
        """End every replica that runs, and wait until none does. Does nothing when none runs."""

    def collect(self, timeout_s: float, allow_failures: bool = False) -> list[ReplicaResult]:
        """Wait until all replicas have ended, and return their results by rank.

        ReplicaFailed when one failed, once all have ended, because the others train on without it; with
        `allow_failures` the results tell. TimeoutError names those that still run; nothing is cancelled then.
        """
