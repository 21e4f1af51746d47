"""From token ids to what the trainer eats: recording an episode, and flattening groups into arrays. NumPy only.

Nothing is tokenized again. The ids that the engine sampled are recorded while the episode runs, with their logprobs and
versions; masks come from those spans, never from comparing ids with a pad id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh.messages import Group, HintedContext, PreferencePair, Rollout, Sequence, VersionSpan


class SequenceRecorder:
    """Records one episode as the model sees it; grows one `Sequence` until the chat template rewrites history."""

    def __init__(self, prompt_ids: Ids[int]) -> None:
        self._sequences = [_context_only(prompt_ids)]

    @property
    def sequences(self) -> list[Sequence]:
        """What was recorded. A last sequence in which nothing was sampled is left out; no turn points to it."""
        last = self._sequences[-1]
        return self._sequences if last.sampled or len(self._sequences) == 1 else self._sequences[:-1]

    @property
    def token_ids(self) -> list[int]:
        """The context as it stands now."""
        return list(self._sequences[-1].token_ids)

    def append_sampled(
        self, ids: Ids[int], logprobs: Ids[float], versions: Iterable[VersionSpan]
    ) -> tuple[int, int, int]:
        """Append what the policy sampled; returns `(sequence, start, stop)` of the turn.

        `logprobs` are the behaviour policy's at the sampling temperature, one per id. `versions` covers `[0, len(ids))`
        in order, relative to `ids`. ValueError when they do not fit.
        """
        spans = list(versions)
        covered = [token for span in spans for token in range(span.start, span.stop)]
        if len(logprobs) != len(ids) or covered != list(range(len(ids))):
            raise ValueError(
                f"append_sampled: {len(ids)} ids came with {len(logprobs)} logprobs and version spans {spans}; "
                "give one logprob per id, and spans that cover every id once, in order"
            )
        sequence = self._sequences[-1]
        start = len(sequence.token_ids)
        stop = start + len(ids)
        sequence.token_ids += ids
        sequence.logprobs += logprobs
        if ids:
            sequence.sampled.append((start, stop))
        sequence.versions += [
            VersionSpan(span.version, start + span.start, start + span.stop) for span in spans if span.stop > span.start
        ]
        return len(self._sequences) - 1, start, stop

    def append_context(self, ids: Ids[int]) -> None:
        """Append tokens that the policy did not choose: observations, template glue, the next generation prompt."""
        sequence = self._sequences[-1]
        sequence.token_ids += ids
        sequence.logprobs += [0.0] * len(ids)

    def fork(self, ids: Ids[int]) -> None:
        """Go on in a new sequence that starts with the rewritten history `ids`.

        All of it is context there, so that every sampled token is trained once: in the sequence it was sampled in.
        """
        if not self._sequences[-1].sampled:
            self._sequences.pop()
        self._sequences.append(_context_only(ids))


def _context_only(ids: Ids[int]) -> Sequence:
    return Sequence(list(ids), [0.0] * len(ids), [], [])


@dataclass(slots=True)
class TrainSample:
    """One sequence to train, length T. `loss_mask[t]`: the policy sampled token t (never true at t = 0)."""

    rollout_id: str
    sequence: int  # index into Rollout.sequences
    token_ids: NDArray[np.int64]  # (T,)
    loss_mask: NDArray[np.bool_]  # (T,)
    logprobs: NDArray[np.float32]  # (T,) behaviour logprobs of the tokens themselves, 0 where not sampled
    versions: NDArray[np.int64]  # (T,) weights that sampled the token, -1 where not sampled
    advantage: float
    truncated: bool = False

    @property
    def length(self) -> int:
        return len(self.token_ids)


def flatten(groups: Iterable[Group]) -> list[TrainSample]:
    """A sample for every sequence with a sampled token, in the order of groups, rollouts and sequences.

    Sequences of one rollout share its advantage; each sampled token is in exactly one of them.
    """
    return [
        _sample(rollout, number, advantage)
        for group in groups
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
        for number, sequence in enumerate(rollout.sequences)
        if sequence.sampled
    ]


def _sample(rollout: Rollout, number: int, advantage: float) -> TrainSample:
    sequence = rollout.sequences[number]
    length = len(sequence.token_ids)
    mask, versions = np.zeros(length, dtype=np.bool_), np.full(length, -1, dtype=np.int64)
    for start, stop in sequence.sampled:
        mask[start:stop] = True
    for span in sequence.versions:
        versions[span.start : span.stop] = span.version
    return TrainSample(
        rollout_id=rollout.id,
        sequence=number,
        token_ids=np.asarray(sequence.token_ids, dtype=np.int64),
        loss_mask=mask,
        logprobs=np.asarray(sequence.logprobs, dtype=np.float32),
        versions=versions,
        advantage=advantage,
        truncated=rollout.status == "truncated",
    )


def pair_samples(
    pairs: Iterable[PreferencePair], encode: Callable[[str], list[int]], eos_id: int
) -> tuple[list[TrainSample], list[TrainSample]]:
    """Chosen and rejected samples, one of each per pair, with masks over the response only.

    The prompt and the rejected response are the exact ids of the episode. The chosen response is `encode(text)` (which
    must add no special tokens) and the end-of-turn id. ValueError for a pair without exact ids.
    """
    chosen, rejected = [], []
    for pair in pairs:
        if not pair.prompt_ids or not pair.rejected_ids:
            raise ValueError(
                f"pair {pair.state_id} has no exact prompt and rejected ids; fill them in where the pair is made"
            )
        chosen.append(_response(pair, [*encode(pair.chosen), eos_id]))
        rejected.append(_response(pair, pair.rejected_ids))
    return chosen, rejected


def _response(pair: PreferencePair, response: list[int]) -> TrainSample:
    ids = np.asarray([*pair.prompt_ids, *response], dtype=np.int64)
    mask = np.arange(len(ids)) >= len(pair.prompt_ids)
    nothing = np.zeros(len(ids), dtype=np.float32)
    return TrainSample(pair.rollout_id, 0, ids, mask, nothing, np.full(len(ids), -1, dtype=np.int64), 0.0)


@dataclass(slots=True)
class HintedSite:
    """One error site, seen from both sides: the teacher's context, and where the student predicts the same tokens."""

    rollout_id: str
    sequence: int  # index into Rollout.sequences
    start: int
    stop: int  # half-open span of the turn's tokens in that sequence
    context: HintedContext

    @property
    def student_positions(self) -> list[int]:
        """Positions of the sequence whose logits predict the turn's tokens."""
        return list(range(self.start - 1, self.stop - 1))

    @property
    def teacher_positions(self) -> list[int]:
        """Positions of `context.prompt_ids + context.turn_ids` whose logits predict the turn's tokens."""
        first = len(self.context.prompt_ids) - 1
        return list(range(first, first + len(self.context.turn_ids)))


def hinted_contexts(rollout: Rollout) -> list[HintedSite]:
    """A rollout's error sites that have a hint, in the order of its turns."""
    sites = []
    for number, turn in enumerate(rollout.turns):
        if turn.error is None or not turn.error.hint_ids:
            continue
        ids = rollout.sequences[turn.sequence].token_ids
        context = HintedContext(
            prompt_ids=[*ids[: turn.error.cut], *turn.error.hint_ids],
            turn_ids=ids[turn.start : turn.stop],
            task=rollout.task,
            actions=[earlier.text for earlier in rollout.turns[:number]],
        )
        sites.append(HintedSite(rollout.id, turn.sequence, turn.start, turn.stop, context))
    return sites
