"""Byte regions that other processes read: through shared memory on the same host, through Monarch RDMA from elsewhere.

    owner                                      reader
    Region ── tensor (uint8, flat)             read_region(ref, out)
      │        ├─ file in /dev/shm  ◀── same host: copied from the file
      │        └─ RDMA blocks       ◀── otherwise: several block reads in flight
      └─ ref() ── RegionRef ──▶ travels in a message

A region is registered with RDMA once, for its whole life, as consecutive blocks: a Monarch read always takes a whole
buffer, so blocks allow reads of a part; several in flight are faster than one large read; and each has its own short
time-out, so that a dead owner is noticed in seconds however large the region is.

A file's name carries its owner's pid for people; that the owner lives is shown by the lock it holds on the file, which
the kernel drops with the process. `sweep_dead_regions` removes files that nobody holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import math
import os
import re
import secrets
import socket
import sys
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mesh.messages import RegionRef

Via = Literal["auto", "shm", "rdma"]

BLOCK_BYTES = 16 << 20
_IN_FLIGHT = 8  # block reads at a time
_DROP_LIMIT_S = 10.0
_NAME = re.compile(r"milkweed-region-\d+-[0-9a-f]{16}")


class RegionError(RuntimeError):
    """A region cannot be made, or its bytes cannot be read."""


class Region:
    """A named, zeroed, flat byte tensor that this process owns and others read."""

    def __init__(
        self, nbytes: int, *, block_bytes: int = BLOCK_BYTES, header_bytes: int = 0, rdma: bool | None = None
    ) -> None:
        """`rdma`: register with Monarch RDMA; None does so inside a Monarch actor. `header_bytes`: the first block's
        size where the region starts with something that readers fetch alone. Removes leftovers of dead owners first.

        Raises ValueError for sizes that make no sense, RegionError when no folder has room or RDMA refuses.
        """
        if nbytes <= 0 or block_bytes <= 0 or not 0 <= header_bytes <= nbytes:
            raise ValueError(
                f"a region needs 0 < nbytes, 0 < block_bytes and 0 <= header_bytes <= nbytes; "
                f"got {nbytes}, {block_bytes}, {header_bytes}"
            )
        sweep_dead_regions()
        self.nbytes = nbytes
        self.path, descriptor = _create_file(nbytes)
        self._remove = weakref.finalize(self, _remove_file, self.path, descriptor, os.getpid())
        self.tensor = torch.from_file(str(self.path), shared=True, size=nbytes, dtype=torch.uint8)
        self._buffers: tuple[Any, ...] = ()
        if in_monarch() if rdma is None else rdma:
            bounds = [0] * bool(header_bytes) + list(range(header_bytes, nbytes, block_bytes)) + [nbytes]
            try:
                self._buffers = _register(self.tensor, bounds)
            except Exception as error:  # Monarch raises plain Exception for a missing backend
                self._remove()
                raise RegionError(
                    f"Monarch RDMA refused to register {nbytes} bytes ({error}); without RDMA hardware set "
                    "monarch.config.configure(rdma_allow_tcp_fallback=True), or pass rdma=False for one host"
                ) from error

    def ref(self) -> RegionRef:
        """What a reader needs. `rdma` holds the blocks, in order, as a tuple of RDMABuffers."""
        return RegionRef(self.nbytes, socket.gethostname(), str(self.path), self._buffers or None)

    async def close(self) -> None:
        """Take the region back: later reads fail, a copy from the file that already began ends well. Idempotent."""
        buffers, self._buffers = self._buffers, ()
        # The name goes first: it needs nobody's help, dropping the blocks does.
        self._remove()
        for buffer in buffers:
            try:
                await asyncio.wait_for(buffer.drop(), _DROP_LIMIT_S)
            except Exception as error:  # Monarch raises plain Exception
                raise RegionError(
                    f"the RDMA manager of this process did not drop a block of {self.path.name} "
                    f"within {_DROP_LIMIT_S:g} s ({error!r}); its memory stays pinned until the process ends"
                ) from error


async def read_region(
    ref: RegionRef, out: torch.Tensor, offset: int = 0, timeout_s: float = 5.0, via: Via = "auto"
) -> Literal["shm", "rdma"]:
    """Fill `out` (1-D contiguous uint8, CPU) with the region's bytes from `offset` on; returns the way they came.

    `via="auto"` copies from shared memory when the region's host is this one and the file can be opened, else reads
    over RDMA. `timeout_s` bounds each RDMA block, not the whole read: it is how long the owner may stay silent.
    After an error throw `out` away: a late block may still be written to it.

    Raises ValueError for a bad range or tensor, RegionError when the bytes cannot be had.
    """
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError(f"read into a 1-D contiguous uint8 CPU tensor, not {out.dtype} {tuple(out.shape)}")
    if offset < 0 or offset + out.numel() > ref.nbytes:
        raise ValueError(f"bytes {offset} to {offset + out.numel()} are outside of the region's {ref.nbytes}")
    why_not_shm = "not tried"
    if via != "rdma":
        descriptor, why_not_shm = _open_local(ref)
        if descriptor is not None:
            await asyncio.to_thread(_copy_from_file, descriptor, out, offset, ref)
            return "shm"
    if via == "shm" or not ref.rdma:
        raise RegionError(
            f"cannot read the region of {ref.host}: shared memory: {why_not_shm}; RDMA: "
            f"{'not tried' if ref.rdma else 'not registered'}. Its owner closed it or died, or runs on another host "
            "and made it outside of a Monarch actor; ask the owner for a new reference"
        )
    await _read_blocks(ref, out, offset, timeout_s)
    return "rdma"


def sweep_dead_regions() -> list[str]:
    """Remove region files of this user whose owners are dead; returns their paths. Live regions are not touched."""
    removed = []
    for folder in _folders():
        for path in folder.glob("milkweed-region-*"):
            # Another sweeper, or the owner itself, may take the file away at any moment.
            with contextlib.suppress(FileNotFoundError):
                if _NAME.fullmatch(path.name) and path.stat().st_uid == os.getuid() and _is_dead(path):
                    path.unlink()
                    removed.append(str(path))
    return removed


def in_monarch() -> bool:
    """Whether this task runs in a Monarch context. Asking Monarch itself would start a client where there is none."""
    actor_mesh = sys.modules.get("monarch._src.actor.actor_mesh")
    return actor_mesh is not None and actor_mesh._context.get() is not None


def _folders() -> list[Path]:
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return [folder for folder in folders if os.access(folder, os.W_OK)]


def _create_file(nbytes: int) -> tuple[Path, int]:
    """A new file of `nbytes` zeros, locked by this process; its path and descriptor."""
    tried = []
    for folder in _folders():
        path, descriptor = _create_locked(folder)
        try:
            # Without real pages a full /dev/shm (64 MB in many containers) would kill the first writer by SIGBUS.
            os.posix_fallocate(descriptor, 0, nbytes)
            return path, descriptor
        except OSError as error:
            _remove_file(path, descriptor, os.getpid())
            tried.append(f"{folder}: {error.strerror}")
    raise RegionError(f"no room for a region of {nbytes} bytes ({'; '.join(tried)}); enlarge /dev/shm or set TMPDIR")


def _create_locked(folder: Path) -> tuple[Path, int]:
    while True:
        path = folder / f"milkweed-region-{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:  # else a sweeper came between creation and lock
            return path, descriptor
        os.close(descriptor)


def _remove_file(path: Path, descriptor: int, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child inherits the finalizer, not the file
    path.unlink(missing_ok=True)
    os.close(descriptor)


def _is_dead(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _open_local(ref: RegionRef) -> tuple[int | None, str]:
    """A descriptor of the region's file, or None and why it cannot be had here."""
    if ref.shm_path is None:
        return None, "the region has no file"
    if ref.host != socket.gethostname():
        return None, f"this host is {socket.gethostname()}"
    try:
        return os.open(ref.shm_path, os.O_RDONLY), ""
    except OSError as error:
        return None, f"{ref.shm_path}: {error.strerror}"


