"""The weight plane over a torchstore: the same versions, leases and slots, the tensors under keys `version/name`.

    every rank                                                reader
    copy(v)  parameters ──▶ staged                            get v/name for the names it wants, whole,
    seal()   delete what was in the slot ─▶ put v/name           or the part that a DTensor of its own layout holds

A key is written for one version and never again, and a reader is told of a version when all ranks have put all of it,
so what it gets is that version or KeyGone. There are no checksums and no deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from mesh.messages import ShardRef, TensorSpec, WeightsRef
from services.weights.config import WeightsConfig
from services.weights.layout import Box, Laid, Source, check_same, lay_out
from services.weights.reader import Pulled, VersionGone, check_has
from services.weights.region import RegionError
from services.weights.shards import published_dtype
from services.weights.torchstore_adapter import KeyGone, StoreClient, spawn_store

__all__ = ["StoreReader", "StoreWriter", "spawn_store"]

_IN_FLIGHT = 8  # calls at a time: most of one is waiting
_SLOWEST = 20e6  # bytes per second that a store on a slow, shared machine still moves
A = TypeVar("A")
R = TypeVar("R")


class StoreWriter:
    """One rank's tensors, put into `store`. A `services.weights.shards.Writer`."""

    def __init__(
        self,
        source: Source,
        config: WeightsConfig,
        store: Any,
        *,
        rank: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """As `ShardWriter`; `store` is what `spawn_store` gave rank 0: a reference that reaches it from any process."""
        self.config = config
        self._source, self._rank, self._store = source, rank, store
        self._dtype = published_dtype(config, dtype)
        self.specs: list[TensorSpec] = [laid.spec for laid in lay_out(source(), rank=rank, dtype=self._dtype)]
        self._client: StoreClient | None = None
        self._staged: tuple[int, list[Laid]] | None = None
        self._keys: dict[int, list[str]] = {}  # by slot: what was put there, or was being put

    async def copy(self, slot: int, version: int) -> None:
        """Copy the source's tensors as they are now. ValueError when they differ from the layout."""
        laid = lay_out(self._source(), rank=self._rank, dtype=self._dtype)
        check_same(self.specs, [one.spec for one in laid])
        self._staged = None
        self._staged = version, await asyncio.to_thread(_stage, laid)

    async def seal(self, slot: int, base: int | None) -> ShardRef:
        staged, self._staged = self._staged, None
        if staged is None:
            raise RuntimeError("there is nothing to put into the store: copy the tensors first")
        version, laid = staged
        client = await self._connected()
        # Before the new version, so that there are never more than `slots` of them.
        await self._delete(client, slot)
        filled = [one for one in laid if one.spec.nbytes]
        # Noted before they are there: a put that fails half-way is cleared by the next one to this slot.
        self._keys[slot] = [_key(version, one.spec) for one in filled]

        async def put(one: Laid) -> None:
            await client.put(_key(version, one.spec), one.box, _limit_s(self.config, one.spec.nbytes))

        await _each(put, filled)
        return ShardRef(self.specs, None)

    async def close(self) -> None:
        """Free the memory: later reads fail. Idempotent."""
        self._staged = None
        for slot in list(self._keys):
            await self._delete(await self._connected(), slot)

    async def _connected(self) -> StoreClient:
        if self._client is None:
            self._client = await StoreClient.connect(self._store, self._rank)
        return self._client

    async def _delete(self, client: StoreClient, slot: int) -> None:
        async def delete(key: str) -> None:
            with contextlib.suppress(KeyGone):  # it was never put, because its version failed before
                await client.delete(key, self.config.block_timeout_s)

        await _each(delete, self._keys.get(slot, []))
        self._keys.pop(slot, None)


class StoreReader:
    """Pulls versions out of the store that their references name. A `services.weights.reader.Reader`."""

    def __init__(self, config: WeightsConfig) -> None:
        self.config = config
        self.last = Pulled()

    async def pull(
        self,
        ref: WeightsRef,
        names: Collection[str] | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The tensors of one version, by name, or those of `names` only.

        Those of `into` are filled and returned, with the values cast to their types. They may be DTensors of any
        sharding: each rank of the reader pulls its own part. The others are new, and whole. Raises VersionGone when the
        version was deleted, RegionError when the store does not answer, KeyError for a name that the version does not
        have.
        """
        if ref.store is None:
            raise RegionError('this version lies in no store: the reader needs weights.transport = "rdma" as well')
        began, self.last = time.monotonic(), Pulled()
        into = into or {}
        specs = {spec.name: spec for shard in ref.shards for spec in shard.specs}
        check_has(ref, names)
        client = await StoreClient.connect(ref.store, limit_s=self.config.block_timeout_s)
        fetched = 0

        async def get(name: str) -> tuple[str, torch.Tensor]:
            nonlocal fetched
            spec, target = specs[name], into.get(name)
            wanted = target.to_local() if isinstance(target, DTensor) else target
            dtype: torch.dtype = getattr(torch, spec.dtype)
            numel = math.prod(spec.full_shape) if wanted is None else wanted.numel()
            if numel == 0:
                return name, torch.empty(spec.full_shape, dtype=dtype) if target is None else target
            limit_s = _limit_s(self.config, math.prod(spec.full_shape) * dtype.itemsize)
            tensor = await client.get(_key(ref.version, spec), target, limit_s)
            fetched += numel * dtype.itemsize
            return name, tensor

        try:
            pulled = dict(await _each(get, specs if names is None else [name for name in specs if name in names]))
        except KeyGone as error:
            raise VersionGone(
                f"version {ref.version} was deleted while it was read: its lease {ref.lease_id!r} ended first. "
                "Take the newest version; if that happens often, raise weights.max_lease_s or weights.slots"
            ) from error
        self.last = Pulled("torchstore", fetched, time.monotonic() - began)
        return pulled


def _key(version: int, spec: TensorSpec) -> str:
    return f"{version}/{spec.name}"


def _limit_s(config: WeightsConfig, nbytes: int) -> float:
    return config.block_timeout_s + nbytes / _SLOWEST


def _stage(laid: list[Laid]) -> list[Laid]:
    """Copies, in the types in which they are published."""
    return [Laid(one.spec, replace(one.box, tensor=_copied(one.box, one.spec))) for one in laid]


def _copied(box: Box, spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    return torch.empty(box.tensor.shape, dtype=dtype).copy_(box.tensor)


async def _each(call: Callable[[A], Awaitable[R]], items: Iterable[A]) -> list[R]:
    """The results of all calls, some at a time; the first failure is raised when all have ended."""
    at_once = asyncio.Semaphore(_IN_FLIGHT)

    async def one(item: A) -> R:
        async with at_once:
            return await call(item)

    results = await asyncio.gather(*[one(item) for item in items], return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
