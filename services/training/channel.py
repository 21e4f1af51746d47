"""One loss channel over a step: its gradient, added up over micro-batches, and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from services.losses.reduction import LossResult

TOTALS = {"dropped_tokens"}  # figures that are counts: added up, not averaged


@dataclass(slots=True)
class Averages:
    """Figures of a step: means over what its micro-batches counted."""

    sums: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    count: float = 0.0

    def add(self, metrics: Mapping[str, torch.Tensor], count: torch.Tensor) -> None:
        """Take in a micro-batch's figures, which are means over its `count` (those in `TOTALS` are sums)."""
        self.count += float(count)
        for name, value in metrics.items():
            into, times = (self.totals, 1.0) if name in TOTALS else (self.sums, float(count))
            into[name] = into.get(name, 0.0) + float(value) * times

    def figures(self, prefix: str) -> dict[str, float]:
        """By metric name. Means over nothing are left out, not 0."""
        means = {name: total / self.count for name, total in self.sums.items()} if self.count else {}
        return {f"{prefix}/{name}": value for name, value in (means | self.totals).items()}


@dataclass(slots=True)
class Channel:
    """Gradient and figures of one loss over a step. `weight`: of its clipped gradient in the step's."""

    weight: float
    max_grad_norm: float
    gradient: list[torch.Tensor] | None = None
    loss: float = 0.0
    averages: Averages = field(default_factory=Averages)

    def add(self, result: LossResult, parameters: Sequence[torch.Tensor], *, keep_graph: bool) -> None:
        """Take in the loss of one micro-batch, already divided by the step's normalizer."""
        found = torch.autograd.grad(result.loss, parameters, retain_graph=keep_graph, allow_unused=True)
        if self.gradient is None:
            self.gradient = [
                torch.zeros_like(p) if g is None else g.clone() for p, g in zip(parameters, found, strict=True)
            ]
        else:
            for total, g in zip(self.gradient, found, strict=True):
                if g is not None:
                    total += g
        self.loss += float(result.loss.detach())
        self.averages.add(result.metrics, result.count)

    def pour(self, parameters: Sequence[torch.Tensor]) -> dict[str, float]:
        """Add the gradient, clipped and then weighted, to the parameters' `.grad`; returns its norm before the clip.

        A gradient that is not finite is left out of the step: clipping cannot save it, and one step with it would end
        the run. The figure "nonfinite" says so.
        """
        if self.gradient is None:
            return {}
        norm = float(torch.nn.utils.get_total_norm(self.gradient))
        finite = norm < float("inf")  # False for nan
        if finite:
            scale = self.weight * min(1.0, self.max_grad_norm / (norm + 1e-6))
            for parameter, g in zip(parameters, self.gradient, strict=True):
                parameter.grad = g * scale if parameter.grad is None else parameter.grad.add_(g, alpha=scale)
        return {"grad_norm": norm, "nonfinite": float(not finite)}

    def figures(self, name: str) -> dict[str, float]:
        return {f"{name}/loss": self.loss, **self.averages.figures(name)}
