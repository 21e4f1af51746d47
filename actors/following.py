"""Who belongs to whom where there are several trainers.

Replica `r` is trainer `r` and its own rollout buffer. A generator follows one trainer: it holds that trainer's weights
and plays for that trainer's buffer. While its own trainer is gone it follows another, so that nobody idles; when its
own is back, it returns, because that trainer would have nobody else.
"""

from __future__ import annotations

from collections.abc import Collection

TRAINER, BUFFER = "trainer", "rollout-buffer"


def trainer_name(replica: int) -> str:
    return f"{TRAINER}-{replica}"


def buffer_name(replica: int) -> str:
    return f"{BUFFER}-{replica}"


def buffer_of(trainer: str) -> str:
    """The rollout buffer of a trainer, by name."""
    return buffer_name(number_in(trainer))


def number_in(name: str) -> int:
    """`generator-3` is the third, counted from 0."""
    return int(name.rpartition("-")[2])


def followed(number: int, replicas: int, living: Collection[str]) -> str:
    """The trainer that follower `number` follows, of `replicas`, where those in `living` can be followed now.

    Its own while it lives or nobody does.
    """
    own = trainer_name(number % replicas)
    if own in living or not living:
        return own
    others = sorted(living, key=number_in)
    return others[(number // replicas) % len(others)]
