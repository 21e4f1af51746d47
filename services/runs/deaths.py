"""`deaths.jsonl` in a run's folder: who was lost, why, when its place was filled again, and when training took a step.

    {"event": "lost", "member", "role", "incarnation", "reason", "at"}     noticed
    {"event": "back", "member", "incarnation", "at"}                       placed again, and known to everybody
    {"event": "step", "step", "at"}                                        the first step that ended after a loss

`at` is Unix time in seconds. One line per event, appended at once, so that a driver that dies itself has told all.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "deaths.jsonl"


class DeathLog:
    """Appends to `run_dir/deaths.jsonl`; a line that an earlier driver's death cut short is removed."""

    def __init__(self, run_dir: Path | str) -> None:
        path = Path(run_dir) / FILE
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._lost_at: float | None = None  # since the last step

    def lost(self, member: str, role: str, incarnation: int, reason: str) -> None:
        self._lost_at = self._write("lost", member=member, role=role, incarnation=incarnation, reason=reason)

    def back(self, member: str, incarnation: int) -> None:
        self._write("back", member=member, incarnation=incarnation)

    def stepped(self, reports: Iterable[Mapping[str, Any]]) -> None:
        """Reports of steps, oldest first: the first one that ended after a loss is written down."""
        for report in reports:
            if self._lost_at is not None and report["finished_at"] > self._lost_at:
                self._write("step", at=report["finished_at"], step=report["step"])
                self._lost_at = None

    def close(self) -> None:
        self._file.close()

    def _write(self, event: str, at: float | None = None, **more: Any) -> float:
        at = time.time() if at is None else at
        self._file.write(json.dumps({"event": event, **more, "at": at}) + "\n")
        return at


@dataclass(slots=True)
class Death:
    """One loss. Times are Unix seconds, None for what did not happen (yet)."""

    member: str
    role: str
    incarnation: int
    reason: str
    noticed_at: float
    back_at: float | None = None
    step_at: float | None = None  # when the next step of training ended

    def __str__(self) -> str:
        back = f"back after {self.back_at - self.noticed_at:.1f} s" if self.back_at else "not back"
        return f"{self.member} was lost ({' '.join(self.reason.split())[:120]}), {back}"


def read_deaths(run_dir: Path | str) -> list[Death]:
    """Every loss of the run, oldest first; a line that was cut short by a killed driver is left out."""
    path, deaths = Path(run_dir) / FILE, list[Death]()
    text = path.read_text("utf-8") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            continue
        event = json.loads(line)
        match event["event"]:
            case "lost":
                said = (event[name] for name in ("member", "role", "incarnation", "reason", "at"))
                deaths.append(Death(*said))
            case "back":
                for death in deaths:  # also those of attempts to fill the place in between
                    if death.member == event["member"] and death.back_at is None:
                        death.back_at = event["at"]
            case "step":
                for death in deaths:
                    death.step_at = death.step_at or event["at"]
    return deaths
