"""Where procs find each other: a free port, and a store of torch's that listens on one address only."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def free_port(host: str) -> int:
    """A port of `host` that nothing listens on now."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


def open_store(host: str, limit_s: float, size: int | None = None) -> dist.TCPStore:
    """A store that listens on `host` only, at a port of its own; torch would have it listen everywhere.

    `size`: how many procs will use it, where that is known. It is gone with what is returned.
    """
    listener = socket.create_server((host, 0))
    return dist.TCPStore(
        host, listener.getsockname()[1], size, is_master=True, wait_for_workers=False,
        timeout=timedelta(seconds=limit_s), master_listen_fd=listener.detach(),
    )  # fmt: skip
