"""The staleness rule: the one place that says how old a rollout may be, and who may produce one.

Weights are versioned by optimizer steps: batch `b` is trained by step `b`, whose weights are version `b`. A rollout's
age counts from the *oldest* weights that sampled one of its tokens, so the time that it waited in a queue, and the time
that its episode took, are both inside it.
"""

from __future__ import annotations


def staleness(now: int, oldest: int) -> int:
    """Optimizer steps between the weights that train a rollout and the oldest that sampled one of its tokens.

    `now` is the trainer's version when the rollout is trained. ValueError when `oldest` is newer than `now`.
    """
    if oldest > now:
        raise ValueError(
            f"a rollout sampled by version {oldest} cannot be trained at version {now}: its weights do not exist yet; "
            "rewind the buffer to the trainer's step before training goes on"
        )
    return now - oldest


def admissible(now: int, oldest: int, max_staleness: int) -> bool:
    """Whether a rollout whose oldest token comes from version `oldest` may be trained at version `now`."""
    return staleness(now, oldest) <= max_staleness


def predicted_batch(next_batch: int, groups_ahead: int, groups_per_batch: int) -> int:
    """The batch that will train a group which has `groups_ahead` unfinished or waiting groups before it."""
    return next_batch + groups_ahead // groups_per_batch


def lease_admissible(
    version: int, next_batch: int, groups_ahead: int, groups_per_batch: int, max_staleness: int
) -> bool:
    """Whether a generator with weights `version` may start a member of a group now.

    It may when the batch that will train the group is still within the bound. This is what limits over-production: a
    generator runs at most `max_staleness` batches ahead, and with `max_staleness=0` generation and training alternate.
    Weights newer than the next batch belong to a history that was rewound; they may start nothing.
    """
    if version > next_batch:
        return False
    return admissible(predicted_batch(next_batch, groups_ahead, groups_per_batch), version, max_staleness)
