"""Actors of the weights tests: an owner that publishes and a reader that pulls, each on its own proc."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import torch
from monarch.actor import Actor, concurrent_endpoint
from torch.distributed import destroy_process_group, init_process_group, is_initialized
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from mesh.messages import LogitsRef, RegionRef, ShardRef, WeightsRef
from services.weights.config import WeightsConfig
from services.weights.logits import LogitsConfig, LogitsStore, read_logits
from services.weights.plane import new_reader, open_writer
from services.weights.reader import Reader as WeightsReader
from services.weights.reader import VersionGone
from services.weights.region import Region, read_region
from services.weights.shards import Writer
from services.weights.snapshots import SnapshotPublisher
from services.weights.torchstore_plane import StoreReader


def tensors_of(version: int, numel: int = 1 << 18) -> dict[str, torch.Tensor]:
    """The same tensors for the same version in every process."""
    generator = torch.Generator().manual_seed(version)
    weight = torch.randn(numel, generator=generator).view(-1, 256)
    return {"weight": weight, "half": weight[:8].to(torch.bfloat16), "step": torch.tensor(version)}


def settings(way: str, **others: Any) -> WeightsConfig:
    """`way` is "shm", "rdma", or "torchstore"."""
    if way == "torchstore":
        return WeightsConfig(transport="torchstore", **others)
    return WeightsConfig(via=way, **others)


def rows_of(version: int) -> dict[str, torch.Tensor]:
    """Tensors whose rows do not divide evenly, some with fewer rows than there are ranks."""
    generator = torch.Generator().manual_seed(version)
    shapes = {"even": (6, 40), "uneven": (7, 5), "one": (1, 3), "vector": (5,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def splits(tensor: torch.Tensor, ranks: int) -> list[int]:
    """Where the columns of a tensor are cut for so many ranks."""
    chunk = -(-tensor.shape[1] // ranks)
    return [min(rank * chunk, tensor.shape[1]) for rank in range(1, ranks)]


class Owner(Actor):
    """A trainer; on a mesh of several procs each holds some rows of every tensor, and the first one leads."""

    def __init__(self, way: str = "auto") -> None:
        self.way = way
        self.publisher: SnapshotPublisher | None = None
        self.named: dict[str, Any] = {}
        self.writer: Writer | None = None
        self.store = LogitsStore(LogitsConfig(ttl_s=60.0))
        self.region: Region | None = None

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def publish(self, version: int, numel: int = 1 << 18, max_lease_s: float = 10.0) -> None:
        self.named = tensors_of(version, numel)
        if self.publisher is None:
            config = settings(self.way, max_lease_s=max_lease_s)
            writer, store = await open_writer(lambda: self.named, config)
            self.publisher = SnapshotPublisher([writer], config, store)
        await self.publisher.publish(version)

    @concurrent_endpoint
    async def nudge(self, version: int) -> None:
        """Publish what there is with one number changed."""
        assert self.publisher is not None
        self.named["weight"].view(-1)[version] = 0.5
        await self.publisher.publish(version)

    @concurrent_endpoint
    async def lead(self, peers: Any, ranks: int) -> None:
        """Rank 0: make a publisher for all ranks. `peers`: the mesh of this actor."""
        self.join_replica(0, ranks)
        config = settings(self.way)
        self.writer, store = await open_writer(lambda: self.named, config)
        others = [Peer(peers.slice(gpus=rank)) for rank in range(1, ranks)]
        for rank, peer in enumerate(others, start=1):
            await peer.actor.join.call_one(rank, ranks, store)
        self.publisher = SnapshotPublisher([self.writer, *others], config, store)

    @concurrent_endpoint
    async def join(self, rank: int, ranks: int, store: Any) -> None:
        self.join_replica(rank, ranks)
        self.writer, _ = await open_writer(lambda: self.named, settings(self.way), rank=rank, store=store)

    def join_replica(self, rank: int, ranks: int) -> None:
        """Zeros as FSDP2 lays them out: some ranks have a row less, or none at all."""
        if not is_initialized():
            init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,))
        self.named = {
            name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in rows_of(0).items()
        }

    @concurrent_endpoint
    async def train(self, version: int) -> None:
        """This rank's rows of the version's tensors."""
        for name, whole in rows_of(version).items():
            sharded = self.named[name]
            new = distribute_tensor(whole, sharded.device_mesh, [Shard(0)], src_data_rank=None)
            sharded.to_local().copy_(new.to_local())

    @concurrent_endpoint
    async def publish_replica(self, version: int) -> None:
        assert self.publisher is not None
        await self.publisher.publish(version)

    @concurrent_endpoint
    async def copy(self, slot: int, version: int) -> None:
        await self.writer.copy(slot, version)

    @concurrent_endpoint
    async def seal(self, slot: int, base: int | None) -> ShardRef:
        return await self.writer.seal(slot, base)

    @concurrent_endpoint
    async def close_writer(self) -> None:
        await self.writer.close()

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


class Peer:
    """Rank 0's way to another rank's writer: a `services.weights.shards.Writer` made of endpoint calls."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def copy(self, slot: int, version: int) -> None:
        await self.actor.copy.call_one(slot, version)

    async def seal(self, slot: int, base: int | None) -> ShardRef:
        return await self.actor.seal.call_one(slot, base)

    async def close(self) -> None:
        await self.actor.close_writer.call_one()


