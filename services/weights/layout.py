"""Which bytes lie where: the layout of one rank's part of the weights in a flat buffer.

A plain tensor is held whole by every rank and laid out by rank 0 alone. Of a DTensor each rank lays out the box that it
holds (some rows of it, under FSDP2), which is empty where there are more ranks than rows; a replicated one is laid out
by the first rank of each replica group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from mesh.messages import TensorSpec

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Source = Callable[[], NamedTensors]  # gives the tensors as they are now, e.g. `model.named_parameters`

_ALIGNMENT = 64  # a cache line, and enough for every dtype


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a tensor that this rank holds, in the grid of parts that are not empty."""

    tensor: torch.Tensor
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    place: tuple[int, ...]  # in the grid; beyond its end for an empty box
    grid: tuple[int, ...]  # parts per sharded dimension


@dataclass(frozen=True, slots=True)
class Laid:
    """One entry of a layout: what is published, and the box whose values are copied there."""

    spec: TensorSpec
    box: Box


@torch.no_grad()
def lay_out(named_tensors: NamedTensors, *, rank: int = 0, dtype: torch.dtype | None = None) -> list[Laid]:
    """The layout of this rank's part, in the given order, 64-byte aligned. Nothing is copied.

    `dtype` is what floating-point tensors are published as; None leaves them as they are. Tied tensors (the same view
    of the same storage) are listed once, under their first name: the reader's model ties the others itself. Raises
    ValueError for sparse or quantized tensors, for DTensors whose parts are not boxes, and when no tensor is given.
    """
    pairs = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
    if not pairs:
        raise ValueError("there is no tensor to lay out: pass the model's named_parameters() or state_dict()")
    found: list[Laid] = []
    seen: set[tuple[Any, ...]] = set()
    offset = 0
    for name, tensor in pairs:
        box = _box(name, tensor, rank)
        if box is None:
            continue
        identity = (*_memory_of(box.tensor), box.full_shape, box.start)
        if identity in seen:
            continue
        seen.add(identity)
        published = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        nbytes = box.tensor.numel() * published.itemsize
        kind = str(published).removeprefix("torch.")
        spec = TensorSpec(name, tuple(box.tensor.shape), kind, offset, nbytes, box.full_shape, box.start)
        found.append(Laid(spec, box))
        offset = -(-(offset + nbytes) // _ALIGNMENT) * _ALIGNMENT
    return found


def flat_bytes(specs: Iterable[TensorSpec]) -> int:
    """Size of the flat buffer that holds them; at least 1, because no region can be empty."""
    return max([1, *(spec.offset + spec.nbytes for spec in specs)])


def views(flat: torch.Tensor, specs: Iterable[TensorSpec]) -> dict[str, torch.Tensor]:
    """The tensors inside a flat uint8 buffer, by name, without a copy."""
    return {spec.name: view(flat, spec) for spec in specs}


def view(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    return flat[spec.offset : spec.offset + spec.nbytes].view(dtype).view(spec.shape)


def check_same(expected: list[TensorSpec], given: list[TensorSpec]) -> None:
    """ValueError, with what differs, unless both layouts are equal."""
    if given == expected:
        return
    wanted, found = ({(s.name, s.shape, s.dtype) for s in side} for side in (expected, given))
    what = (
        "their order differs"
        if wanted == found
        else f"missing {sorted(wanted - found)[:3]}, unexpected {sorted(found - wanted)[:3]}"
    )
    raise ValueError(f"the tensors do not fit this publisher's layout: {what}; make a new publisher for a new model")


def check_whole(parts: list[list[TensorSpec]]) -> None:
    """ValueError unless the ranks' parts together hold every element of every tensor."""
    have: dict[str, int] = {}
    whole: dict[str, int] = {}
    for spec in (spec for specs in parts for spec in specs):
        have[spec.name] = have.get(spec.name, 0) + _numel(spec.shape)
        whole[spec.name] = _numel(spec.full_shape)
    wrong = [f"{name} ({have[name]} of {whole[name]} elements)" for name in whole if have[name] != whole[name]]
    if wrong:
        raise ValueError(
            f"the parts of {len(parts)} ranks do not make whole tensors: {', '.join(wrong[:3])}; give the publisher "
            "one writer per rank of the trainer, each with its own rank"
        )


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _box(name: str, tensor: torch.Tensor, rank: int) -> Box | None:
    """This rank's part of a tensor; None where another rank publishes it."""
    full_shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"{name} is {tensor.layout}, quantized={tensor.is_quantized}: publish dense tensors only")
        return Box(tensor.detach(), full_shape, (0,) * len(full_shape), (), ()) if rank == 0 else None
    coordinates = tensor.device_mesh.get_coordinate() or ()
    start = [0] * len(full_shape)
    place, grid, sharded = [], [], set()
    for coordinate, parts, how in zip(coordinates, tensor.device_mesh.shape, tensor.placements, strict=True):
        if type(how) is Replicate:
            if coordinate > 0:
                return None
        elif type(how) is Shard and how.dim not in sharded:
            sharded.add(how.dim)
            length = full_shape[how.dim]
            chunk = max(1, -(-length // parts))
            start[how.dim] = min(coordinate * chunk, length)
            place.append(coordinate)
            grid.append(-(-length // chunk))
        else:
            raise ValueError(
                f"{name} is placed as {tensor.placements}: publish tensors that are replicated, or sharded over one "
                "mesh dimension per tensor dimension; redistribute the others first"
            )
    return Box(tensor.to_local().detach(), full_shape, tuple(start), tuple(place), tuple(grid))
