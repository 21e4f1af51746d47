"""Sampled rollouts that a person can read: what the agent said, what came back, which hint stood where.

Each logged step makes two files of the same content, `rollouts/step-000012.md` to read and `rollouts/step-000012.jsonl`
(one record per rollout) to search. Both are made from the same records, so they cannot disagree.
"""

from __future__ import annotations

import json
import re
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from mesh.messages import Group, Rollout, Turn
from services.runs.atomic import write_atomic
from services.runs.folder import of_replica
from services.telemetry.metrics import finite_or_none


def write_rollouts(run_dir: str | Path, step: int, groups: list[Group], limit: int, replica: int = 0) -> Path | None:
    """Log up to `limit` rollouts of the groups that step `step` trains; returns the Markdown file.

    The first member of every group comes before the second of any, so a small limit still shows many tasks. None, and
    no file, when there is nothing to show. ValueError for a negative limit.
    """
    if limit < 0:
        raise ValueError(f"limit={limit}: the number of rollouts to log is 0 (none) or more")
    members = [
        [(group, rollout, advantage) for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)]
        for group in groups
    ]
    sampled = [member for member in chain.from_iterable(zip_longest(*members)) if member is not None][:limit]
    if not sampled:
        return None
    records = [_record(step, *member) for member in sampled]
    total = sum(len(group.rollouts) for group in groups)
    folder = of_replica(Path(run_dir) / "rollouts", replica)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{step:06d}"
    write_atomic(folder / f"{name}.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    head = f"# Step {step}\n\n{len(records)} of the {total} rollouts that this step trained.\n"
    markdown = folder / f"{name}.md"
    write_atomic(markdown, "\n".join([head, *map(_markdown, records)]))
    return markdown


def _record(step: int, group: Group, rollout: Rollout, advantage: float) -> dict[str, Any]:
    return {
        "step": step,
        "rollout": rollout.id,
        "task": rollout.task.id,
        "seed": rollout.task.seed,
        "status": rollout.status,
        "reason": rollout.reason,
        "flags": rollout.flags,
        "reward": finite_or_none(rollout.reward),
        "rewards": {name: finite_or_none(value) for name, value in rollout.rewards.items()},
        "env_reward": finite_or_none(rollout.env_reward),
        "advantage": finite_or_none(advantage),
        "dead_group": group.dead,
        "staleness": group.staleness,
        "versions": sorted({span.version for sequence in rollout.sequences for span in sequence.versions}),
        "sampled_tokens": rollout.sampled_tokens,
        "seconds": rollout.seconds,
        "generator": rollout.generator,
        "prompt": _opening(rollout),
        "turns": [_turn(turn) for turn in rollout.turns],
    }


def _opening(rollout: Rollout) -> list[dict[str, str]]:
    """The messages before the agent's first one, examples of others' included; what follows is in the turns."""
    return rollout.messages[: len(rollout.messages) - 2 * len(rollout.turns)]


def _turn(turn: Turn) -> dict[str, Any]:
    error = turn.error
    return {
        "text": turn.text,
        "observation": turn.observation,
        "reward": finite_or_none(turn.reward),
        "error": error
        and {"kind": error.kind, "text": error.error_text, "hint": error.hint, "hint_layer": error.hint_layer},
    }


def _markdown(record: dict[str, Any]) -> str:
    reward = f"unscorable ({record['reason'] or 'no reason given'})" if record["reward"] is None else record["reward"]
    facts = {
        "reward": reward,
        "rewards": ", ".join(f"{name} {value}" for name, value in record["rewards"].items()),
        "advantage": f"{_signed(record['advantage'])}{' (dead group)' if record['dead_group'] else ''}",
        "staleness": record["staleness"],
        "versions": ", ".join(map(str, record["versions"])),
        "status": f"{record['status']}{': ' + record['reason'] if record['reason'] else ''}",
        "flags": ", ".join(record["flags"]),
        "tokens": f"{record['sampled_tokens']} in {record['seconds']:.1f} s by {record['generator'] or 'unknown'}",
    }
    parts = [f"## {record['rollout']} (task {record['task']}, seed {record['seed']})\n"]
    parts += ["\n".join(f"- {name}: {value}" for name, value in facts.items() if value != "") + "\n"]
    parts += [f"**{message['role']}**\n\n{_fenced(message['content'])}\n" for message in record["prompt"]]
    parts += [_turn_markdown(number, turn) for number, turn in enumerate(record["turns"], 1)]
    return "\n".join(parts)


def _turn_markdown(number: int, turn: dict[str, Any]) -> str:
    reward = "" if turn["reward"] is None else f" (reward {turn['reward']})"
    parts = [f"### Turn {number}{reward}\n", f"Agent:\n\n{_fenced(turn['text'])}\n"]
    parts += [f"Observation:\n\n{_fenced(turn['observation'])}\n"]
    if error := turn["error"]:
        parts += [f"Error `{error['kind']}`:\n\n{_fenced(error['text'])}\n"]
        parts += [
            f"Hint (layer: {error['hint_layer']}):\n\n{_fenced(error['hint'])}\n"
            if error["hint"] is not None
            else "Hint: none\n"
        ]
    return "\n".join(parts)


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any in the text, so nothing an agent writes ends it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def _signed(value: float | None) -> str:
    return "not finite" if value is None else f"{value:+.4g}" if value else "0"
