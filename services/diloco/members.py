"""What members of a quorum tell each other besides their tensors: weights, histories, and that all have the average.

Each is a tiny all-reduce over torchft's manager, which notes errors instead of raising them: `inner.errored()` tells.
"""

from __future__ import annotations

import secrets
from collections import Counter

import torch
from torch import Tensor
from torchft.manager import Manager


def introduce(inner: Manager, weight: float, history: int) -> tuple[float, list[int]]:
    """Returns the factor that makes a plain mean of contributions the weighted one, and all members' histories.

    sum_r(weight_r x t_r) / sum_r(weight_r) is the mean over r of t_r x weight_r / mean weight. Where nobody has a
    weight it is the plain mean.
    """
    members, rank = inner.num_participants(), inner.participating_rank()
    assert rank is not None
    row = torch.zeros(1 + members, dtype=torch.float64)  # holds integers below 2^53 exactly
    row[0], row[1 + rank] = weight, history
    inner.allreduce(row).wait()
    mean = row[0].item()
    return weight / mean if mean > 0 else 1.0, [round(value * members) for value in row[1:].tolist()]


def prevailing(histories: list[int]) -> int:
    """The history of most members; of those with equally many, the first member's."""
    counts = Counter(histories)
    return max(histories, key=lambda each: counts[each])


def exchange(inner: Manager, tensor: Tensor, factor: float) -> int:
    """Average the members' tensors in place; returns the history of those that took part, the same for all of them.

    After an error the group is left, so that its sockets close and its members need not wait.
    """
    if factor != 1:
        tensor.mul_(factor)
    inner.allreduce(tensor).wait()
    # Only who has the average votes. Without the vote one survivor of a death could commit while another cannot.
    vote = torch.tensor([1, secrets.randbelow(2**40)], dtype=torch.float64)
    inner.allreduce(vote).wait()
    if inner.errored() is None and vote[0] != 1:
        inner.report_error(RuntimeError("the gloo group is not that of the quorum"))
    if inner.errored() is not None:
        leave(inner)
    return round(vote[1].item() * inner.num_participants())


def leave(inner: Manager) -> None:
    """Close the sockets of the manager's group, so that members that wait in it fail at once."""
    error = inner.errored()
    if error is not None:
        inner.report_error(RuntimeError(str(error.original_exception)))  # without its traceback, which holds the group
    inner._pg.abort(errored=False)


def told(inner: Manager) -> str:
    """What went wrong in the sync."""
    error = inner.errored()
    return "too few replicas" if error is None else str(error.original_exception)
