"""The task stream: which problem comes when, as a pure function of the run's seed.

Seeds are permutations of 30 bits with one bit appended: even seeds train, odd seeds are held out. So no held-out
problem is ever trained, whatever the two run seeds are, and no seed repeats before 2**30 tasks.
"""

from __future__ import annotations

from mesh.messages import Task

_BITS = 30
_MASK = (1 << _BITS) - 1


class TaskStream:
    """Tasks 0, 1, 2, … of one run. The cursor is all that has to be saved.

    Replicas of a trainer deal a run's tasks out among them: task `index` of replica `r` of `n` is the run's task
    `index * n + r`, which its id tells, so that ids are unique in a run.
    """

    def __init__(self, seed: int, cursor: int = 0, replica: int = 0, replicas: int = 1) -> None:
        if cursor < 0:
            raise ValueError(f"a task stream cannot start at {cursor}; the cursor counts the tasks issued so far")
        self.seed, self.cursor = seed, cursor
        self.replica, self.replicas = replica, replicas

    def at(self, index: int) -> Task:
        """Task `index`, wherever the cursor stands."""
        number = index * self.replicas + self.replica
        return Task(id=f"t{number:06d}", index=index, seed=_permute(self.seed, number) << 1)

    def next(self) -> Task:
        task = self.at(self.cursor)
        self.cursor += 1
        return task


def held_out_seeds(count: int, seed: int = 0) -> list[int]:
    """`count` distinct environment seeds that no task stream of any run seed contains."""
    return [_permute(seed, index) << 1 | 1 for index in range(count)]


def is_held_out(seed: int) -> bool:
    """Whether an environment seed belongs to the held-out half."""
    return seed & 1 == 1


def _permute(key: int, index: int) -> int:
    """A bijection of `0 .. 2**30 - 1` for each key: odd multiplications and xor-shifts can all be undone."""
    value = (index * 0x2C9277B5 + key * 0x1B873593 + 0x3C6EF372) & _MASK
    for factor in (0x165667B1, 0x27D4EB2F):
        value ^= value >> 15
        value = (value * factor) & _MASK
    return value ^ (value >> 13)
