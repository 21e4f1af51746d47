"""A toy to train with an outer loop, the same in plain numpy, and replicas in threads of this process."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from services.diloco.config import DilocoConfig

# Short waits, and still long enough for a machine that is busy with other things.
TIMES: dict[str, Any] = {
    "heartbeat_timeout_s": 3.0, "join_s": 60.0, "collective_s": 30.0, "connect_s": 6.0, "quorum_s": 90.0,
    "give_up_s": 240.0,
}  # fmt: skip
SHAPES = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (2, 3), "b.bias": (5,), "c": (7,)}
BETAS, EPS, RATE = (0.9, 0.95), 1e-8, 0.05


def config(**settings: Any) -> DilocoConfig:
    return DilocoConfig(**{**TIMES, **settings})


def starts() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape) for name, shape in SHAPES.items()}


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.tensor(value, dtype=dtype)) for name, value in starts().items()}


def adamw(trained: dict[str, nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(trained.values(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0)


def pull(replica: int, step: int, name: str, value: np.ndarray) -> np.ndarray:
    """The gradient at `value`: of a bowl whose place and steepness change with replica and step."""
    random = np.random.default_rng([replica, step, sorted(SHAPES).index(name)])
    return (value - random.normal(size=value.shape)) * random.uniform(0.5, 1.5)


def inner_step(
    trained: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, replica: int, step: int
) -> dict[str, np.ndarray]:
    """One step of the optimizer (and of the outer loop that is attached to it); the parameters after it."""
    for name, p in trained.items():
        p.grad = torch.tensor(pull(replica, step, name, p.detach().numpy()), dtype=p.dtype)
    optimizer.step()
    return {name: p.detach().numpy().copy() for name, p in trained.items()}


@dataclass
class Reference:
    """DiLoCo in numpy: what `replicas` trainers with these settings hold after every inner step."""

    replicas: int
    fragments: list[list[str]]
    sync_every: int
    delay: int = 0
    alpha: float = 0.0
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    weights: list[float] = field(default_factory=list)
    lost: set[tuple[int, int]] = field(default_factory=set)  # (replica, round) whose contribution did not count

    def run(self, steps: int) -> list[list[dict[str, np.ndarray]]]:
        """By step, then by replica."""
        start, weights = starts(), np.array(self.weights or [1.0] * self.replicas)
        held = [{name: value.copy() for name, value in start.items()} for _ in range(self.replicas)]
        moments = [{name: (np.zeros(s), np.zeros(s)) for name, s in SHAPES.items()} for _ in range(self.replicas)]
        original = {name: value.copy() for name, value in start.items()}
        outer = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        part, local, rounds, sent, found = self.sync_every // len(self.fragments), 0, 0, {}, []
        for step in range(steps):
            for replica in range(self.replicas):
                for name, value in held[replica].items():
                    first, second = moments[replica][name]
                    gradient = pull(replica, step, name, value)
                    first[...] = BETAS[0] * first + (1 - BETAS[0]) * gradient
                    second[...] = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
                    unbiased = (m / (1 - b ** (step + 1)) for m, b in zip((first, second), BETAS, strict=True))
                    mean, square = unbiased
                    value -= RATE * mean / (np.sqrt(square) + EPS)
            local += 1
            names = self.fragments[rounds % len(self.fragments)]
            if local == part - self.delay:
                sent = {name: [original[name] - h[name] for h in held] for name in names}
            if local == part:
                counts = np.array([0.0 if (r, rounds) in self.lost else w for r, w in enumerate(weights)])
                for name in names:
                    average = np.tensordot(counts / counts.sum(), np.stack(sent[name]), 1)
                    outer[name] = self.momentum * outer[name] + average
                    update = average + self.momentum * outer[name] if self.nesterov else outer[name]
                    original[name] = original[name] - self.lr * update
                    for h in held:
                        h[name][...] = original[name] + self.alpha * (h[name] - original[name])
                local, rounds = 0, rounds + 1
            found.append([{name: value.copy() for name, value in h.items()} for h in held])
        return found


def in_threads(size: int, function: Callable[[int], Any], *, limit_s: float = 300.0) -> list[Any]:
    """`function(replica)` of each of `size` replicas at once; what they returned. AssertionError with what failed."""
    answers: dict[int, Any] = {}
    failures: list[str] = []

    def run(replica: int) -> None:
        try:
            answers[replica] = function(replica)
        except BaseException:
            failures.append(f"replica {replica}: {traceback.format_exc()}")

    threads = [threading.Thread(target=run, args=(replica,), daemon=True) for replica in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    assert not failures, "\n".join(failures)
    assert len(answers) == size, f"only replicas {sorted(answers)} of {size} are done after {limit_s} s"
    return [answers[replica] for replica in range(size)]


def same(one: dict[str, Any], other: dict[str, Any], within: float) -> bool:
    return all(np.abs(np.asarray(one[name]) - np.asarray(other[name])).max() <= within for name in one)
