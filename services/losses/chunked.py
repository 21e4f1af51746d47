"""Losses over rows of logits that never hold more than a chunk of them in float32.

The logits of one step can be gigabytes ((2048, 151936) float32 is 1.2 GB) and plain autograd keeps several float32
copies: log-softmax, exponentials, products. Here forward works chunk by chunk and keeps a few numbers per row; backward
computes each chunk again and writes its gradient into place. What remains is the gradient itself, in the logits' dtype,
and with `reuse_rows` not even that: it overwrites the logits, which must then be nobody else's (rows gathered for this
loss are). Autograd's version counter turns a later use of overwritten logits into an error.

`chunked_rows` does this for any row-wise function; `chunked_jsd` has the gradient in closed form and also cuts the
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from services.losses.divergence import LOG_FLOOR, check_temperature, warn_near_the_ends

RowFunction = Callable[..., Tensor]


def chunked_rows(
    function: RowFunction,
    student: Tensor,
    teacher: Tensor | Sequence[Tensor],
    token_chunk: int,
    *,
    reuse_rows: bool = False,
) -> Tensor:
    """`function(student, *teacher)` for a row-wise function, with `token_chunk` rows in work at a time.

    `student` (N, V) gets the gradient; `teacher`, one tensor or several (N, ...), does not. `function` maps n rows of
    each to (n,).
    """
    teachers = [each.detach() for each in ((teacher,) if isinstance(teacher, Tensor) else teacher)]
    _check(student, teachers, token_chunk, reuse_rows)
    return _ChunkedRows.apply(student, function, token_chunk, reuse_rows, *teachers)


def chunked_jsd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    token_chunk: int = 128,
    vocab_chunk: int = 8192,
    reuse_rows: bool = False,
) -> Tensor:
    """Generalized Jensen-Shannon divergence per row, as `divergence.jsd_rows` has it, in chunks.

    `student_logits`, `teacher_logits` (N, V), each of any floating dtype -> (N,) float32 (float64 for float64 logits).
    At most a few float32 blocks of `token_chunk` x `vocab_chunk` are alive at a time.
    """
    _check(student_logits, [teacher_logits], token_chunk, reuse_rows)
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"chunked_jsd: student {tuple(student_logits.shape)} and teacher {tuple(teacher_logits.shape)} logits "
            "differ: gather the aligned rows on both sides, over the same vocabulary"
        )
    if not 0 <= beta <= 1 or vocab_chunk < 1:
        raise ValueError(f"chunked_jsd: beta {beta} must be in [0, 1] and vocab_chunk {vocab_chunk} positive")
    check_temperature(temperature)
    warn_near_the_ends(beta)
    return _ChunkedJSD.apply(
        student_logits, teacher_logits.detach(), beta, temperature, token_chunk, vocab_chunk, reuse_rows
    )


def _check(student: Tensor, teachers: Sequence[Tensor], token_chunk: int, reuse_rows: bool) -> None:
    if student.dim() != 2 or any(each.dim() == 0 or len(each) != len(student) for each in teachers):
        raise ValueError(
            f"chunked losses take rows: student {tuple(student.shape)} must be two-dimensional and teacher "
            f"{[tuple(each.shape) for each in teachers]} have the same number of rows"
        )
    if token_chunk < 1:
        raise ValueError(f"token_chunk is {token_chunk}: give a positive number of rows")
    if reuse_rows and student.is_leaf and student.requires_grad:
        raise ValueError("reuse_rows overwrites the student's logits, which are a leaf here: pass gathered rows")


def _slices(length: int, chunk: int) -> Iterator[slice]:
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))


def _wide(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


class _ChunkedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, function: RowFunction, token_chunk: int, reuse_rows: bool, *teachers: Tensor
    ) -> Tensor:
        values = student.new_empty(len(student), dtype=_wide(student))
        for rows in _slices(len(student), token_chunk):
            values[rows] = function(student[rows], *(each[rows] for each in teachers))
        ctx.save_for_backward(student, *teachers)
        ctx.function, ctx.token_chunk, ctx.reuse_rows = function, token_chunk, reuse_rows
        return values

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        student, *teachers = ctx.saved_tensors
        grad = student.detach() if ctx.reuse_rows else torch.empty_like(student)
        for rows in _slices(len(student), ctx.token_chunk):
            with torch.enable_grad():
                part = student[rows].detach().requires_grad_()
                values = ctx.function(part, *(each[rows] for each in teachers))
            # The chunk's graph is used up before its rows may be overwritten.
            (part_grad,) = torch.autograd.grad(values, part, upstream[rows].to(values))
            grad[rows] = part_grad
        return grad, None, None, None, *([None] * len(teachers))


class _ChunkedJSD(torch.autograd.Function):
    """With p = softmax of the student's scaled logits z, the gradients of one row, all of which sum to zero over v:

    beta = 0, KL(T||S):  p - t
    beta = 1, KL(S||T):  p (S - T - KL(S||T))
    between:             (1 - beta) p (S - M - KL(S||M))
    """

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        beta: float,
        temperature: float,
        token_chunk: int,
        vocab_chunk: int,
        reuse_rows: bool,
    ) -> Tensor:
        dtype = _wide(student, teacher)
        student_norm = _log_normalizers(student, dtype, temperature, token_chunk, vocab_chunk)
        teacher_norm = _log_normalizers(teacher, dtype, temperature, token_chunk, vocab_chunk)
        divergence = student.new_zeros(len(student), dtype=dtype)
        center = torch.zeros_like(divergence)  # KL(S||T) or KL(S||M): backward subtracts it
        for rows in _slices(len(student), token_chunk):
            for columns in _slices(student.shape[1], vocab_chunk):
                log_s = _log_probs(student, student_norm, rows, columns, temperature)
                log_t = _log_probs(teacher, teacher_norm, rows, columns, temperature)
                if beta == 0:
                    # + (s - t) sums to 0 and makes each term non-negative: see divergence.kl_rows.
                    t = log_t.exp()
                    divergence[rows] += t.mul(log_t.sub_(log_s)).sub_(t).add_(log_s.exp_()).sum(1)
                elif beta == 1:
                    s = log_s.exp()
                    term = s.mul(log_s.sub_(log_t))
                    center[rows] += term.sum(1)
                    divergence[rows] += term.sub_(s).add_(log_t.exp_()).sum(1)
                else:
                    log_m = torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))
                    student_part = log_s.exp().mul_(log_s.sub_(log_m)).sum(1)
                    teacher_part = log_t.exp().mul_(log_t.sub_(log_m)).sum(1)
                    center[rows] += student_part
                    divergence[rows] += beta * teacher_part + (1 - beta) * student_part
        ctx.save_for_backward(student, teacher, student_norm, teacher_norm, center)
        ctx.beta, ctx.temperature, ctx.chunks, ctx.reuse_rows = (
            beta,
            temperature,
            (token_chunk, vocab_chunk),
            reuse_rows,
        )
        return divergence

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, student_norm, teacher_norm, center = ctx.saved_tensors
        beta, (token_chunk, vocab_chunk) = ctx.beta, ctx.chunks
        scale = (upstream / ctx.temperature)[:, None]
        grad = student.detach() if ctx.reuse_rows else torch.empty_like(student)
        for rows in _slices(len(student), token_chunk):
            for columns in _slices(student.shape[1], vocab_chunk):
                log_s = _log_probs(student, student_norm, rows, columns, ctx.temperature)
                log_t = _log_probs(teacher, teacher_norm, rows, columns, ctx.temperature)
                s = log_s.exp()
                if beta == 0:
                    block = s.sub_(log_t.exp_())
                elif beta == 1:
                    block = s.mul_(log_s.sub_(log_t).sub_(center[rows, None]))
                else:
                    log_m = torch.logaddexp(log_s + math.log1p(-beta), log_t.add_(math.log(beta)))
                    block = s.mul_(log_s.sub_(log_m).sub_(center[rows, None])).mul_(1 - beta)
                grad[rows, columns] = block.mul_(scale[rows])
        return grad, None, None, None, None, None, None


def _log_normalizers(
    logits: Tensor, dtype: torch.dtype, temperature: float, token_chunk: int, vocab_chunk: int
) -> Tensor:
    """(N, 2): each row's maximum after scaling, and log sum exp of the row minus it.

    Kept apart: their sum would round at the size of the maximum, which is enough to make a divergence negative.
    """
    norm = logits.new_zeros(len(logits), 2, dtype=dtype)
    for rows in _slices(len(logits), token_chunk):
        norm[rows, 0] = logits[rows].amax(1).to(dtype) / temperature
        for columns in _slices(logits.shape[1], vocab_chunk):
            norm[rows, 1] += _log_probs(logits, norm, rows, columns, temperature, shift=False).exp_().sum(1)
    norm[:, 1].log_()
    return norm


def _log_probs(
    logits: Tensor, norm: Tensor, rows: slice, columns: slice, temperature: float, *, shift: bool = True
) -> Tensor:
    """One block of log-softmax, freshly allocated; without `shift` only the row's maximum is taken off."""
    block = logits[rows, columns].to(norm.dtype, copy=True).div_(temperature).sub_(norm[rows, :1])
    return (block.sub_(norm[rows, 1:]) if shift else block).clamp_(min=LOG_FLOOR)
