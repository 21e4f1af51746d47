"""Actors of the weights tests: an owner that publishes and a reader that pulls, each on its own proc."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import torch
from monarch.actor import Actor, concurrent_endpoint

from mesh.messages import LogitsRef, RegionRef, WeightsRef
from services.weights.config import WeightsConfig
from services.weights.logits import LogitsConfig, LogitsStore, read_logits
from services.weights.reader import SnapshotReader, VersionGone
from services.weights.region import Region, read_region
from services.weights.shards import ShardWriter
from services.weights.snapshots import SnapshotPublisher


def tensors_of(version: int, numel: int = 1 << 18) -> dict[str, torch.Tensor]:
    """The same tensors for the same version in every process."""
    generator = torch.Generator().manual_seed(version)
    weight = torch.randn(numel, generator=generator).view(-1, 256)
    return {"weight": weight, "half": weight[:8].to(torch.bfloat16), "step": torch.tensor(version)}


class Owner(Actor):
    def __init__(self) -> None:
        self.publisher: SnapshotPublisher | None = None
        self.named: dict[str, torch.Tensor] = {}
        self.store = LogitsStore(LogitsConfig(ttl_s=60.0))
        self.region: Region | None = None

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def publish(self, version: int, numel: int = 1 << 18, max_lease_s: float = 10.0) -> None:
        self.named = tensors_of(version, numel)
        if self.publisher is None:
            config = WeightsConfig(max_lease_s=max_lease_s)
            self.publisher = SnapshotPublisher([ShardWriter(lambda: self.named, config)], config)
        await self.publisher.publish(version)

    @concurrent_endpoint
    async def weights(self, newer_than: int) -> WeightsRef | None:
        assert self.publisher is not None
        return self.publisher.lease(newer_than)

    @concurrent_endpoint
    async def release_weights(self, lease_id: str) -> None:
        assert self.publisher is not None
        self.publisher.release(lease_id)

    @concurrent_endpoint
    async def put_logits(self, rows: int, vocab: int) -> LogitsRef:
        values = torch.arange(rows * vocab, dtype=torch.float32).view(rows, vocab)
        return await self.store.put(values, [0, 1, rows], teacher_version=3)

    @concurrent_endpoint
    async def release_logits(self, ref_id: str) -> None:
        await self.store.release(ref_id)

    @concurrent_endpoint
    async def make_region(self, nbytes: int, block_bytes: int) -> RegionRef:
        self.region = Region(nbytes, block_bytes=block_bytes)
        self.region.tensor.copy_(torch.arange(nbytes) % 251)
        return self.region.ref()

    @concurrent_endpoint
    async def close(self) -> None:
        if self.publisher:
            await self.publisher.close()
        await self.store.close()
        if self.region:
            await self.region.close()


class Reader(Actor):
    def __init__(self) -> None:
        self.readers: dict[str, SnapshotReader] = {}

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def pull(self, ref: WeightsRef, via: Any) -> tuple[str, bool]:
        """The way it came, and whether every tensor is exactly the version's."""
        return await self._pull(ref, via)

    async def _pull(self, ref: WeightsRef, via: Any) -> tuple[str, bool]:
        reader = self.readers.setdefault(via, SnapshotReader(WeightsConfig(via=via)))
        found = await reader.pull(ref)
        expected = tensors_of(ref.version, found["weight"].numel())
        same = found.keys() == expected.keys() and all(
            found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in expected.items()
        )
        return reader.last.via, same

    @concurrent_endpoint
    async def pull_or_gone(self, ref: WeightsRef, via: Any) -> str:
        try:
            _, same = await self._pull(ref, via)
        except VersionGone:
            return "gone"
        return "whole" if same else "torn"

    @concurrent_endpoint
    async def try_pull(self, ref: WeightsRef, via: Any, block_timeout_s: float) -> tuple[str, str, float]:
        """The error's type and text ("" when there was none) and the seconds until it came."""
        start = time.monotonic()
        try:
            await SnapshotReader(WeightsConfig(via=via, block_timeout_s=block_timeout_s)).pull(ref)
        except RuntimeError as error:
            return type(error).__name__, str(error), time.monotonic() - start
        return "", "", time.monotonic() - start

    @concurrent_endpoint
    async def read_parts(self, ref: RegionRef, via: Any, parts: list[tuple[int, int]]) -> list[bool]:
        """For each (offset, length): whether the bytes are the owner's pattern."""
        right = []
        for offset, length in parts:
            out = torch.empty(length, dtype=torch.uint8)
            await read_region(ref, out, offset, via=via)
            right.append(torch.equal(out, (torch.arange(offset, offset + length) % 251).to(torch.uint8)))
        return right

    @concurrent_endpoint
    async def logits(self, ref: LogitsRef, chunk_rows: int, via: Any) -> tuple[list[tuple[int, int]], bool]:
        """(start, rows) of each chunk, and whether all values are the owner's."""
        chunks, right = [], True
        async for start, rows in read_logits(ref, chunk_rows, via=via):
            chunks.append((start, len(rows)))
            first = start * ref.vocab
            expected = torch.arange(first, first + rows.numel(), dtype=torch.float32).view(rows.shape)
            right = right and torch.equal(rows, expected)
        return chunks, right

    @concurrent_endpoint
    async def try_logits(self, ref: LogitsRef, via: Any) -> str:
        try:
            async for _ in read_logits(ref, 4, via=via):
                await asyncio.sleep(0)
        except RuntimeError as error:
            return type(error).__name__
        return ""
