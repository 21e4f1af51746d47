"""Distillation that looks at the teacher's entropy H_T: two different losses under two names.

- `entropy_gated`: w KL(T||S) + (1 - w) KL(S||T), w = clamp(H_T / h_max, 0, 1). The two KLs trade places.
- `eopd` (2603.07079): KL(S||T) everywhere, plus KL(T||S) where H_T exceeds a threshold. The reverse KL never leaves.

S and T are softmax of logits divided by the temperature, H_T the entropy of T in nats.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.losses.divergence import entropy, kl_rows, log_probs


def entropy_gated_rows(
    student_logits: Tensor, teacher_logits: Tensor, *, temperature: float = 1.0, h_max: float | None = None
) -> Tensor:
    """The gated divergence at each position: (..., V), (..., V) -> (...). `h_max` in nats, None is log V."""
    limit = math.log(student_logits.shape[-1]) if h_max is None else h_max
    if not limit > 0:
        raise ValueError(f"h_max is {limit}: the entropy at which only KL(T||S) remains must be positive")
    log_s, log_t = log_probs(student_logits, temperature), log_probs(teacher_logits, temperature).detach()
    weight = (entropy(log_t) / limit).clamp(0, 1)
    return weight * kl_rows(log_t, log_s) + (1 - weight) * kl_rows(log_s, log_t)


def eopd_rows(student_logits: Tensor, teacher_logits: Tensor, *, threshold: float, temperature: float = 1.0) -> Tensor:
    """Reverse KL, plus forward KL where H_T > `threshold` (nats): (..., V), (..., V) -> (...)."""
    log_s, log_t = log_probs(student_logits, temperature), log_probs(teacher_logits, temperature).detach()
    forward = kl_rows(log_t, log_s)
    unsure = entropy(log_t) > threshold
    return kl_rows(log_s, log_t) + torch.where(unsure, forward, torch.zeros_like(forward))
