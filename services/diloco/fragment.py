"""A fragment of the model: what the outer loop keeps of it, and what a sync does with it.

    parameters ──▶ original - parameter ──▶ gradient ──▶ (compressed) all-reduce ──▶ gradient ──▶ SGD on the original
        ▲                                                                                             │
        └──────────────── original, or a mix of it and the parameter (alpha) ◀────────────────────────┘

Original, momentum and gradient are flat buffers in the host's memory, so that a sync is one all-reduce and few passes
over memory; a GPU holds nothing of them. Of sharded parameters (DTensors) each proc has its shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from services.diloco.compression import Compression, NoCompression


class Fragment:
    """A part of the model that is synced at once: its trained parameters, and the outer optimizer's view of them."""

    def __init__(self, module: nn.Module, lr: float, momentum: float, nesterov: bool, *, alpha: float) -> None:
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("a fragment has no trained parameter: give each at least one, or use fewer fragments")
        if not 0 <= alpha <= 1:
            raise ValueError(f"fragment_update_alpha {alpha} is a share: set it to between 0 and 1")
        dtypes = {p.dtype for p in self.parameters.values()}
        if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
            raise ValueError(
                f"parameters are {', '.join(sorted(map(str, dtypes)))}: the outer loop needs them in float32, or small "
                "updates are rounded away; keep float32 parameters and compute in what you like"
            )
        self._alpha = alpha
        total = sum(local(p).numel() for p in self.parameters.values())
        # One element at least: a proc may have no share of a small fragment, and still takes part in its syncs.
        self.original = torch.zeros(max(total, 1), dtype=dtypes.pop())
        self.gradient = torch.zeros_like(self.original)
        self.original_parameters = self.by_name(self.original)
        self.save_parameters()
        stepped = nn.Parameter(self.original)  # shares its memory: the outer step is taken on the originals
        self.optimizer = torch.optim.SGD([stepped], lr=lr, momentum=momentum, nesterov=nesterov, fused=True)
        self.momentum = torch.zeros_like(self.original)
        if momentum:
            self.optimizer.state[stepped]["momentum_buffer"] = self.momentum
        self._stepped = stepped
        self.compression: Compression = NoCompression()
        self._kept: Tensor | None = None  # the contribution under way, where the parameters go on meanwhile
        self._sent: Any = None
        self._work: Any = None
        self.norm = 0.0  # of the last averaged pseudo-gradient; of this proc's share
        self.sent_bytes = 0

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat buffer, shaped as this proc's part of each parameter."""
        sizes = [local(p).numel() for p in self.parameters.values()]
        parts = flat[: sum(sizes)].split(sizes)
        return {name: part.view(local(p).shape) for (name, p), part in zip(self.parameters.items(), parts, strict=True)}

    def prepare(self, manager: Any, *, keep: bool) -> None:
        """Start to average how far the parameters moved. `keep`: they move on before `perform`."""
        self._work = None
        self._pseudo_gradient()
        self._kept = self.gradient.clone() if keep else None
        self._send(manager)

    def send_again(self, manager: Any) -> None:
        """The same contribution to another quorum."""
        if self._kept is None:
            self._pseudo_gradient()
        else:
            self.gradient.copy_(self._kept)
        self._send(manager)

    def perform(self, manager: Any) -> bool:
        """Take the outer step with the average, if the sync succeeded; if not, nothing has changed."""
        self.wait()
        if not manager.should_commit():
            return False
        self.compression.committed()
        self.compression.unpack(self._sent, self.gradient)
        self.norm = float(torch.linalg.vector_norm(self.gradient))
        self._stepped.grad = self.gradient
        self.optimizer.step()
        self._stepped.grad = None
        for name, original in self.original_parameters.items():
            parameter = local(self.parameters[name])
            if self._alpha:
                parameter.copy_(torch.lerp(original, parameter.to(original.device), self._alpha))
            else:
                parameter.copy_(original)
        self._kept = None
        return True

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None

    def save_parameters(self) -> None:
        for name, original in self.original_parameters.items():
            original.copy_(local(self.parameters[name]))

    def restore_parameters(self) -> None:
        for name, original in self.original_parameters.items():
            local(self.parameters[name]).copy_(original)

    def save(self) -> dict[str, Tensor]:
        return {"original": self.original, "momentum": self.momentum}

    def load(self, saved: dict[str, Tensor]) -> None:
        """Take over a peer's state. What this replica still owed to its peers is of training that is lost."""
        self.original.copy_(_fitting(saved["original"], self.original))
        self.momentum.copy_(_fitting(saved["momentum"], self.momentum))
        self.compression.reset()
        self._work = self._kept = None

    def _pseudo_gradient(self) -> None:
        for name, out in self.by_name(self.gradient).items():
            parameter = local(self.parameters[name])
            if parameter.device != out.device:
                parameter = out.copy_(parameter)
            torch.sub(self.original_parameters[name], parameter, out=out)

    def _send(self, manager: Any) -> None:
        self._sent = self.compression.pack(self.gradient)
        self.sent_bytes = self.compression.nbytes(self._sent)
        self._work = manager.allreduce(self._sent)


def local(tensor: Tensor) -> Tensor:
    """This proc's part of a tensor, without gradient, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fitting(value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape or value.dtype != like.dtype:
        raise ValueError(f"a peer's fragment has {value.numel()} elements of {value.dtype}, not {like.numel()}")
    return value
