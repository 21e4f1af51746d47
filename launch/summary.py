"""How a run ended, and how that is told: the last lines that `milkweed run` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.runs.folder import RunFolder


@dataclass(slots=True)
class Summary:
    """How a run ended."""

    outcome: str  # "finished" | "stopped" | "failed": its guard fired
    steps: int
    seconds: float
    rewards: list[float] = field(default_factory=list)  # mean reward by step, of this drive
    accounts: dict[str, Any] = field(default_factory=dict)
    held_out_reward: float | None = None
    policy: str | None = None  # folder of the newest checkpoint's policy
    troubles: dict[str, str] = field(default_factory=dict)  # the last one of each member that had any
    warning: str = ""  # of the held-out guard, once it has fired


def print_summary(run: RunFolder, summary: Summary, seconds: float) -> None:
    print(f"\nrun {run.name} {summary.outcome} after {summary.steps} steps in {seconds:.0f} s")
    if summary.rewards:
        first, last = summary.rewards[:5], summary.rewards[-5:]
        print(f"mean reward: {sum(first) / len(first):.3f} (first {len(first)} steps) -> "
              f"{sum(last) / len(last):.3f} (last {len(last)} steps)")  # fmt: skip
    if summary.held_out_reward is not None:
        print(f"held-out reward: {summary.held_out_reward:.3f}")
    if summary.accounts:
        print(f"tasks: {describe_accounts(summary.accounts)}")
    if summary.warning:
        print(f"warning: {summary.warning}")
    for name, trouble in summary.troubles.items():
        print(f"last trouble of {name}: {' '.join(trouble.split())[:300]}")
    if summary.policy:
        print(f"trained model: {summary.policy}")
    if summary.outcome == "stopped":
        print(f"go on with: milkweed resume {run.path}")


def describe_accounts(accounts: dict[str, Any]) -> str:
    """Every task by its fate, on one line."""
    dropped = accounts.get("dropped", {})
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    rest = {name: accounts.get(name, 0) for name in ("in_work", "ready", "taken")}
    waiting = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in rest.items() if count)
    parts = [f"{accounts['issued']} issued", f"{accounts['trained']} trained"]
    parts += [f"{sum(dropped.values())} dropped ({reasons})"] if dropped else []
    return "; ".join([*parts, *([waiting] if waiting else [])])


def added_up(accounts: list[dict[str, Any]]) -> dict[str, Any]:
    """The accounts of several rollout buffers as one: numbers added up, lists put together."""
    total: dict[str, Any] = {}
    for each in accounts:
        for name, value in each.items():
            if isinstance(value, dict):
                total[name] = added_up([total.get(name, {}), value])
            else:
                total[name] = total[name] + value if name in total else value
    return total
