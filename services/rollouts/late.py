"""Late results: which rollouts wait for teachers, and the preference pairs that came back for a following batch.

Part of the buffer's state: it changes only by `apply`-ed events. A rollout stays here for its teachers also when its
group was dropped as too old for the policy gradient: what a teacher prefers is still valid preference data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mesh.messages import PreferencePair, Rollout
from services.rollouts.events import LatePair, PairsWaiting, ReplayEntry, ReplayState


class LateResults:
    def __init__(self) -> None:
        self.entries: dict[str, ReplayEntry] = {}  # by rollout id
        self.pairs: list[LatePair] = []  # waiting for a batch, the oldest arrival first

    @property
    def waiting(self) -> list[ReplayEntry]:
        return [entry for entry in self.entries.values() if entry.state == "waiting"]

    def deliver(self, rollout: Rollout, replay: bool) -> None:
        """A rollout was accepted. One whose task is generated for the second time is not asked about twice."""
        known = self.entries.get(rollout.id)
        if known is not None and known.state == "done":
            return
        state: ReplayState = "waiting" if replay else "none"
        kept = rollout if replay else None
        self.entries[rollout.id] = ReplayEntry(rollout.id, rollout.oldest_version or 0, state, kept)

    def lend(self, rollout_id: str) -> None:
        self.entries[rollout_id].lent += 1

    def close(self, rollout_id: str) -> None:
        entry = self.entries[rollout_id]
        entry.state, entry.rollout = "closed", None

    def hear(self, rollout_id: str, pairs: Iterable[PreferencePair]) -> None:
        entry = self.entries[rollout_id]
        entry.state, entry.rollout = "done", None
        self.pairs += [LatePair(pair, entry.version) for pair in pairs]

    def forget_all_but(self, known: Callable[[str], bool]) -> None:
        """Forget rollouts whose tasks are no longer known, unless teachers still have to see them."""
        self.entries = {name: entry for name, entry in self.entries.items() if entry.state == "waiting" or known(name)}

    def snapshot(self, held: dict[str, Rollout]) -> Iterable[PairsWaiting | ReplayEntry]:
        """`held`: the rollouts that tasks hold, by id; they are written once, with their task."""
        yield PairsWaiting(list(self.pairs))
        for entry in self.entries.values():
            kept = None if held.get(entry.rollout_id) is entry.rollout else entry.rollout
            yield ReplayEntry(entry.rollout_id, entry.version, entry.state, kept, entry.lent)

    def restore(self, entry: ReplayEntry, held: Rollout | None) -> None:
        if entry.state == "waiting" and entry.rollout is None:
            entry.rollout = held
        self.entries[entry.rollout_id] = entry


def choose_pairs(waiting: list[LatePair], batch: int, max_pairs: int, max_age: int) -> tuple[list[LatePair], int, int]:
    """The pairs that batch `batch` trains: the newest `max_pairs` of those not older than `max_age`.

    A pair's age is the batch that trains it minus the oldest version that sampled its rejected action. Returns the
    pairs in order of arrival, how many were too old, and how many were too many.
    """
    fresh = [late for late in waiting if pair_age(late, batch) <= max_age]
    chosen = fresh[max(0, len(fresh) - max_pairs) :]
    return chosen, len(waiting) - len(fresh), len(fresh) - len(chosen)


def pair_age(late: LatePair, batch: int) -> int:
    """Batches since the rejected action was sampled; 0 for a rollout of weights that were rewound."""
    return max(0, batch - late.version)
