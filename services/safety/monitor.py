"""The action monitor: flags rollouts in which the agent reached for the grader instead of the task.

    episode ─▶ inspect(rollout): rollout.flags ─▶ scoring (reward functions see the flags) ─▶ settle(rollout) ─▶ buffer

A flag is `<kind>/<rule>@<turn>`, `caches_and_bytecode/read@0` say: one for each rule that a turn's action meets. What
happens to a flagged rollout's reward is the user's choice; counted it is in any case. The monitor looks at what the
agent *did*, never at what came of it: an attempt that the environment refused is flagged as well.

It is a tripwire, no sandbox. It reads actions in one spelling (`services.safety.commands`, which says what escapes it)
against known patterns (`services.safety.monitor_rules`), and a policy that is trained against it learns to avoid the
patterns, not the deed: mend the environment that it finds broken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mesh.messages import Rollout
from services.safety.commands import commands
from services.safety.monitor_rules import KINDS, RULES, Kind, Rule

CUSTOM = "custom"  # kind of the rules that a user adds


class MonitorRule(BaseModel):
    """A rule of the user's own, flagged as `custom/<name>`."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9_-]+$", description="Its name in flags; small letters, digits, _ and -.")
    pattern: str = Field(
        description="Regular expression, searched for (without regard to case) in each action as it was written and in "
        "each command found in it. It runs between episodes: one that backtracks without end would hold them all."
    )
    why: str = Field(min_length=1, description='What it means; continues the sentence "the agent ...".')

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            empty = re.compile(pattern, re.IGNORECASE).search("")
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        if empty:
            raise ValueError(
                f"{pattern!r} matches an empty text, so it would flag every action: make it need something"
            )
        return pattern


class MonitorConfig(BaseModel):
    """What the action monitor looks for, and what becomes of a rollout that it flags."""

    model_config = ConfigDict(extra="forbid")

    kinds: list[Kind] = Field(
        default_factory=lambda: list(KINDS),
        description="Built-in rules in use: caches_and_bytecode, archives, grader_search. A task in which one of these "
        "is ordinary work leaves it out.",
    )
    rules: list[MonitorRule] = Field(default_factory=list, description="Rules of your own: {name, pattern, why}.")
    on_flag: Literal["count", "unscorable", "zero"] = Field(
        "count",
        description="Reward of a flagged rollout: as it is (count), none, so that it is left out of the baseline and "
        "has no advantage (unscorable), or 0 (zero; no punishment where rewards are negative).",
    )

    @model_validator(mode="after")
    def _something_to_flag(self) -> MonitorConfig:
        names = [rule.name for rule in self.rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"rules must have different names, {twice} occur twice: rename one of each")
        if self.on_flag != "count" and not (self.kinds or self.rules):
            raise ValueError(
                f'on_flag = "{self.on_flag}" without a rule flags nothing: name kinds or rules, or leave it'
            )
        return self


class ActionMonitor:
    """Cheap, without state, and never raises for what an agent wrote."""

    def __init__(self, config: MonitorConfig) -> None:
        self.config = config
        self._rules = [rule for rule in RULES if rule.kind in config.kinds]
        self._custom = [
            Rule(CUSTOM, rule.name, rule.why, ((re.compile(rule.pattern, re.IGNORECASE),),)) for rule in config.rules
        ]

    def flags(self, actions: Iterable[str]) -> list[str]:
        """The flags of an episode's actions, one for each rule and turn, in the order of the turns."""
        return [
            f"{rule.kind}/{rule.name}@{turn}" for turn, action in enumerate(actions) for rule in self.broken(action)
        ]

    def broken(self, action: str) -> list[Rule]:
        """The rules that one action breaks."""
        if not (self._rules or self._custom):
            return []
        found = commands(action)
        broken = [rule for rule in self._rules if any(map(rule.matches, found))]
        return broken + [rule for rule in self._custom if any(map(rule.matches, [action, *found]))]

    def inspect(self, rollout: Rollout) -> None:
        """Write the rollout's flags into it. Comes before scoring, so that reward functions see them."""
        rollout.flags = self.flags(turn.text for turn in rollout.turns)

    def settle(self, rollout: Rollout) -> Rollout:
        """The scored rollout with the reward that `on_flag` leaves it; what was scored stays in `rewards`."""
        if not rollout.flags or rollout.reward is None or self.config.on_flag == "count":
            return rollout
        reason = "; ".join(filter(None, [rollout.reason, f"flagged: {', '.join(rollout.flags)}"]))
        return replace(rollout, reward=0.0 if self.config.on_flag == "zero" else None, reason=reason)
