"""One model over the procs of a trainer replica: FSDP2, over gloo on CPUs and NCCL on GPUs.

    Replica: rank r of N, a process group, a device mesh
    shard(model): proc r keeps 1/N of every parameter, of its gradient and of the optimizer's moments
        forward, backward   layer by layer: gather the parameters (in the computing dtype) ─▶ use ─▶ drop
        after backward      the sum of all procs' gradients (in float32), of which proc r keeps its part in `.grad`

Every forward and every backward pass is a collective: all procs make the same ones in the same order, or the replica
hangs until its time limit. Gradients are summed and not averaged, because losses are normalized over the whole step.

What is kept is in float32 whatever dtype is computed in: an optimizer's steps are mostly smaller than what bfloat16
resolves, and would be lost one by one. A single proc that computes in bfloat16 goes the same way, as a replica of one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from services.meeting import open_store

ComputeDtype = Literal["float32", "bfloat16"]
LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class Replica:
    """This proc's part in a replica. `mesh` is None for a proc alone that shares nothing: a model stays as it is."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    mesh: DeviceMesh | None = None
    store: Any = None  # the process group's meeting point, which lives as long as whoever made it

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def total(self, figures: Mapping[str, float]) -> dict[str, float]:
        """The sum of what each proc hands in, by name; a proc need not know a name. A collective."""
        if self.size == 1:
            return dict(figures)
        everyone: list[dict[str, float]] = [{}] * self.size
        dist.all_gather_object(everyone, dict(figures))
        names = dict.fromkeys(name for each in everyone for name in each)
        return {name: sum(each.get(name, 0.0) for each in everyone) for name in names}

    def shared(self, value: Any = None) -> Any:
        """What the first proc hands in, on all procs. A collective."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def close(self) -> None:
        """Leave the process group. Idempotent."""
        if self.mesh is not None and dist.is_initialized():
            dist.destroy_process_group()
        self.mesh = None


ALONE = Replica()


def meeting_point(size: int, limit_s: float) -> tuple[Any, int]:
    """Where the procs of a replica find each other, made by its first one: the store and its port on this host.

    Only this host reaches it. It is gone with the store that is returned.
    """
    store = open_store(LOOPBACK, limit_s, size)
    return store, store.port


def join(rank: int, size: int, meeting: Any, *, device: str = "cpu", limit_s: float = 60.0) -> Replica:
    """Take part in a replica of `size` procs on this host; returns when all of them do.

    `meeting` is the store of `meeting_point` in the first proc, its port in the others. A collective that takes longer
    than `limit_s` fails, with one of torch's errors (RuntimeError), and so does every one after a proc has died.
    """
    limit = timedelta(seconds=limit_s)
    store = meeting if not isinstance(meeting, int) else dist.TCPStore(LOOPBACK, meeting, size, timeout=limit)
    return _init(rank, size, store, device, limit)


def alone(device: str = "cpu", dtype: ComputeDtype = "float32") -> Replica:
    """A replica of this one proc."""
    if dtype == "float32":
        return Replica(device=device)
    return _init(0, 1, dist.HashStore(), device, timedelta(seconds=60))


def _init(rank: int, size: int, store: Any, device: str, limit: timedelta) -> Replica:
    # All procs are on this host. Without these, gloo and NCCL would listen on whatever network the host's name is on.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.init()  # before the mesh: it would take the local rank for a device's number, and here is but one
        torch.cuda.set_device(torch.device(device).index or 0)
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:nccl"  # gloo carries what is no tensor
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    return Replica(rank, size, device, init_device_mesh(kind, (size,)), store)


def shard(model: nn.Module, replica: Replica, dtype: ComputeDtype = "float32") -> None:
    """Shard the model in place, layer by layer, to be computed in `dtype`. Its parameters become DTensors.

    All procs hold the same float32 values before. Tied parameters stay tied and frozen ones frozen. Every use of a
    parameter must be inside the model's own `forward`. Without effect on a replica that has no mesh.
    """
    if replica.mesh is None:
        return
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype != "float32":
        policy = MixedPrecisionPolicy(getattr(torch, dtype), torch.float32, cast_forward_inputs=False)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (*layers, model):
        # The rest of the parameters, embeddings and head, is the model's own group, so that tied ones are in one.
        # Resharded after forward like the others: a forward pass without backward leaves nothing behind.
        fully_shard(module, mesh=replica.mesh, mp_policy=policy, reshard_after_forward=True)
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def whole(tensor: Tensor) -> Tensor:
    """A tensor, sharded or not, as every proc of the replica would see it unsharded. A collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, the same on all procs, sharded as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return tensor.to(parameter.device)
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


def gathered(model: nn.Module, replica: Replica) -> dict[str, Tensor]:
    """The model's whole state by name, on the leader's CPU; empty elsewhere. A collective.

    Tensor by tensor, so that a GPU never holds more than one whole tensor. Tied tensors are one tensor under two names.
    """
    found: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            full = whole(tensor.detach())
            seen[id(tensor)] = full.cpu() if replica.leads else full.new_empty(0)
        found[name] = seen[id(tensor)]
    return found if replica.leads else {}
