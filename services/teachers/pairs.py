"""From teachers' answers to preference pairs: what they agree on, where the student did something else.

Answers are compared with runs of whitespace collapsed, so that layout makes no difference; what is kept for training is
the original text of the first teacher that agreed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from mesh.messages import PreferencePair, TeacherCallResult, TraceState
from services.runs.atomic import write_atomic


def normalize(text: str) -> str:
    """`text` with every run of whitespace made one blank, and none at the ends."""
    return " ".join(text.split())


def extract_preference_pairs(
    states: Sequence[TraceState],
    results: Iterable[TeacherCallResult],
    agreement_threshold: int = 2,
    weights: Mapping[str, float] | None = None,
) -> list[PreferencePair]:
    """At most one pair per state, in the order of `states`.

    The consensus is the answer with strictly more weight than any other, given by at least `agreement_threshold`
    teachers; a tie is none, and neither is one that equals the student's action. `weights` are by teacher, 1.0 where
    not given. A teacher has one vote per state: its first answer. ValueError for a threshold below 1.
    """
    if agreement_threshold < 1:
        raise ValueError(
            f"agreement_threshold is {agreement_threshold}: at least one teacher must agree, give 1 or more"
        )
    answers: dict[str, dict[str, str]] = {}  # state -> teacher -> original text, in the order of the results
    for result in results:
        if result.text is not None and normalize(result.text):
            answers.setdefault(result.state_id, {}).setdefault(result.teacher, result.text)

    pairs = []
    done = set()
    for state in states:
        if state.state_id in done:
            continue
        done.add(state.state_id)
        supporters = _consensus(answers.get(state.state_id, {}), agreement_threshold, weights or {})
        if not supporters:
            continue
        chosen = answers[state.state_id][supporters[0]]
        if normalize(chosen) == normalize(state.student_action):
            continue
        pairs.append(
            PreferencePair(
                state_id=state.state_id,
                rollout_id=state.state_id.rpartition("#")[0] or state.state_id,
                messages=state.messages,
                chosen=chosen,
                rejected=state.student_action,
                teachers=supporters,
            )
        )
    return pairs


def _consensus(answers: Mapping[str, str], threshold: int, weights: Mapping[str, float]) -> list[str]:
    """The teachers behind the one leading answer, in order; empty when there is none or too few agree."""
    supporters: dict[str, list[str]] = {}
    for teacher, text in answers.items():
        supporters.setdefault(normalize(text), []).append(teacher)
    weight = {answer: sum(weights.get(name, 1.0) for name in names) for answer, names in supporters.items()}
    leading = [answer for answer in weight if weight[answer] == max(weight.values())]
    if len(leading) != 1 or len(supporters[leading[0]]) < threshold:
        return []
    return supporters[leading[0]]


def save_pairs(pairs: Iterable[PreferencePair], path: Path | str) -> None:
    """Write one JSON object per line. Written aside, then renamed: the file is whole, the old one or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(asdict(pair)) + "\n" for pair in pairs))
