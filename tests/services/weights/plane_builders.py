"""A trainer with tensors that say which version they are, and what it takes to check them."""

import torch

from services.weights.config import WeightsConfig
from services.weights.shards import ShardWriter
from services.weights.snapshots import SnapshotPublisher

FAST = WeightsConfig(max_lease_s=0.3, retry_pause_s=0.01)


def model(version: int) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((100, 30), float(version)),
        "half": torch.full((7,), version, dtype=torch.bfloat16),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(version),
        "last": torch.full((33,), version, dtype=torch.float16),
    }


def is_version(tensors: dict[str, torch.Tensor], version: int) -> bool:
    return same(tensors, model(version))


def same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(
        tensors[k].dtype == v.dtype and tensors[k].shape == v.shape and torch.equal(tensors[k], v)
        for k, v in expected.items()
    )


class Trainer:
    """One rank. `tensors` are its parameters; `train` changes them as an optimizer does, in place."""

    def __init__(self, tensors: dict[str, torch.Tensor] | None = None, config: WeightsConfig = FAST, **writer):
        self.tensors = model(0) if tensors is None else tensors
        self.writer = ShardWriter(lambda: self.tensors, config, **writer)
        self.publisher = SnapshotPublisher([self.writer], config)
        self.lease, self.release, self.close = self.publisher.lease, self.publisher.release, self.publisher.close

    def train(self, version: int) -> None:
        for name, values in model(version).items():
            self.tensors[name].copy_(values)

    async def publish(self, version: int) -> None:
        self.train(version)
        await self.publisher.publish(version)
