"""Which student position goes with which teacher position: by explicit index, never by shape.

The teacher reads a hint that the student does not, so the same predicted token stands at different positions on the two
sides. `student_idx` and `teacher_idx` (B, K) name the pairs; -1 on both sides is padding. A slot with an index on one
side only, or an index beyond its side's logits (a context that was cut short), is an error, or is left out aloud.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

PADDING = -1


@dataclass(slots=True)
class AlignedRows:
    """Row i of both `student` and `teacher` (N, V) predicts the same token; `slots` (N, 2) is its place in (B, K)."""

    student: Tensor
    teacher: Tensor
    slots: Tensor


def gather_aligned(
    student_logits: Tensor,
    teacher_logits: Tensor,
    student_idx: Tensor | None,
    teacher_idx: Tensor | None,
    *,
    missing: Literal["raise", "warn"] = "raise",
) -> AlignedRows:
    """The aligned rows of `student_logits` (B, T, V) and `teacher_logits` (B, T', V), in (B, K) order without padding.

    The gradient flows into the student's logits only. Missing indices (no tensor, one side only, or out of range) raise
    ValueError; with `missing="warn"` they warn and are skipped, and what is left may be no row at all: a loss over it
    is 0 with a live graph. Tensors whose batch, vocabulary or index shapes differ always raise ValueError.
    """
    _check_logits(student_logits, teacher_logits)
    if student_idx is None or teacher_idx is None:
        side = "student_idx" if student_idx is None else "teacher_idx"
        _report(f"{side} is missing: without it nothing says which positions correspond", missing)
        slots = torch.empty(0, 2, dtype=torch.long, device=student_logits.device)
        return _rows(student_logits, teacher_logits, slots, slots[:, 0], slots[:, 0])
    batch = len(student_logits)
    if student_idx.shape != teacher_idx.shape or student_idx.dim() != 2 or len(student_idx) != batch:
        raise ValueError(
            f"student_idx {tuple(student_idx.shape)} and teacher_idx {tuple(teacher_idx.shape)} must both be "
            f"({batch}, K): slot k of both names one predicted token"
        )
    student_ok = _in_range(student_idx, student_logits.shape[1])
    teacher_ok = _in_range(teacher_idx, teacher_logits.shape[1])
    padding = (student_idx == PADDING) & (teacher_idx == PADDING)
    broken = ~padding & ~(student_ok & teacher_ok)
    if broken.any():
        row, slot = broken.nonzero()[0].tolist()
        _report(
            f"{int(broken.sum())} of {int((~padding).sum())} slots lack an index on one side, the first at ({row}, "
            f"{slot}): student {int(student_idx[row, slot])} of {student_logits.shape[1]} positions, teacher "
            f"{int(teacher_idx[row, slot])} of {teacher_logits.shape[1]}",
            missing,
        )
    slots = (~padding & ~broken).nonzero()
    chosen = slots.unbind(1)
    return _rows(student_logits, teacher_logits, slots, student_idx[chosen], teacher_idx[chosen])


def _rows(student: Tensor, teacher: Tensor, slots: Tensor, student_at: Tensor, teacher_at: Tensor) -> AlignedRows:
    return AlignedRows(
        student=student.flatten(0, 1).index_select(0, slots[:, 0] * student.shape[1] + student_at),
        teacher=teacher.detach().flatten(0, 1).index_select(0, slots[:, 0] * teacher.shape[1] + teacher_at),
        slots=slots,
    )


def _in_range(index: Tensor, length: int) -> Tensor:
    return (index >= 0) & (index < length)


def _check_logits(student: Tensor, teacher: Tensor) -> None:
    fits = student.dim() == teacher.dim() == 3 and len(student) == len(teacher) and student.shape[2] == teacher.shape[2]
    if not fits:
        raise ValueError(
            f"student logits {tuple(student.shape)} and teacher logits {tuple(teacher.shape)} must be (B, T, V) and "
            "(B, T', V): the same sequences over the same vocabulary"
        )


def _report(what: str, missing: str) -> None:
    if missing == "warn":
        warnings.warn(f"alignment: {what}; skipped", stacklevel=3)
        return
    if missing == "raise":
        raise ValueError(f"alignment: {what}. Pass indices for every slot, or missing='warn' to skip them")
    raise ValueError(f"unknown choice missing={missing!r}: use 'raise' or 'warn'")
