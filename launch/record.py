"""What is written down of a run's steps: one row per step, from the trainer's report and the health of all members."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from actors.following import trainer_name
from launch.guard import RunGuard
from mesh.supervision import Supervisor
from services.runs.folder import of_replica
from services.telemetry.metrics import MetricsWriter
from services.telemetry.table import ProgressTable


class Record:
    """Metrics files, table and rewards of one trainer. Placed again it may do steps again: their rows are replaced."""

    def __init__(
        self,
        run_dir: Path,
        table: ProgressTable,
        supervisor: Supervisor,
        say: Callable[[str], None],
        replica: int = 0,
    ) -> None:
        self.run_dir, self.table, self.supervisor, self.say = of_replica(run_dir, replica), table, supervisor, say
        self.run_dir.mkdir(exist_ok=True)
        self.trainer = trainer_name(replica)
        self.guard: RunGuard | None = None  # where one watches these steps
        self.step = 0  # the next one to be recorded
        self._metrics: MetricsWriter | None = None
        self.life = ""  # names the trainer that did the last step
        self._finished_at = 0.0  # when it did it
        self._rewards: dict[int, float] = {}  # by step
        self._before: dict[str, tuple[int, float, float]] = {}  # member -> incarnation, busy, uptime at the last row

    def open(self, step: int) -> None:
        """Begin to write with `step`; rows from there on, of an earlier drive, are cut."""
        self.close()
        self.step = step
        self._metrics = MetricsWriter(self.run_dir, resume_at=step)
        if self.guard is not None:
            self.guard.open(step)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    @property
    def rewards(self) -> dict[int, float]:
        """Mean rewards by step; steps whose rollouts could not be scored have none."""
        return dict(self._rewards)

    def add(self, reports: list[dict[str, Any]]) -> None:
        """Write down reports, oldest first."""
        for report in reports:
            if report["life"] != self.life and report["step"] < self.step:
                self.say(f"{self.trainer} does steps {report['step']} to {self.step - 1} again")
                self._rewards = {step: reward for step, reward in self._rewards.items() if step < report["step"]}
                self.open(report["step"])
            row = self._row(report)
            if self.guard is not None:
                row |= self.guard.watch(report["step"], row)
            assert self._metrics is not None
            self._metrics.write(report["step"], row, report["histograms"])
            self.table.update({"step": report["step"], "replica": report.get("replica", 0), **row})
            self.step, self.life, self._finished_at = report["step"] + 1, report["life"], report["finished_at"]
            if row.get("reward/mean") is not None:
                self._rewards[report["step"]] = row["reward/mean"]

    def _row(self, report: dict[str, Any]) -> dict[str, float]:
        """The metrics of one step: the trainer's, rates, idle shares by role, deaths and spend."""
        metrics: dict[str, float] = dict(report["metrics"])
        if report["life"] == self.life:  # the time between two steps of one trainer
            elapsed = max(report["finished_at"] - self._finished_at, 1e-6)
            metrics["tokens_per_s"] = metrics["tokens"] / elapsed
            metrics["rollouts_per_s"] = metrics["rollouts"] / elapsed
        metrics |= {f"idle/{role}": share for role, share in self._idle().items() if f"idle/{role}" not in metrics}
        metrics["supervision/deaths"] = float(sum(self.supervisor.deaths.values()))
        health = self.supervisor.health.values()
        if health:
            metrics["supervision/slowest_status_s"] = max(each["answered_in_s"] for each in health)
        engines = [each for each in health if "update_s" in each]
        for name in ("pull", "update") if engines else ():
            metrics[f"seconds/generator/{name}"] = max(each[f"{name}_s"] for each in engines)  # of the slowest one
        for pool in (each for each in health if each["name"].startswith("teachers")):
            for figure in ("spent_usd", "pairs", "errors"):
                metrics[f"teachers/{figure}"] = float(pool.get(figure, 0.0))
        return metrics

    def _idle(self) -> dict[str, float]:
        """Share of the time since a member was last looked at in which a role's members had nothing to do."""
        busy: dict[str, float] = {}
        total: dict[str, float] = {}
        for name, health in self.supervisor.health.items():
            incarnation, busy_s, uptime_s = health["incarnation"], health["busy_s"], health["uptime_s"]
            known, busy_before, uptime_before = self._before.get(name, (incarnation, 0.0, 0.0))
            if known != incarnation:
                busy_before = uptime_before = 0.0
            role = self.supervisor.placed[name].place.role
            busy[role] = busy.get(role, 0.0) + busy_s - busy_before
            total[role] = total.get(role, 0.0) + uptime_s - uptime_before
            self._before[name] = (incarnation, busy_s, uptime_s)
        return {role: min(1.0, max(0.0, 1.0 - busy[role] / total[role])) for role in busy if total[role] > 0.2}


def mean_rewards(records: Iterable[Record]) -> list[float]:
    """Mean reward of each step, in order, over the trainers that have one for it."""
    by_step: defaultdict[int, list[float]] = defaultdict(list)
    for record in records:
        for step, reward in record.rewards.items():
            by_step[step].append(reward)
    return [fmean(by_step[step]) for step in sorted(by_step)]
