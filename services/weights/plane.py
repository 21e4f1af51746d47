"""The two sides of the weight plane over the transport that `config` names."""

from __future__ import annotations

import torch

from mesh.messages import StoreRef
from services.weights.config import WeightsConfig
from services.weights.layout import Source
from services.weights.reader import Reader, SnapshotReader
from services.weights.shards import ShardWriter, Writer


async def open_writer(
    source: Source,
    config: WeightsConfig,
    *,
    rank: int = 0,
    dtype: torch.dtype | None = None,
    store: StoreRef | None = None,
) -> tuple[Writer, StoreRef | None]:
    """The writer of one rank of a trainer, in that rank's process, and the store that it writes to, if any.

    `dtype` is what the trainer computes with. `store` is what this function gave rank 0; the other ranks need it.
    """
    if config.transport != "torchstore":
        return ShardWriter(source, config, rank=rank, dtype=dtype), None
    from services.weights import torchstore_plane  # an optional package

    store = store or await torchstore_plane.open_store()
    return torchstore_plane.StoreWriter(source, config, store, rank=rank, dtype=dtype), store


def new_reader(config: WeightsConfig | None = None) -> Reader:
    config = config or WeightsConfig()
    if config.transport != "torchstore":
        return SnapshotReader(config)
    from services.weights import torchstore_plane

    return torchstore_plane.StoreReader(config)
