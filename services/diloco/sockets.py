"""Sockets of a sync: all on one address, and one that tells when the lighthouse is gone."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torchft.manager
from torchft.process_group import ProcessGroupGloo


class HostGloo(ProcessGroupGloo):
    """torchft's gloo group, that listens on the address `host` only, and not on what the host's name stands for."""

    def __init__(self, host: str, limit: timedelta) -> None:
        super().__init__(timeout=limit)
        self._host = host

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        gloo = dist.ProcessGroupGloo(store, rank, world_size, options)
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group


_replacing = threading.Lock()


@contextlib.contextmanager
def serving_on(host: str) -> Iterator[None]:
    """Have torchft's managers that are made meanwhile serve on `host`: it hard-codes every interface."""
    with _replacing:
        server = torchft.manager.ManagerServer

        def on_host(**settings: Any) -> Any:
            return server(**settings | {"bind": f"{host}:0"})

        torchft.manager.ManagerServer = on_host
        try:
            yield
        finally:
            torchft.manager.ManagerServer = server


class Tether:
    """A connection to the lighthouse over which nothing is said: it breaks when the process at its other end dies.

    torchft itself would notice at the end of the wait for a quorum, or never if another lighthouse has taken its place.
    OSError when the lighthouse is not to be reached.
    """

    def __init__(self, address: str, limit_s: float) -> None:
        parts = urlsplit(address)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=limit_s)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._broken = False

    @property
    def broken(self) -> bool:
        while not self._broken and select.select([self._socket], [], [], 0)[0]:
            try:
                self._broken = not self._socket.recv(4096)
            except OSError:
                self._broken = True
        return self._broken

    def close(self) -> None:
        self._broken = True
        self._socket.close()
