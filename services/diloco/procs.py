"""What the procs of one replica agree on: they make the same syncs, heal together, and try again together.

torchft leaves that to luck: when a quorum or a transfer fails for one proc only, the others go on, and a replica of
halves is taken for a whole one. Here every try is a vote, over a small store that the first proc keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from services.meeting import open_store

Share = Callable[[Any], Any]  # a value of the first proc (None elsewhere) -> that value, in every proc


class Procs:
    """Proc `rank` of `size`. Methods are collectives, in the same order everywhere, but `call_off` and `called_off`.

    `share` is used once, here. `limit_s` is how long the procs may be apart; a proc that is not there by then has
    voted no.
    """

    def __init__(self, rank: int, size: int, host: str, share: Share, limit_s: float) -> None:
        self.rank, self.size, self._limit_s = rank, size, limit_s
        self._turn = 0
        self._store: dist.TCPStore | None = None
        if size == 1:
            return
        self._store = open_store(host, limit_s) if self.leads else None
        port = share(self._store.port if self._store is not None else None)
        if self._store is None:
            self._store = dist.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=limit_s))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def tell(self, number: int | None) -> int:
        """The first proc's number, in every proc. RuntimeError of torch's store when the first proc is gone."""
        self._turn += 1
        if self._store is None or number is not None:
            assert number is not None
            if self._store is not None:
                self._store.set(f"{self._turn}", str(number))
            return number
        return int(self._store.get(f"{self._turn}"))

    def agree(self, fine: bool) -> bool:
        """Whether `fine` holds in every proc. The first verdict that is written counts, so that nobody sees another."""
        self._turn += 1
        if self._store is None:
            return fine
        key = f"{self._turn}"
        self._store.set(f"{key}/{self.rank}", "yes" if fine else "no")
        if self.leads:
            return self._verdict(key, all(self._says_yes(f"{key}/{rank}") for rank in range(self.size)))
        try:
            # The first proc may have waited for each of the others before it writes.
            self._store.wait([key], timedelta(seconds=self._limit_s * self.size))
        except dist.DistStoreError:
            return self._verdict(key, False)
        return self._verdict(key, fine)

    def call_off(self) -> None:
        """Tell the others, in the midst of what they wait for, that it will not come."""
        if self._store is not None:
            self._store.set(f"{self._turn}/off", "off")

    def called_off(self) -> bool:
        return self._store is not None and not self.leads and self._store.check([f"{self._turn}/off"])

    def close(self) -> None:
        self._store = None

    def _says_yes(self, key: str) -> bool:
        assert self._store is not None
        try:
            return bool(self._store.get(key) == b"yes")
        except dist.DistStoreError:
            return False

    def _verdict(self, key: str, yes: bool) -> bool:
        assert self._store is not None
        return bool(self._store.compare_set(key, "", "yes" if yes else "no") == b"yes")
