import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.messages import TeacherCallResult, TraceState
from services.teachers import extract_preference_pairs, normalize, save_pairs

CHAT = [{"role": "user", "content": "3+4"}]


def state(action: str = "mine", state_id: str = "task-1/0#2") -> TraceState:
    return TraceState(state_id, CHAT, action)


def says(*texts: str | None, state_id: str = "task-1/0#2") -> list[TeacherCallResult]:
    return [TeacherCallResult(state_id, f"t{i}", text, None if text else "no answer") for i, text in enumerate(texts)]


def test_two_of_three_make_a_pair_that_keeps_the_first_original_text() -> None:
    [pair] = extract_preference_pairs([state()], says("other", " do\n\tthis ", "do this"))
    assert pair.chosen == " do\n\tthis "
    assert pair.rejected == "mine"
    assert pair.teachers == ["t1", "t2"]
    assert pair.rollout_id == "task-1/0"
    assert pair.messages == CHAT


@pytest.mark.parametrize(
    ("texts", "threshold"),
    [
        (("a", "b", "c"), 2),  # nobody agrees
        (("a", "a", "b", "b"), 2),  # a tie
        (("a", "a", "b"), 3),  # too few
        (("mine", " mine\n", "b"), 2),  # they agree with the student
        ((None, None, "a"), 2),  # no answers
        (("", " ", "\n"), 2),  # empty answers
        ((), 1),
    ],
)
def test_no_consensus_against_the_student_is_no_pair(texts: tuple[str | None, ...], threshold: int) -> None:
    assert extract_preference_pairs([state(" mine ")], says(*texts), threshold) == []


def test_a_threshold_of_one_still_needs_a_strict_lead() -> None:
    assert extract_preference_pairs([state()], says("a", "b"), 1) == []
    assert len(extract_preference_pairs([state()], says("a", None), 1)) == 1


def test_weights_decide_between_answers_and_the_threshold_still_counts_teachers() -> None:
    texts = says("a", "a", "b", "b")
    [pair] = extract_preference_pairs([state()], texts, 2, {"t2": 1.5})
    assert pair.teachers == ["t2", "t3"]
    assert extract_preference_pairs([state()], says("a", "b", "b"), 2, {"t0": 5.0}) == []


def test_a_teacher_has_one_vote_per_state() -> None:
    twice = [*says("a"), *says("a"), *says("b")]
    assert extract_preference_pairs([state()], twice, 2) == []


def test_pairs_follow_the_states_one_each_whatever_the_order_of_results() -> None:
    asked = [state(state_id=f"r#{i}") for i in (2, 0, 1)]
    results = [r for i in range(3) for r in says("x", "x", state_id=f"r#{i}")]
    pairs = extract_preference_pairs([*asked, asked[0]], results)
    assert [p.state_id for p in pairs] == ["r#2", "r#0", "r#1"]


def test_a_threshold_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="give 1 or more"):
        extract_preference_pairs([], [], 0)


@given(st.lists(st.sampled_from(["a", " a", "b", "c\n", "mine", None]), max_size=7), st.integers(1, 4))
def test_a_pair_has_a_strict_majority_over_every_other_answer(texts: list[str | None], threshold: int) -> None:
    pairs = extract_preference_pairs([state()], says(*texts), threshold)
    counts: dict[str, int] = {}
    for text in texts:
        if text is not None:
            counts[normalize(text)] = counts.get(normalize(text), 0) + 1
    leaders = [a for a, n in counts.items() if n == max(counts.values()) and n >= threshold]
    expected = leaders if len(leaders) == 1 and leaders != ["mine"] else []
    assert [normalize(p.chosen) for p in pairs] == expected
    assert all(p.chosen in texts and len(p.teachers) == counts[normalize(p.chosen)] for p in pairs)


def test_saved_pairs_are_one_json_object_per_line(tmp_path: Path) -> None:
    pairs = extract_preference_pairs([state()], says("dö\n\ud800", "dö \ud800"))
    path = tmp_path / "new" / "pairs.jsonl"
    save_pairs(pairs, path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [asdict(p) for p in pairs]
    assert [p.name for p in path.parent.iterdir()] == ["pairs.jsonl"]


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    pairs = extract_preference_pairs([state()], says("a", "a"))
    save_pairs(pairs, path)
    before = path.read_bytes()
    pairs[0].messages = [{"role": object()}]  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        save_pairs(pairs, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
