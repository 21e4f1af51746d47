"""Replicas in the procs of a Monarch job: this machine's, Slurm's, Kubernetes'.

    executor ──fill──▶ proc r, on host r mod H: ReplicaRunnerActor ──lifeline──▶ guard ──▶ replica r ──▶ result, in the
             ◀─────────── status: exit code; log ───┘                                                         store

One proc mesh per replica, so that each dies alone. A proc that is killed takes its replica with it, and the replica
counts as failed; so does one whose proc is silent for `silence_s` (a stopped process, a host that is cut off).
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import monarch.actor

from actors.replica_runner import ReplicaRunner, ReplicaRunnerActor
from mesh.binding import Binding, BindingError, CallTimeout
from mesh.roles import Member
from mesh.supervision import install_fault_hook
from mesh.topology import Place, Placed, configure_monarch, fill
from services.executors.base import TAIL_BYTES, FileLogExecutor, Unreachable
from services.executors.protocol import ReplicaSpec, ReplicaStatus

T = TypeVar("T")

_FILL_S = 240.0
_STOP_S = 30.0
_SLACK_S = 60.0


class MonarchExecutor(FileLogExecutor):
    """`host_mesh`: of any Monarch job, `job.state().NAME`, or `this_host()`. `logs`: a folder on its hosts for the
    logs, `replica-R-LAUNCH.log`. `silence_s`: a proc that does not answer for this long counts as dead.

    The procs live until `cancel()`, the end of the `with` block or the next launch; the host mesh is the caller's.
    Where nobody has done so yet, it takes over Monarch's fault hook, whose default ends the program when a proc dies.
    """

    poll_s = 0.3

    def __init__(self, host_mesh: Any, logs: str | Path, silence_s: float = 60.0) -> None:
        super().__init__()
        self.logs, self.silence_s = Path(logs).expanduser().absolute(), silence_s
        configure_monarch()
        if monarch.actor.unhandled_fault_hook.__module__.startswith("monarch."):
            install_fault_hook(lambda text: print(f"monarch: {text}", file=sys.stderr, flush=True))
        self._hosts = host_mesh.flatten("hosts")
        self._placed: dict[int, Placed] = {}
        self._heard: dict[int, float] = {}
        self._paths: dict[int, Path] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="monarch-executor", daemon=True).start()

    def cancel(self) -> None:
        try:
            super().cancel()
        finally:
            self._for_all(list(self._placed), self._stop)

    def _forget(self) -> None:
        self._for_all(list(self._placed), self._stop)
        super()._forget()

    def _start(self, rank: int, spec: ReplicaSpec, launch: str) -> None:
        path = self.logs / f"replica-{rank}-{launch}.log"
        self._paths[rank] = path
        name = f"replica-{rank}-{launch[:6]}"
        place = Place("replica", name, ReplicaRunnerActor, (spec, rank, launch, str(path)))
        host = self._hosts.slice(hosts=rank % len(self._hosts))
        self._placed[rank] = self._wait(fill(place, host, 0), _FILL_S)
        self._call(rank, Member.start)
        self._heard[rank] = time.monotonic()

    def _look(self, rank: int) -> ReplicaStatus:
        try:
            code = self._call(rank, Member.status)["exit_code"]
        except CallTimeout as error:
            silent_s = time.monotonic() - self._heard[rank]
            if silent_s < self.silence_s:
                raise Unreachable(str(error)) from None
            self._stop(rank)
            return ReplicaStatus(rank, "failed", None, f"its proc was silent for {silent_s:.0f} s, and was stopped")
        except BindingError as error:
            self._stop(rank)
            return ReplicaStatus(rank, "failed", None, f"its proc is gone: {error}")
        self._heard[rank] = time.monotonic()
        if code is None:
            return ReplicaStatus(rank, "running")
        return ReplicaStatus(rank, "failed" if code else "succeeded", code)

    def _end(self, rank: int) -> None:
        if rank in self._placed:
            assert self._spec is not None
            try:
                self._call(rank, Member.finish, limit_s=self._spec.grace_s + _SLACK_S)
            except BindingError as error:  # then with its proc, which is its lifeline
                print(f"replica {rank} is ended with its proc: {error}", file=sys.stderr, flush=True)
            self._stop(rank)

    def _read_log(self, rank: int, offset: int) -> bytes:
        if rank in self._placed:
            return self._call(rank, ReplicaRunner.read_log, offset)
        path = self._paths[rank]
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there; its proc is gone, look for it on its host")
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size + offset) if offset < 0 else offset)
            return log.read(max(TAIL_BYTES, 1 << 20))

    def _call(self, rank: int, endpoint: Any, *args: Any, limit_s: float | None = None) -> Any:
        binding = Binding[Any].to(self._placed[rank].ref)
        call = binding.call(endpoint, *args) if limit_s is None else binding.call_within(limit_s, endpoint, *args)
        return self._wait(call, (limit_s or 0) + _SLACK_S + _FILL_S)

    def _stop(self, rank: int) -> None:
        """Stop its proc, alive or not."""
        placed = self._placed.pop(rank)
        try:
            self._wait(asyncio.wait_for(placed.procs.stop(), _STOP_S), _STOP_S + _SLACK_S)
        except Exception as error:  # Monarch raises many kinds here, and what matters is only that the proc is gone
            print(f"stopping {placed.place.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def _wait(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Do it on the executor's own event loop: the caller may be in one, as notebooks are."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(limit_s)
