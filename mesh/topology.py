"""What runs where: each role's members, and how one member's processes are set up on a host mesh.

Every member has procs of its own, so that it can die, hang and be replaced without touching another. Most have one. A
member of several is called through the actor in its first proc, the leader, which is what others see of it; the actors
in the other procs, its peers, are the leader's alone to call. It lives and dies as a whole.

    Place(procs=3) ──fill──▶ proc 0: leader ◀── role table, everybody's calls
                             proc 1: peer  ◀─┐
                             proc 2: peer  ◀─┴─ the leader's calls
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import monarch.actor
from monarch.actor import current_rank
from monarch.config import configure

from mesh.binding import MemberRef


@dataclass(frozen=True, slots=True)
class ProcSpec:
    """How the procs of one member are set up: threads, environment, devices, and the file for stdout and stderr."""

    threads: int = 1
    env: dict[str, str] = field(default_factory=dict)
    log_path: str | None = None  # of the first proc; the others write beside it: see `log_of`
    devices: tuple[str, ...] = ()  # one CUDA device per proc, the only one that this proc sees; (): as they are

    def log_of(self, rank: int) -> str | None:
        """`trainer-0.log` for the first proc, `trainer-0.1.log` for the second."""
        if self.log_path is None or rank == 0:
            return self.log_path
        path = Path(self.log_path)
        return str(path.with_name(f"{path.stem}.{rank}{path.suffix}"))


@dataclass(frozen=True, slots=True)
class Place:
    """One member of a role: the actor class and its arguments, and the procs it lives in."""

    role: str
    name: str
    actor: Any  # a subclass of mesh.actor.MeshActor
    args: tuple[Any, ...]
    proc: ProcSpec = ProcSpec()
    procs: int = 1
    peer: Any = None  # the actor class in all procs but the first, made with the same arguments; None: the same class
    spare: bool = False  # when it keeps dying the run goes on with the other members of its role, if one lives


@dataclass(slots=True)
class Placed:
    """A filled place: the proc mesh (to stop), the leader (to call), the reference that others get, and its peers."""

    place: Place
    procs: Any
    handle: Any
    incarnation: int
    ref: MemberRef
    peers: tuple[MemberRef, ...] = ()

    @property
    def members(self) -> tuple[MemberRef, ...]:
        """The actors of all procs, by rank."""
        return (self.ref, *self.peers)


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


def prepare_proc(spec: ProcSpec, procs: int = 1) -> None:
    """Runs first in a new proc: before torch is imported, because it reads its thread count and devices then."""
    rank = current_rank().rank
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if procs > 1:  # all of them on one host, so that the local rank is the rank
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(procs))
    if spec.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = spec.devices[rank]
    os.environ.update(spec.env)
    # A failure in a proc is its supervisor's to handle; the default hook would end this proc as well.
    monarch.actor.unhandled_fault_hook = lambda failure: print(f"fault: {failure}", file=sys.stderr, flush=True)
    # Ctrl-C at the terminal is the driver's to handle: it lets every actor end in order.
    os.setpgid(0, 0)
    path = spec.log_of(rank)
    if path:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)


async def fill(place: Place, host: Any, incarnation: int) -> Placed:
    """Spawn the place's procs on `host` (a Monarch host mesh of one host) and its actors in them."""
    procs = host.spawn_procs(
        per_host={"procs": place.procs},
        name=f"{place.name}-{incarnation}".replace("_", "-"),
        bootstrap=functools.partial(prepare_proc, place.proc, place.procs),
    )
    actor_name = place.name.replace("-", "_")
    handle = procs.slice(procs=0).spawn(actor_name, place.actor, place.name, *place.args)
    peers = [
        procs.slice(procs=rank).spawn(f"{actor_name}_{rank}", place.peer or place.actor, place.name, *place.args)
        for rank in range(1, place.procs)
    ]
    await procs.initialized  # before the handles are packed: what they refer to must be there
    # In a thread, because packing waits for the actor, and a caller's time limit must be able to end that.
    refs = [
        await asyncio.to_thread(MemberRef, place.name if rank == 0 else f"{place.name}/{rank}", each, incarnation)
        for rank, each in enumerate([handle, *peers])
    ]
    return Placed(place, procs, handle, incarnation, refs[0], tuple(refs[1:]))


def tail(path: str | None, lines: int = 12) -> str:
    """The last lines of a member's log, for an error message; empty when there is none."""
    if not path or not os.path.exists(path):
        return ""
    with open(path, "rb") as log:
        log.seek(max(0, os.path.getsize(path) - 8192))
        return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
