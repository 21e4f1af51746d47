import json
from pathlib import Path

import pytest

from mesh.messages import ErrorSite, Group, Rollout, Sequence, Task, Turn, VersionSpan
from services.telemetry.rollout_log import write_rollouts


def rollout(task: Task, member: int, reward: float | None, turns: list[Turn], reason: str = "") -> Rollout:
    return Rollout(
        id=f"{task.id}/{member}",
        task=task,
        member=member,
        lease_id="lease",
        sequences=[
            Sequence([5, 6, 7, 8], [0.0, -1.0, -1.0, -1.0], [(1, 4)], [VersionSpan(6, 1, 2), VersionSpan(7, 2, 4)])
        ],
        turns=turns,
        messages=[
            {"role": "system", "content": "You have tools."},
            {"role": "user", "content": "What is 2 # 2?"},
            {"role": "assistant", "content": "an example's call"},
            {"role": "user", "content": "What is 3 # 4?"},
            {"role": "assistant", "content": "call one"},
            {"role": "tool", "content": "answer one"},
        ],
        status="finished",
        reward=reward,
        rewards={"answer": reward, "format": None},
        reason=reason,
        generator="generator0",
        seconds=2.5,
    )


@pytest.fixture
def groups() -> list[Group]:
    failing = Turn(
        sequence=0,
        start=1,
        stop=4,
        text='{"tool": "ad"}',
        observation="no such tool: ad",
        reward=-0.5,
        error=ErrorSite("tool_not_found", "ad is not a tool", hint="The tool is called add.", hint_layer="template"),
    )
    unhinted = Turn(0, 1, 4, "{", "bad json", error=ErrorSite("json_decode", "line 1 column 2"))
    tricky = Turn(0, 1, 4, "```python\nprint(1)\n```\n# not a heading", "ok")
    first, second = Task("t000001", 1, 41), Task("t000002", 2, 42)
    return [
        Group(first, [rollout(first, 0, 0.75, [failing]), rollout(first, 1, 0.0, [tricky])], [0.866, -0.866], False, 2),
        Group(second, [rollout(second, 0, None, [unhinted], "the reward timed out")], [0.0], True, 0),
    ]


def test_markdown_tells_rewards_advantages_errors_and_hints(tmp_path: Path, groups: list[Group]) -> None:
    path = write_rollouts(tmp_path, 12, groups, limit=10)
    assert path == tmp_path / "rollouts" / "step-000012.md"
    text = path.read_text()
    for expected in (
        "# Step 12",
        "3 of the 3 rollouts",
        "## t000001/0 (task t000001, seed 41)",
        "- reward: 0.75",
        "- rewards: answer 0.75, format None",
        "- advantage: +0.866",
        "- staleness: 2",
        "- versions: 6, 7",
        "an example's call",
        "What is 3 # 4?",
        "### Turn 1 (reward -0.5)",
        '{"tool": "ad"}',
        "no such tool: ad",
        "Error `tool_not_found`",
        "ad is not a tool",
        "Hint (layer: template):",
        "The tool is called add.",
        "- reward: unscorable (the reward timed out)",
        "- advantage: 0 (dead group)",
        "Hint: none",
        "generator0",
    ):
        assert expected in text, expected
    assert "call one" not in text  # the agent's own messages are told as turns, once


def test_the_jsonl_has_the_same_rollouts_and_figures(tmp_path: Path, groups: list[Group]) -> None:
    write_rollouts(tmp_path, 12, groups, limit=10)
    lines = (tmp_path / "rollouts" / "step-000012.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["rollout"] for r in records] == ["t000001/0", "t000002/0", "t000001/1"]
    hinted, unscorable, _ = records
    assert (hinted["step"], hinted["task"], hinted["seed"]) == (12, "t000001", 41)
    assert (hinted["reward"], hinted["advantage"], hinted["staleness"], hinted["versions"]) == (0.75, 0.866, 2, [6, 7])
    assert hinted["sampled_tokens"] == 3
    assert hinted["turns"] == [
        {
            "text": '{"tool": "ad"}',
            "observation": "no such tool: ad",
            "reward": -0.5,
            "error": {
                "kind": "tool_not_found",
                "text": "ad is not a tool",
                "hint": "The tool is called add.",
                "hint_layer": "template",
            },
        }
    ]
    assert (unscorable["reward"], unscorable["reason"], unscorable["dead_group"]) == (
        None,
        "the reward timed out",
        True,
    )


def test_flags_are_told_and_a_rollout_without_any_says_nothing_of_them(tmp_path: Path, groups: list[Group]) -> None:
    groups[0].rollouts[0].flags = ["archives/unpack@0", "mine/peek@1"]
    path = write_rollouts(tmp_path, 12, groups, limit=3)
    assert path is not None
    assert path.read_text().count("- flags: ") == path.read_text().count("- flags: archives/unpack@0, mine/peek@1") == 1
    records = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert [record["flags"] for record in records] == [["archives/unpack@0", "mine/peek@1"], [], []]


def test_a_small_limit_shows_many_tasks(tmp_path: Path, groups: list[Group]) -> None:
    path = write_rollouts(tmp_path, 0, groups, limit=2)
    assert path is not None
    text = path.read_text()
    assert "2 of the 3 rollouts" in text
    assert "## t000001/0" in text
    assert "## t000002/0" in text
    assert "## t000001/1" not in text


def test_nothing_an_agent_writes_ends_its_block(tmp_path: Path, groups: list[Group]) -> None:
    path = write_rollouts(tmp_path, 0, groups, limit=3)
    assert path is not None
    assert "````\n```python\nprint(1)\n```\n# not a heading\n````" in path.read_text()


@pytest.mark.parametrize(("some", "limit"), [(True, 0), (False, 5)])
def test_nothing_to_show_writes_nothing(tmp_path: Path, groups: list[Group], some: bool, limit: int) -> None:
    assert write_rollouts(tmp_path, 0, groups if some else [], limit) is None
    assert list(tmp_path.iterdir()) == []


def test_a_negative_limit_is_refused(tmp_path: Path, groups: list[Group]) -> None:
    with pytest.raises(ValueError, match="limit=-1"):
        write_rollouts(tmp_path, 0, groups, -1)


def test_logging_a_step_again_replaces_it_and_leaves_nothing_aside(tmp_path: Path, groups: list[Group]) -> None:
    write_rollouts(tmp_path, 5, groups, limit=3)
    write_rollouts(tmp_path, 5, groups, limit=1)
    names = sorted(p.name for p in (tmp_path / "rollouts").iterdir())
    assert names == ["step-000005.jsonl", "step-000005.md"]
    assert len((tmp_path / "rollouts" / "step-000005.jsonl").read_text().splitlines()) == 1
