"""One loss channel over a step: its gradient, added up over micro-batches, and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

COUNTS = {"dropped_tokens"}  # figures that are sums, not means


@dataclass(slots=True)
class Channel:
    """Gradient and figures of one loss over a step."""

    gradient: list[torch.Tensor] | None = None
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    weight: float = 0.0  # of `sums`

    def add(self, loss: torch.Tensor, parameters: Sequence[torch.Tensor], *, keep_graph: bool) -> None:
        found = torch.autograd.grad(loss, parameters, retain_graph=keep_graph, allow_unused=True)
        if self.gradient is None:
            self.gradient = [
                torch.zeros_like(p) if g is None else g.clone() for p, g in zip(parameters, found, strict=True)
            ]
        else:
            for total, g in zip(self.gradient, found, strict=True):
                if g is not None:
                    total += g
        self.loss += float(loss.detach())

    def count(self, metrics: Mapping[str, torch.Tensor], count: torch.Tensor) -> None:
        self.weight += float(count)
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value) * (
                1.0 if name == "dropped_tokens" else float(count)
            )

    def figures(self, name: str) -> dict[str, float]:
        means = {f"{name}/{k}": v if k == "dropped_tokens" else v / max(self.weight, 1.0) for k, v in self.sums.items()}
        return {f"{name}/loss": self.loss, **means}
