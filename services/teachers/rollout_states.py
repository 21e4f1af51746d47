"""A finished rollout as states to replay, and the pairs that come of it with the exact ids of the episode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mesh.messages import PreferencePair, Rollout, TraceState


def replay_states(rollout: Rollout) -> list[TraceState]:
    """The moment before every turn that the environment refused: `state_id` is "<rollout id>#<turn>"."""
    opening = len(rollout.messages) - 2 * len(rollout.turns)  # what stood there before the first action
    return [
        TraceState(f"{rollout.id}#{number}", rollout.messages[: opening + 2 * number], turn.text)
        for number, turn in enumerate(rollout.turns)
        if turn.error is not None
    ]


def attach_exact_ids(pairs: Iterable[PreferencePair], rollout: Rollout) -> list[PreferencePair]:
    """The pairs with the prompt's and the rejected action's ids as they were sampled in `rollout`."""
    attached = []
    for pair in pairs:
        turn = rollout.turns[int(pair.state_id.rpartition("#")[2])]
        ids = rollout.sequences[turn.sequence].token_ids
        attached.append(replace(pair, prompt_ids=ids[: turn.start], rejected_ids=ids[turn.start : turn.stop]))
    return attached
