"""The two sides of the weight plane over the transport that `config` names."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch

from services.weights.config import WeightsConfig
from services.weights.layout import Source
from services.weights.reader import Reader, SnapshotReader
from services.weights.shards import ShardWriter, Writer

TORCHSTORE = "0.1.2"  # `torchstore_adapter` is written for this version's own classes


async def open_writer(
    source: Source,
    config: WeightsConfig,
    *,
    rank: int = 0,
    dtype: torch.dtype | None = None,
    store: Any | None = None,
) -> tuple[Writer, Any | None]:
    """The writer of one rank of a trainer, in that rank's process, and the store that it writes to, if any.

    `dtype` is what the trainer computes with. `store` is what this function gave rank 0; the other ranks need it.
    RegionError when a region or store cannot be made, RuntimeError without the transport's package.
    """
    if config.transport != "torchstore":
        return ShardWriter(source, config, rank=rank, dtype=dtype), None
    plane = torchstore_plane()
    if store is None:
        store = plane.spawn_store()
    return plane.StoreWriter(source, config, store, rank=rank, dtype=dtype), store


def new_reader(config: WeightsConfig | None = None) -> Reader:
    """RuntimeError without the transport's package."""
    config = config or WeightsConfig()
    if config.transport != "torchstore":
        return SnapshotReader(config)
    return torchstore_plane().StoreReader(config)


def torchstore_plane() -> ModuleType:
    """`services.weights.torchstore_plane`, whose package is optional. RuntimeError when it is not there."""
    try:
        found = version("torchstore")
    except PackageNotFoundError:
        found = "none"
    if found != TORCHSTORE:
        raise RuntimeError(
            f'weights.transport = "torchstore" needs torchstore {TORCHSTORE} (installed: {found}): '
            f'pip install --no-deps torchstore=={TORCHSTORE} pygtrie, or set weights.transport = "rdma"'
        )
    from services.weights import torchstore_plane

    return torchstore_plane