def _copy_from_file(descriptor: int, out: torch.Tensor, offset: int, ref: RegionRef) -> None:
    """Fill `out` from the file and close it. Reading beats mapping here: no page faults, and the GIL is free."""
    try:
        target, done = out.numpy().data, 0
        while done < len(target):
            count = os.preadv(descriptor, [target[done:]], offset + done)
            if count == 0:
                raise RegionError(f"{ref.shm_path} ends after {offset + done} of {ref.nbytes} bytes: not this region")
            done += count
    finally:
        os.close(descriptor)


def _register(tensor: torch.Tensor, bounds: list[int]) -> tuple[Any, ...]:
    from monarch.rdma import RDMABuffer  # only actors come here; other processes do without the import

    return tuple(RDMABuffer(tensor[start:stop]) for start, stop in itertools.pairwise(bounds))


async def _read_blocks(ref: RegionRef, out: torch.Tensor, offset: int, timeout_s: float) -> None:
    """Read the blocks that overlap the range, `_IN_FLIGHT` at a time; a block that sticks out goes through scratch."""
    if not in_monarch():
        raise RegionError(
            "an RDMA read needs the caller's Monarch context: await it in an endpoint or in a task that an endpoint "
            "started, not in a plain thread"
        )
    pending: deque[_BlockRead] = deque()
    stop, block_start = offset + out.numel(), 0
    for block in ref.rdma or ():
        block_stop = block_start + block.size()
        start, end = max(block_start, offset), min(block_stop, stop)
        if start < end:
            if len(pending) == _IN_FLIGHT:
                await _finish(pending.popleft(), ref, timeout_s)
            wanted = out[start - offset : end - offset]
            whole = (start, end) == (block_start, block_stop)
            target = wanted if whole else torch.empty(block.size(), dtype=torch.uint8)
            arriving = wanted if whole else target[start - block_start : end - block_start]
            reading = block.read_into(target, timeout=max(1, math.ceil(timeout_s)))
            pending.append(_BlockRead(reading, wanted, arriving))
        block_start = block_stop
    while pending:
        await _finish(pending.popleft(), ref, timeout_s)


@dataclass(slots=True)
class _BlockRead:
    reading: Any  # monarch Future
    wanted: torch.Tensor  # where the bytes belong
    arriving: torch.Tensor  # where they arrive: the same, or a part of a scratch block


async def _finish(block: _BlockRead, ref: RegionRef, timeout_s: float) -> None:
    try:
        # Monarch's own time-out, in whole seconds, comes first; the outer one is for a manager that answers nothing.
        await asyncio.wait_for(block.reading, math.ceil(timeout_s) + 2)
    except Exception as error:  # Monarch raises plain Exception
        raise RegionError(
            f"RDMA read from {ref.host} failed ({str(error) or type(error).__name__}): it dropped the region or "
            f"delivered no block within {timeout_s:g} s; ask it for a new reference"
        ) from error
    if block.arriving is not block.wanted:
        block.wanted.copy_(block.arriving)
