"""Generalized JSD on k tokens of the vocabulary, for teachers whose full logits are too much to move or keep.

The support is named, because the two choices are different losses. A KL over a cut vocabulary that is neither
renormalised nor closed with a tail bucket can be negative; that form does not exist here.

- support="teacher": the teacher's k likeliest tokens, both sides renormalised over them (OPSD).
- support="student": the student's k likeliest tokens plus one bucket for the rest, of log-mass log1p(-sum) (SDPO); or
  renormalised with `tail=False`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from services.losses.divergence import check_temperature, divergence
from services.losses.reduction import at_least_float32

Support = Literal["teacher", "student"]


def topk_jsd_rows(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float,
    top_k: int,
    support: Support,
    tail: bool | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """The divergence at each position over the named support: (..., V), (..., V) -> (...), float32 or float64.

    `tail` None is the support's own form: bucket for "student", renormalised for "teacher". A `top_k` above V is V.
    Raises ValueError for `top_k < 1`, an unknown support, or a tail bucket on the teacher's support.
    """
    check_support(support, top_k, tail)
    check_temperature(temperature)
    with_tail = support == "student" if tail is None else tail
    student = at_least_float32(student_logits) / temperature
    teacher = at_least_float32(teacher_logits).detach() / temperature
    chooser = teacher if support == "teacher" else student.detach()
    tokens = chooser.topk(min(top_k, chooser.shape[-1]), dim=-1).indices
    log_s, log_t = (_on_support(logits, tokens, with_tail) for logits in (student, teacher))
    return divergence(log_s, log_t, beta)


def check_support(support: str, top_k: int | None, tail: bool | None) -> None:
    """ValueError that says what to set when support, top_k and tail do not go together."""
    if support not in ("teacher", "student"):
        raise ValueError(f"unknown top-k support {support!r}: use 'teacher' or 'student'")
    if top_k is None or top_k < 1:
        raise ValueError(f"support {support!r} needs top_k >= 1 (it is {top_k}): set top_k, or support = 'full'")
    if support == "teacher" and tail:
        raise ValueError("the teacher's support is renormalised: set tail = false, or support = 'student'")


def _on_support(logits: Tensor, tokens: Tensor, with_tail: bool) -> Tensor:
    """Normalised log-probabilities (..., k), or (..., k + 1) with the bucket of all other tokens last."""
    chosen = logits.gather(-1, tokens)
    if not with_tail:
        return torch.log_softmax(chosen, dim=-1)
    log_p = chosen - logits.logsumexp(-1, keepdim=True)
    # The kept mass can round to 1 or just above it; the bucket then holds the smallest mass that float can tell from 0.
    kept = log_p.exp().sum(-1, keepdim=True).clamp(max=1 - torch.finfo(log_p.dtype).eps)
    return torch.cat([log_p, torch.log1p(-kept)], dim=-1)
