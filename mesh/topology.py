"""What runs where: each role's members, and how one member's process is set up on a host mesh.

Every member has a proc of its own, so that it can die, hang and be replaced without touching another.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import monarch.actor
from monarch.config import configure

from mesh.binding import MemberRef


@dataclass(frozen=True, slots=True)
class ProcSpec:
    """One proc: its threads, environment, and the file that takes its stdout and stderr."""

    threads: int = 1
    env: dict[str, str] = field(default_factory=dict)
    log_path: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """One member of a role: the actor class and its arguments, and the proc it lives in."""

    role: str
    name: str
    actor: Any  # a subclass of mesh.actor.MeshActor
    args: tuple[Any, ...]
    proc: ProcSpec = ProcSpec()


@dataclass(slots=True)
class Placed:
    """A filled place: the proc mesh (to stop), the actor (to call), and the reference that others get."""

    place: Place
    procs: Any
    handle: Any
    incarnation: int
    ref: MemberRef


def configure_monarch() -> None:
    """Monarch's time limits, for slow and shared machines. Before any spawn."""
    configure(
        cleanup_timeout="60s",
        mesh_proc_spawn_max_idle="180s",
        actor_spawn_max_idle="180s",
        host_spawn_ready_timeout="180s",
        stop_actor_timeout="60s",
        rdma_max_chunk_size_mb=8,
    )


def prepare_proc(spec: ProcSpec) -> None:
    """Runs first in a new proc: before torch is imported, because it reads its thread count then."""
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.update(spec.env)
    # A failure in a proc is its supervisor's to handle; the default hook would end this proc as well.
    monarch.actor.unhandled_fault_hook = lambda failure: print(f"fault: {failure}", file=sys.stderr, flush=True)
    # Ctrl-C at the terminal is the driver's to handle: it lets every actor end in order.
    os.setpgid(0, 0)
    if spec.log_path:
        log = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)


async def fill(place: Place, host: Any, incarnation: int) -> Placed:
    """Spawn the place's proc on `host` (a Monarch host mesh of one host) and its actor in it."""
    procs = host.spawn_procs(
        per_host={"procs": 1},
        name=f"{place.name}-{incarnation}".replace("_", "-"),
        bootstrap=functools.partial(prepare_proc, place.proc),
    )
    handle = procs.spawn(place.name.replace("-", "_"), place.actor, place.name, *place.args)
    await procs.initialized  # before the handle is packed: what it refers to must be there
    # In a thread, because packing waits for the actor, and a caller's time limit must be able to end that.
    ref = await asyncio.to_thread(MemberRef, place.name, handle, incarnation)
    return Placed(place, procs, handle, incarnation, ref)


def tail(path: str | None, lines: int = 12) -> str:
    """The last lines of a member's log, for an error message; empty when there is none."""
    if not path or not os.path.exists(path):
        return ""
    with open(path, "rb") as log:
        log.seek(max(0, os.path.getsize(path) - 8192))
        return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
