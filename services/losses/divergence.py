"""Generalized Jensen-Shannon divergence between student and teacher, in its plain form.

This is the readable definition that `chunked.chunked_jsd` is tested against, and what small vocabularies use. S and T
are log-softmax of student and teacher logits after both were divided by the temperature, in float32 whatever the
model's dtype:

    0 < beta < 1:  M = log((1 - beta) exp S + beta exp T);  D = beta KL(T||M) + (1 - beta) KL(S||M)
    beta = 0:      KL(T||S), forward       beta = 1:  KL(S||T), reverse

The interior tends to 0 at both ends while the ends do not: the jump is part of the definition. There is no tau^2
factor. Source: Agarwal et al., "On-Policy Distillation of Language Models" (2306.13649).
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Literal

import torch
from torch import Tensor

from services.losses.reduction import at_least_float32, normalized

IGNORE_INDEX = -100
LOG_FLOOR = -1e30  # stands for log 0: exp of it is 0, and 0 * (floor - floor) is 0 where infinities would give NaN

Reduction = Literal["batchmean", "sum", "mean", "none"]


def generalized_jsd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    labels: Tensor | None = None,
    token_clip: float | None = None,
    reduction: Reduction = "batchmean",
) -> Tensor:
    """The divergence over aligned logits (B, T, V) (or (N, V)), reduced as named; no gradient to the teacher.

    `labels` (B, T), aligned with the logits: positions equal to -100 are in no sum and no count. `token_clip` clamps
    each token's divergence from above, after the sum over the vocabulary. Reductions: "batchmean" is the sum over
    valid tokens / their number, or / batch size without labels; "sum"; "mean" is over valid tokens; "none" is (B, T),
    0 where not valid. No valid token gives 0 with a live graph. Raises ValueError on shapes that differ, beta outside
    [0, 1], or an unknown reduction.
    """
    tokens = jsd_rows(student_logits, teacher_logits, beta=beta, temperature=temperature)
    if token_clip is not None:
        tokens = tokens.clamp(max=token_clip)
    valid = torch.ones_like(tokens, dtype=torch.bool) if labels is None else labels != IGNORE_INDEX
    if valid.shape != tokens.shape:
        raise ValueError(f"generalized_jsd: labels {tuple(valid.shape)} must be {tuple(tokens.shape)}, like the logits")
    tokens = torch.where(valid, tokens, torch.zeros_like(tokens))
    if reduction == "none":
        return tokens
    if reduction == "sum":
        return tokens.sum()
    if reduction == "mean":
        return normalized(tokens.sum(), valid.sum())
    if reduction == "batchmean":
        return normalized(tokens.sum(), len(tokens) if labels is None else valid.sum())
    raise ValueError(f"unknown reduction {reduction!r}: use batchmean, sum, mean or none")


def jsd_rows(student_logits: Tensor, teacher_logits: Tensor, *, beta: float, temperature: float = 1.0) -> Tensor:
    """The divergence at each position: (..., V), (..., V) -> (...), float32 (float64 for float64 logits)."""
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student {tuple(student_logits.shape)} and teacher {tuple(teacher_logits.shape)} logits differ: gather "
            "the aligned positions on both sides (alignment.gather_aligned), over the same vocabulary"
        )
    return divergence(log_probs(student_logits, temperature), log_probs(teacher_logits, temperature).detach(), beta)


def divergence(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """Generalized JSD of two normalised log-distributions (..., V) -> (...). ValueError for beta outside [0, 1]."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}: it must be in [0, 1] (0 = forward KL, 1 = reverse KL)")
    warn_near_the_ends(beta)
    if beta == 0:
        return kl_rows(log_t, log_s)
    if beta == 1:
        return kl_rows(log_s, log_t)
    log_m = torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))
    return beta * (log_t.exp() * (log_t - log_m)).sum(-1) + (1 - beta) * (log_s.exp() * (log_s - log_m)).sum(-1)


def kl_rows(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) over the last dimension, computed as sum of p (log p - log q) - p + q.

    The added terms sum to 0, with zero gradient. Each summand is then non-negative, and an error in either normaliser
    cancels to first order: without them a divergence near 0 can come out below -1e-6 on a large vocabulary.
    """
    p = log_p.exp()
    return (p * (log_p - log_q) - p + log_q.exp()).sum(-1)


def log_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """log-softmax of `logits / temperature` over the last dimension in float32 (float64 stays), -inf made finite."""
    check_temperature(temperature)
    return torch.log_softmax(at_least_float32(logits) / temperature, dim=-1).clamp(min=LOG_FLOOR)


def entropy(log_p: Tensor) -> Tensor:
    """Entropy in nats of log-distributions (..., V) -> (...)."""
    return -(log_p.exp() * log_p).sum(-1)


def check_temperature(temperature: float) -> None:
    """ValueError unless the temperature is positive and finite."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}: it divides logits and must be positive and finite")


@functools.cache
def warn_near_the_ends(beta: float) -> None:
    """Warn, once per beta, that the interior vanishes where somebody may have meant the end itself."""
    if 0 < beta < 0.01 or 0.99 < beta < 1:
        end = 0 if beta < 0.5 else 1
        warnings.warn(
            f"generalized JSD with beta = {beta} is nearly 0 everywhere; beta = {end} is the "
            f"{'forward' if end == 0 else 'reverse'} KL and is not its limit. Set beta = {end} if you meant that.",
            stacklevel=3,
        )
