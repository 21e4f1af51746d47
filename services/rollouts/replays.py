"""Which rollouts go to the teachers, how often, and what becomes of their answers.

The rules for `services.rollouts.late.LateResults`: like the buffer, they decide and record events. How long a rollout
is lent is remembered here alone: after a restart an unanswered one may be lent again, within `replay_attempts`.
"""

from __future__ import annotations

from collections.abc import Callable

from mesh.messages import DelayedReward, PreferencePair, Rollout
from services.rollouts import events as ev
from services.rollouts.config import BufferConfig
from services.rollouts.late import LateResults


class Replays:
    def __init__(
        self,
        config: BufferConfig,
        late: LateResults,
        record: Callable[[ev.Event], None],
        time_fn: Callable[[], float],
    ) -> None:
        self._config, self._late, self._record, self._time_fn = config, late, record, time_fn
        self._lent: dict[str, float] = {}  # rollout id -> when it may be lent again

    @property
    def lent(self) -> int:
        now = self._time_fn()
        return sum(until > now for until in self._lent.values())

    def wants(self, rollout: Rollout) -> bool:
        """Whether teachers are to be asked about a rollout."""
        return self._config.replay_which == "errors" and any(turn.error is not None for turn in rollout.turns)

    def close_overflow(self) -> None:
        """Let the oldest waiting rollouts go when more than `replay_queue` wait."""
        waiting = self._late.waiting
        for entry in waiting[: max(0, len(waiting) - self._config.replay_queue)]:
            self._close(entry.rollout_id, "replay_overflow")

    def lend(self, count: int) -> list[Rollout]:
        now = self._time_fn()
        found: list[Rollout] = []
        for entry in self._late.waiting:
            if len(found) >= count:
                break
            if self._lent.get(entry.rollout_id, now) > now or entry.rollout is None:
                continue
            if entry.lent >= self._config.replay_attempts:
                self._close(entry.rollout_id, "replay_given_up")
                continue
            self._record(ev.ReplayLent(entry.rollout_id))
            self._lent[entry.rollout_id] = now + self._config.replay_lease_s
            found.append(entry.rollout)
        return found

    def delayed(self, result: DelayedReward) -> bool:
        """Take what teachers said once. Pairs without exact ids cannot be trained; they are left out and counted."""
        entry = self._late.entries.get(result.rollout_id)
        if entry is None or entry.state == "done":
            self._record(ev.Counted("delayed_unknown" if entry is None else "delayed_duplicate"))
            return False
        usable = [pair for pair in result.pairs if _usable(pair, result.rollout_id)]
        self._record(ev.Heard(result.rollout_id, usable, unusable=len(result.pairs) - len(usable)))
        self._lent.pop(result.rollout_id, None)
        return True

    def _close(self, rollout_id: str, reason: str) -> None:
        self._record(ev.ReplayClosed(rollout_id, reason))
        self._lent.pop(rollout_id, None)


def _usable(pair: PreferencePair, rollout_id: str) -> bool:
    return bool(pair.prompt_ids and pair.rejected_ids and pair.chosen) and pair.rollout_id == rollout_id
