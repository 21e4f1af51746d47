"""Losses on a language model's output head that never hold more than a chunk of its logits.

The logits of a batch, (T, V), are the largest tensor of a training step by far: 16,384 tokens of a vocabulary of
152,000 are 10 GB in float32, and as much again for their gradient. Here the head's projection is part of the loss. Each
chunk of rows is projected, used and forgotten:

- `linear_logprobs`: log p(label) per row. Backward projects each chunk again.
- `linear_distillation`: a divergence from rows that arrive piece by piece. The gradient is computed while a chunk's
  teacher rows are at hand, so that nobody reads them twice; backward only scales it.

Projections run in the weights' dtype, everything after them in float32. Weight gradients are summed up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from services.losses.divergence import check_temperature
from services.losses.reduction import LossResult, at_least_float32

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Head:
    """A language model's output head: `logits = cap(scale * (hidden @ weight.T + bias))`, `cap(x) = c tanh(x / c)`."""

    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0
    softcap: float | None = None

    def project(self, hidden: Tensor) -> Tensor:
        """(n, H) -> (n, V), in the weights' dtype, before scale and cap."""
        return torch.nn.functional.linear(hidden, self.weight, self.bias)

    def shape(self, projected: Tensor) -> Tensor:
        """Scale and cap of `project`'s result, in float32 (float64 stays)."""
        logits = at_least_float32(projected)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, H) -> (n, V) float32 (float64 for float64 weights)."""
        return self.shape(self.project(hidden))

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def linear_logprobs(
    hidden: Tensor, head: Head, labels: Tensor, *, temperature: float = 1.0, chunk: int = 512
) -> Tensor:
    """log softmax(head.logits(hidden) / temperature) at `labels`, row by row.

    `hidden` (N, H), `labels` (N,) int64 -> (N,) float32 (float64 for float64 weights). The gradient flows into `hidden`
    and the head. At most a few (chunk, V) float32 blocks are alive at a time. Raises ValueError for shapes that do not
    fit, a temperature that is not positive, or a chunk below 1.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(f"linear_logprobs: hidden {tuple(hidden.shape)} and labels {tuple(labels.shape)} are not rows")
    check_temperature(temperature)
    _check_chunk(chunk)
    return _LinearLogprobs.apply(hidden, head.weight, head.bias, labels, head.scale, head.softcap, temperature, chunk)


def linear_distillation(
    hidden: Tensor,
    head: Head,
    read: Callable[[int], T | None],
    loss: Callable[[Tensor, T], LossResult],
    *,
    chunk: int = 512,
) -> LossResult | None:
    """Sum of `loss(logits of a chunk, what the teacher said of it)` over the chunks of `hidden` (N, H), in order.

    `read(n)` gives the teacher's side of the next n rows, in whatever form `loss` understands, or None when it cannot
    be had: then nothing more is read and the result is None. `loss` is called once per chunk with student logits (n, V)
    float32 and must be normalized over the whole step, so that chunks add up. Metrics are means over the counts.
    No row gives 0 with a live graph.
    """
    _check_chunk(chunk)
    wanted = (
        [tensor for tensor in (hidden, *head.parameters) if tensor.requires_grad] if torch.is_grad_enabled() else []
    )
    gradients = [torch.zeros_like(tensor, dtype=_wide(tensor)) for tensor in wanted]
    found: list[LossResult] = []
    for rows in _slices(len(hidden), chunk):
        teacher = read(rows.stop - rows.start)
        if teacher is None:
            return None
        found.append(_distill(hidden.detach()[rows], head, teacher, loss, rows, wanted, gradients, hidden))
    if not found:
        return LossResult(live_zero(hidden, head), count=hidden.new_zeros((), dtype=torch.long))
    total, counts = torch.stack([r.loss for r in found]).sum(), torch.stack([r.count for r in found])
    metrics = {
        name: (torch.stack([r.metrics[name] for r in found]) * counts).sum() / counts.sum().clamp(min=1)
        for name in found[0].metrics
    }
    gradients = [g.to(tensor.dtype) for g, tensor in zip(gradients, wanted, strict=True)]
    return LossResult(_WithGradient.apply(total, len(wanted), *wanted, *gradients), count=counts.sum(), metrics=metrics)


