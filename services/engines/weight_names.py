"""Which tensors a model has by name and which names are one tensor, to check what is sent before any is touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from services.engines.engine import WeightsError


class WeightNames:
    """Names and shapes of the state dict of a Hugging Face model, as they are now.

    Of the names that share a tensor (tied embeddings) the first in the state dict stands for it; `first[name]` is it.
    """

    def __init__(self, model: Any) -> None:
        tensors = model.state_dict(keep_vars=True)
        by_id: dict[int, str] = {}
        self.first = {name: by_id.setdefault(id(tensor), name) for name, tensor in tensors.items()}
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._needed = [by_id[id(parameter)] for parameter in model.parameters()]

    def fit(self, tensors: Mapping[str, torch.Tensor], partial: bool) -> dict[str, torch.Tensor]:
        """`tensors` by the first of each one's names.

        WeightsError when one is unexpected, of another shape, or differs from one that it is tied to, or when a
        parameter is missing and the sending is not `partial`.
        """
        known = [name for name in tensors if name in self.first]
        given: dict[str, torch.Tensor] = {}
        for name in known:
            given.setdefault(self.first[name], tensors[name])
        missing = [] if partial else [name for name in self._needed if name not in given]
        unexpected = [name for name in tensors if name not in self.first]
        misshaped = [
            f"{name} is {tuple(tensors[name].shape)}, the model's {tuple(self._shapes[name])}"
            for name in known
            if tensors[name].shape != self._shapes[name]
        ]
        faults = [("missing", missing), ("unexpected", unexpected), ("of another shape", misshaped)]
        found = [f"{len(names)} {fault}: {', '.join(names[:3])}" for fault, names in faults if names]
        if found:
            raise WeightsError(
                f"the tensors do not fit the model ({'; '.join(found)}); send the state dict of the same architecture"
            )
        differing = [name for name in known if not _equal(tensors[name], given[self.first[name]])]
        if differing:
            raise WeightsError(f"{differing[0]} is tied to a tensor that was sent with other values; send one of them")
        return given


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or torch.equal(one, other)
