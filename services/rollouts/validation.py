"""Is a rollout well formed? Checked once, at the door of the buffer, so that nothing behind it has to doubt."""

from __future__ import annotations

from collections.abc import Iterator

from mesh.messages import Rollout, Sequence, Turn


def malformed(rollout: Rollout) -> str | None:
    """One sentence that says what is wrong with a rollout, or None.

    Lengths agree; sampled spans ascend and lie inside; version spans cover exactly the sampled tokens; every turn's
    action lies in one sampled span, and a hint's cut in front of it. The first token of a sequence cannot be sampled:
    nothing predicts it. A failed rollout is held only to its identity, since its sequences are never trained.
    """
    try:
        return next(_faults(rollout), None)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        # A field of the wrong type breaks the checks themselves: the sender's fault, which must not end the buffer.
        return f"rollout {getattr(rollout, 'id', '?')} cannot be read: {type(error).__name__}: {error}"


def _faults(rollout: Rollout) -> Iterator[str]:
    name = f"rollout {rollout.id}"
    if rollout.id != f"{rollout.task.id}/{rollout.member}":
        yield f"{name} should be called {rollout.task.id}/{rollout.member} after its task and member"
    if rollout.status not in ("finished", "truncated", "failed"):
        yield f"{name} has the unknown status {rollout.status!r}"
    if rollout.status == "failed":
        return
    rewards = {"env_reward": rollout.env_reward, "reward": rollout.reward, **rollout.rewards}
    for what, reward in rewards.items():
        if not _is_number(reward):
            yield f"{name}: {what} is a {type(reward).__name__}, not a Python number or None"
    if not isinstance(rollout.flags, list) or not all(isinstance(flag, str) for flag in rollout.flags):
        yield f"{name} has flags that are no list of texts"
    for number, sequence in enumerate(rollout.sequences):
        yield from _sequence_faults(f"{name}, sequence {number}", sequence)
    for number, turn in enumerate(rollout.turns):
        yield from _turn_faults(f"{name}, turn {number}", turn, rollout)


def _sequence_faults(name: str, sequence: Sequence) -> Iterator[str]:
    length = len(sequence.token_ids)
    if len(sequence.logprobs) != length:
        yield f"{name} has {length} token ids but {len(sequence.logprobs)} logprobs"
    if not all(isinstance(token, int) and token >= 0 for token in sequence.token_ids):
        yield f"{name} has token ids that are negative or not Python ints"
    if not all(isinstance(logprob, float | int) for logprob in sequence.logprobs):
        yield f"{name} has logprobs that are not Python floats"
    end = 1
    for start, stop in sequence.sampled:
        if not end <= start < stop <= length:
            yield f"{name}: sampled span [{start}, {stop}) is empty, out of order or outside [1, {length})"
        end = stop
    versioned = [token for span in sequence.versions for token in range(span.start, span.stop)]
    if versioned != [token for start, stop in sequence.sampled for token in range(start, stop)]:
        yield f"{name}: the version spans do not cover exactly the sampled tokens, in order"
    if any(span.version < 0 for span in sequence.versions):
        yield f"{name} has a negative version"


def _turn_faults(name: str, turn: Turn, rollout: Rollout) -> Iterator[str]:
    if not 0 <= turn.sequence < len(rollout.sequences):
        yield f"{name} points to sequence {turn.sequence} of {len(rollout.sequences)}"
    spans = rollout.sequences[turn.sequence].sampled
    if not any(start <= turn.start < turn.stop <= stop for start, stop in spans):
        yield f"{name}: span [{turn.start}, {turn.stop}) does not lie inside one sampled span"
    if not _is_number(turn.reward):
        yield f"{name}: the reward is a {type(turn.reward).__name__}, not a Python number or None"
    if turn.error is not None and turn.error.hint_ids and not 0 <= turn.error.cut <= turn.start:
        yield f"{name}: the hint's cut {turn.error.cut} does not lie in front of the turn, which starts at {turn.start}"


def _is_number(value: object) -> bool:
    # Array scalars would not survive the journal's JSON.
    return value is None or isinstance(value, int | float)