def live_zero(hidden: Tensor, head: Head) -> Tensor:
    """A float32 0 whose gradient is 0 for `hidden` and the head: both get one, as they do from any other loss."""
    zero = hidden[:0].sum().float()
    for parameter in head.parameters:
        zero = zero + parameter[:0].sum().float()
    return zero


def _distill(
    part: Tensor,
    head: Head,
    teacher: T,
    loss: Callable[[Tensor, T], LossResult],
    rows: slice,
    wanted: list[Tensor],
    gradients: list[Tensor],
    hidden: Tensor,
) -> LossResult:
    """One chunk: its loss, detached; its share of the gradient is added to `gradients`, one per tensor of `wanted`."""
    with torch.no_grad():
        projected = head.project(part)
    projected.requires_grad_(bool(wanted))
    with torch.set_grad_enabled(bool(wanted)):
        # A view, because a loss that writes its gradient over the logits must not be given a leaf.
        result = loss(head.shape(projected.view_as(projected)), teacher)
    if wanted:
        (upstream,) = torch.autograd.grad(result.loss, projected)
        for tensor, gradient in zip(wanted, gradients, strict=True):
            if tensor is hidden:
                gradient[rows] = (upstream @ head.weight.detach()).to(gradient)
            elif tensor is head.weight:
                gradient.addmm_(upstream.t().to(gradient), part.to(gradient))
            else:
                gradient += upstream.to(gradient).sum(0)
    return LossResult(result.loss.detach(), result.count, result.metrics)


class _WithGradient(torch.autograd.Function):
    """A value whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, number: int, *tensors_and_gradients: Tensor) -> Tensor:
        ctx.number = number
        ctx.save_for_backward(*tensors_and_gradients[number:])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(g * upstream.to(g) for g in ctx.saved_tensors), *([None] * ctx.number)


class _LinearLogprobs(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z): the gradient of log p(label) in z is onehot(label) - p."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: float,
        softcap: float | None,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        head = Head(weight, bias, scale, softcap)
        values = hidden.new_empty(len(hidden), dtype=_wide(weight))
        # Each row's maximum, and log sum exp of the row minus it: apart, because their sum would round at the
        # maximum's size. Backward need not find them again.
        norms = hidden.new_empty(len(hidden), 2, dtype=_wide(weight))
        for rows in _slices(len(hidden), chunk):
            z = head.logits(hidden[rows]).div_(temperature)
            norms[rows, 0] = z.amax(1)
            z.sub_(norms[rows, :1])
            values[rows] = z.gather(1, labels[rows, None]).squeeze(1)
            norms[rows, 1] = z.exp_().sum(1).log_()  # in place: a chunk of logits is the largest thing in memory
        values -= norms[:, 1]
        ctx.save_for_backward(hidden, weight, bias, labels, norms)
        ctx.settings = scale, softcap, temperature, chunk
        return values

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, norms = ctx.saved_tensors
        scale, softcap, temperature, chunk = ctx.settings
        head = Head(weight, bias, scale, softcap)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight)) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=_wide(bias)) if for_bias and bias is not None else None
        for rows in _slices(len(hidden), chunk):
            logits = head.logits(hidden[rows])
            slope = None if softcap is None else (logits / softcap).square_().neg_().add_(1)
            z = logits.div_(temperature).sub_(norms[rows, :1])
            block = z.sub_(norms[rows, 1:]).exp_().mul_(-upstream[rows, None])
            block.scatter_add_(1, labels[rows, None], upstream[rows, None].to(block))
            block.mul_(scale / temperature)
            if slope is not None:
                block.mul_(slope)
            narrow = block.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = narrow @ weight
            if grad_weight is not None:
                grad_weight.addmm_(narrow.t().to(grad_weight), hidden[rows].to(grad_weight))
            if grad_bias is not None:
                grad_bias += block.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *([None] * 5),
        )


def _slices(length: int, chunk: int) -> Iterator[slice]:
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _check_chunk(chunk: int) -> None:
    if chunk < 1:
        raise ValueError(f"the chunk is {chunk} rows: give a positive number (trainer.logits_chunk)")
