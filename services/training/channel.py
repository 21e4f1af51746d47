"""One loss channel over a step: its gradient, added up over micro-batches, and its figures.

Gradients are those that `backward()` leaves in `.grad`, the one place where a sharded model delivers them. Two channels
that share a forward pass take turns there: each puts what it has so far into `.grad`, runs its backward and takes the
sum out again. Figures are kept as sums and counts, so that they can be added up over the procs of a sharded trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from services.losses.reduction import LossResult

TOTALS = {"dropped_tokens"}  # figures that are counts: added up, not averaged

# The sum, by name, of what each proc of a trainer hands in; a trainer of one proc gets back what it handed in.
Total = Callable[[dict[str, float]], dict[str, float]]


@dataclass(slots=True)
class Averages:
    """Figures of a step: means over what its micro-batches counted."""

    sums: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    count: float = 0.0

    def add(self, metrics: Mapping[str, torch.Tensor | float], count: torch.Tensor | float) -> None:
        """Take in a micro-batch's figures, which are means over its `count` (those in `TOTALS` are sums)."""
        self.count += float(count)
        for name, value in metrics.items():
            into, times = (self.totals, 1.0) if name in TOTALS else (self.sums, float(count))
            into[name] = into.get(name, 0.0) + float(value) * times

    def over_procs(self, total: Total) -> Averages:
        """These figures together with those of the trainer's other procs."""
        everything = total(
            {"count": self.count}
            | {f"sum {name}": value for name, value in self.sums.items()}
            | {f"total {name}": value for name, value in self.totals.items()}
        )
        sums = {name[4:]: value for name, value in everything.items() if name.startswith("sum ")}
        totals = {name[6:]: value for name, value in everything.items() if name.startswith("total ")}
        return Averages(sums, totals, everything["count"])

    def figures(self, prefix: str) -> dict[str, float]:
        """By metric name. Means over nothing are left out, not 0."""
        means = {name: total / self.count for name, total in self.sums.items()} if self.count else {}
        return {f"{prefix}/{name}": value for name, value in (means | self.totals).items()}


@dataclass(slots=True)
class Channel:
    """Gradient and figures of one loss over a step. `weight`: of its clipped gradient in the step's."""

    weight: float
    max_grad_norm: float
    gradient: list[torch.Tensor | None] | None = None
    loss: float = 0.0
    averages: Averages = field(default_factory=Averages)

    def add(self, result: LossResult, parameters: Sequence[torch.Tensor], *, keep_graph: bool) -> None:
        """Take in the loss of one micro-batch, already divided by the step's normalizer, and run its backward.

        `.grad` of the parameters is None before and after. `keep_graph`: another channel needs this forward pass too.
        """
        for parameter, g in zip(parameters, self.gradient or [None] * len(parameters), strict=True):
            parameter.grad = g
        result.loss.backward(retain_graph=keep_graph)
        self.gradient = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self.loss += float(result.loss.detach())
        self.averages.add(result.metrics, result.count)

    def pour(self, step: list[torch.Tensor | None]) -> dict[str, float]:
        """Add the gradient, clipped and then weighted, to the step's; returns its norm before the clip.

        A gradient that is not finite is left out of the step: clipping cannot save it, and one step with it would end
        the run. The figure "nonfinite" says so. The channel gives its gradient away.
        """
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            return {}
        norm = float(_whole(torch.nn.utils.get_total_norm([g for g in gradient if g is not None])))
        finite = norm < float("inf")  # False for nan
        if finite:
            scale = self.weight * min(1.0, self.max_grad_norm / (norm + 1e-6))
            for index, g in enumerate(gradient):
                if g is not None:
                    g.mul_(scale)
                    so_far = step[index]
                    step[index] = g if so_far is None else so_far.add_(g)
        return {"grad_norm": norm, "nonfinite": float(not finite)}

    def figures(self, name: str, total: Total = dict) -> dict[str, float]:
        loss = total({"loss": self.loss})["loss"]
        return {f"{name}/loss": loss, **self.averages.over_procs(total).figures(name)}


def _whole(norm: torch.Tensor) -> torch.Tensor:
    """A sharded gradient's norm is sharded too: over its shards the squares are still to be added up."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