class Reader(Actor):
    def __init__(self) -> None:
        self.readers: dict[str, WeightsReader] = {}

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def pull(self, ref: WeightsRef, via: Any) -> tuple[str, bool]:
        """The way it came, and whether every tensor is exactly the version's."""
        return await self._pull(ref, via)

    async def _pull(self, ref: WeightsRef, via: Any) -> tuple[str, bool]:
        reader = self.readers.setdefault(via, new_reader(settings(via)))
        found = await reader.pull(ref)
        expected = tensors_of(ref.version, found["weight"].numel())
        same = found.keys() == expected.keys() and all(
            found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in expected.items()
        )
        return reader.last.via, same

    @concurrent_endpoint
    async def pull_nudged(self, ref: WeightsRef, via: str, since: int) -> tuple[bool, int]:
        """Whether all is exactly version `since` with the nudges up to this one, and the bytes that were fetched."""
        expected = tensors_of(since)
        expected["weight"].view(-1)[since + 1 : ref.version + 1] = 0.5
        reader = self.readers.setdefault(via, new_reader(settings(via)))
        found = await reader.pull(ref)
        return all(torch.equal(found[name], expected[name]) for name in expected), reader.last.nbytes

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
            await new_reader(settings(via, block_timeout_s=block_timeout_s)).pull(ref)
        except RuntimeError as error:
            return type(error).__name__, str(error), time.monotonic() - start
        return "", "", time.monotonic() - start

    @concurrent_endpoint
    async def pull_rows(self, ref: WeightsRef, way: str) -> list[str]:
        """Pulls whole tensors and one of them alone; the names of those that are not exactly the version's."""
        expected = rows_of(ref.version)
        reader = self.readers.setdefault(way, new_reader(settings(way)))
        whole = await reader.pull(ref)
        wrong = [name for name, tensor in expected.items() if not torch.equal(whole[name], tensor)]
        part = await reader.pull(ref, names={"uneven"})
        return wrong + [name for name in part if name != "uneven" or not torch.equal(part[name], expected[name])]

    @concurrent_endpoint
    async def pull_columns(self, ref: WeightsRef, rank: int, ranks: int) -> list[str]:
        """As one rank of `ranks` that share the columns; the names of tensors whose part is not exactly right."""
        init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            mesh = init_device_mesh("cpu", (ranks,))
            matrices = {name: tensor for name, tensor in rows_of(ref.version).items() if tensor.dim() == 2}
            into = {
                name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(1)], src_data_rank=None)
                for name, tensor in matrices.items()
            }
            found = await StoreReader(settings("torchstore")).pull(ref, names=set(into), into=into)
            columns = {name: torch.tensor_split(tensor, splits(tensor, ranks), 1) for name, tensor in matrices.items()}
            return [name for name in into if not torch.equal(found[name].to_local(), columns[name][rank])]
        finally:
            destroy_process_group()

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
