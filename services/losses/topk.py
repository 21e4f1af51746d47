"""Generalized JSD on k tokens of the vocabulary, for teachers whose full logits are too much to move or keep.

The support is named, because the choices are different losses. A KL over a cut vocabulary that is neither renormalised
nor closed with a tail bucket can be negative; that form does not exist here.

- support="teacher": the teacher's k likeliest tokens, both sides renormalised over them (OPSD); or, with `tail=True`,
  plus one bucket for all other tokens, which the student is then taught the mass of.
- support="student": the student's k likeliest tokens plus one bucket for the rest (SDPO); or renormalised with
  `tail=False`.

With a bucket the divergence is that of two distributions over k + 1 outcomes: never negative, and never more than the
divergence over the whole vocabulary. `TopKRows` is what a teacher's support needs of the teacher, and all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from services.losses.divergence import LOG_FLOOR, check_temperature, divergence
from services.losses.reduction import at_least_float32

Support = Literal["teacher", "student"]


@dataclass(frozen=True, slots=True)
class TopKRows:
    """A teacher's k likeliest tokens at each of n positions, and what all other tokens have together.

    `values` (n, k), any float dtype: log-probabilities at the temperature that they were made at. `indices` (n, k),
    integer. `tail` (n,), float: log of the other tokens' mass, about -1e30 where there is none.
    """

    values: Tensor
    indices: Tensor
    tail: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> TopKRows:
        return TopKRows(self.values[rows], self.indices[rows], self.tail[rows])

    def to(self, device: torch.device | str) -> TopKRows:
        return TopKRows(self.values.to(device), self.indices.to(device), self.tail.to(device))

    def clone(self) -> TopKRows:
        return TopKRows(self.values.clone(), self.indices.clone(), self.tail.clone())

    @property
    def k(self) -> int:
        return self.values.shape[1]


def cat_rows(parts: Sequence[Tensor | TopKRows]) -> Tensor | TopKRows:
    """Rows of one form, (n, V) or top-k, one after the other; a copy."""
    whole = [part for part in parts if isinstance(part, Tensor)]
    if whole:
        return torch.cat(whole)
    cut = [part for part in parts if isinstance(part, TopKRows)]
    return TopKRows(*(torch.cat([getattr(part, name) for part in cut]) for name in ("values", "indices", "tail")))


def top_k_rows(logits: Tensor, k: int) -> TopKRows:
    """The k likeliest tokens of each row (n, V), the likeliest first; a `k` above V is V. ValueError for k < 1."""
    if k < 1:
        raise ValueError(f"top_k is {k}: a row keeps at least its likeliest token")
    logits = at_least_float32(logits).detach()
    values, indices = logits.topk(min(k, logits.shape[-1]), dim=-1)
    rest = _rest(logits, indices)
    log_norm = torch.logaddexp(values.logsumexp(-1, keepdim=True), rest)
    return TopKRows(values - log_norm, indices, (rest - log_norm).squeeze(-1))


def topk_rows_jsd(
    student_logits: Tensor, teacher: TopKRows, *, beta: float, tail: bool, temperature: float = 1.0
) -> Tensor:
    """The divergence at each position on the teacher's support: (n, V), `TopKRows` -> (n,), float32 or float64.

    Both sides are renormalised over the k tokens, or with `tail` closed with a bucket of all others. Temperature
    divides both sides; a bucket's mass holds at the temperature that it was made at only, so `tail` wants 1. ValueError
    otherwise, and for rows that do not fit.
    """
    check_temperature(temperature)
    if len(student_logits) != len(teacher) or student_logits.dim() != 2:
        raise ValueError(
            f"top-k rows: {len(teacher)} of the teacher do not fit student logits {tuple(student_logits.shape)}: "
            "gather the aligned rows (N, V)"
        )
    if tail and temperature != 1:
        raise ValueError(
            f"the teacher's tail was summed at temperature 1, not {temperature}: set temperature = 1, tail = false, or "
            "use whole rows"
        )
    student = at_least_float32(student_logits) / temperature
    values = at_least_float32(teacher.values).detach() / temperature
    with_tail = tail and teacher.k < student.shape[-1]
    if with_tail:
        values = torch.cat([values, teacher.tail[:, None].to(values)], dim=-1)
    log_t = torch.log_softmax(values, dim=-1).clamp(min=LOG_FLOOR)
    return divergence(_on_support(student, teacher.indices.long(), with_tail), log_t, beta)


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
    """The divergence at each position over the named support: (n, V), (n, V) -> (n,), float32 or float64.

    `tail` None is the support's own form: bucket for "student", renormalised for "teacher". A `top_k` above V is V.
    Raises ValueError for `top_k < 1` or an unknown support.
    """
    check_support(support, top_k)
    check_temperature(temperature)
    student = at_least_float32(student_logits) / temperature
    teacher = at_least_float32(teacher_logits).detach() / temperature
    if support == "teacher":
        return topk_rows_jsd(student, top_k_rows(teacher, top_k), beta=beta, tail=bool(tail))
    tokens = student.detach().topk(min(top_k, student.shape[-1]), dim=-1).indices
    with_tail = tail is not False and tokens.shape[-1] < student.shape[-1]
    log_s, log_t = (_on_support(logits, tokens, with_tail) for logits in (student, teacher))
    return divergence(log_s, log_t, beta)


def check_support(support: str, top_k: int | None) -> None:
    """ValueError that says what to set when support and top_k do not go together."""
    if support not in ("teacher", "student"):
        raise ValueError(f"unknown top-k support {support!r}: use 'teacher' or 'student'")
    if top_k is None or top_k < 1:
        raise ValueError(f"support {support!r} needs top_k >= 1 (it is {top_k}): set top_k, or support = 'full'")


def _on_support(logits: Tensor, tokens: Tensor, with_tail: bool) -> Tensor:
    """Normalised log-probabilities (n, k), or (n, k + 1) with the bucket of all other tokens last."""
    chosen = logits.gather(-1, tokens)
    if with_tail:
        chosen = torch.cat([chosen, _rest(logits, tokens)], dim=-1)
    return torch.log_softmax(chosen, dim=-1).clamp(min=LOG_FLOOR)


def _rest(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log of the summed exponentials of all tokens but these (n, 1): finite, so that its gradient is, too.

    Not log1p(-kept): a kept mass near 1 leaves nothing of the rest in float32.
    """
    return logits.scatter(-1, tokens, LOG_FLOOR).logsumexp(-1, keepdim=True)
