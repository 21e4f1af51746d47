"""A step's report and the health of all members, put together into one row of metrics."""

from __future__ import annotations

import time
from typing import Any

from mesh.supervision import Supervisor


class Progress:
    """Keeps what the rows before need: idle shares and rates are over the time between two rows."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self._clock = time.monotonic()
        self._before: dict[str, tuple[int, float, float]] = {}  # member -> incarnation, busy, uptime

    def row(self, report: dict[str, Any]) -> dict[str, float]:
        """The metrics of one step: the trainer's, rates, idle shares by role, deaths and spend."""
        now = time.monotonic()
        elapsed, self._clock = max(now - self._clock, 1e-6), now
        metrics: dict[str, float] = dict(report["metrics"])
        metrics["tokens_per_s"] = metrics["tokens"] / elapsed
        metrics["rollouts_per_s"] = metrics["rollouts"] / elapsed
        metrics |= {f"idle/{role}": share for role, share in self._idle().items() if f"idle/{role}" not in metrics}
        metrics["supervision/deaths"] = float(sum(self.supervisor.deaths.values()))
        answered = [health["answered_in_s"] for health in self.supervisor.health.values()]
        if answered:
            metrics["supervision/slowest_status_s"] = max(answered)
        for health in self.supervisor.health.values():
            for figure in ("spent_usd", "hinted_accuracy", "pairs", "errors"):
                if health["name"].startswith("teachers") and isinstance(health.get(figure), int | float):
                    metrics[f"teachers/{figure}"] = float(health[figure])
        return metrics

    def _idle(self) -> dict[str, float]:
        """Share of the time since the last row in which a role's members had nothing to do."""
        busy: dict[str, float] = {}
        total: dict[str, float] = {}
        for name, health in self.supervisor.health.items():
            role = self.supervisor.placed[name].place.role if name in self.supervisor.placed else name
            incarnation, busy_before, uptime_before = self._before.get(name, (health["incarnation"], 0.0, 0.0))
            if incarnation != health["incarnation"]:
                busy_before = uptime_before = 0.0
            busy[role] = busy.get(role, 0.0) + health["busy_s"] - busy_before
            total[role] = total.get(role, 0.0) + health["uptime_s"] - uptime_before
            self._before[name] = (health["incarnation"], health["busy_s"], health["uptime_s"])
        return {role: max(0.0, 1.0 - busy[role] / total[role]) for role in busy if total[role] > 0.5}
