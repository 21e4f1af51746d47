"""The live progress table of a run: one row per step, and who is idle and how much.

On a terminal the last rows stay in place and move up; anywhere else (a log file, a Slurm job, a notebook's pipe) each
step is one plain line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

# metric name -> (title, format); a metric that a step does not have shows as "-"
COLUMNS = {
    "reward/mean": ("reward", ".3f"),
    "policy/loss": ("policy loss", ".4f"),
    "sdpo/loss": ("sdpo loss", ".4f"),
    "replay/loss": ("replay loss", ".4f"),
    "staleness/mean": ("stale mean", ".2f"),
    "staleness/max": ("stale max", ".0f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
}
IDLE = "idle/"  # idle/<role> is a share from 0 to 1


class ProgressTable:
    """`with ProgressTable() as table: table.update({"step": 3, "reward/mean": 0.5, "idle/trainer": 0.2, ...})`.

    Shows the `rows` newest steps on a terminal. A role gets an idle column when it first reports.
    """

    def __init__(self, console: Console | None = None, rows: int = 15) -> None:
        self._console = console or Console()
        self._rows: deque[dict[str, float | None]] = deque(maxlen=rows)
        self._roles: list[str] = []
        self._live: Live | None = None

    def __enter__(self) -> ProgressTable:
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, row: Mapping[str, float | None]) -> None:
        """Show one step: its metrics by name, with the key "step", and "replica" where there are several trainers.

        Metrics without a column are ignored.
        """
        self._rows.append(dict(row))
        new = [name.removeprefix(IDLE) for name in row if name.startswith(IDLE)]
        self._roles += [role for role in new if role not in self._roles]
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            # past rich's own printing, which would break the line at 80 columns
            self._console.file.write(self._line(row) + "\n")
            self._console.file.flush()

    def _table(self) -> Table:
        table = Table(expand=False)
        for title in ("step", *(title for title, _ in COLUMNS.values()), *(f"idle {role}" for role in self._roles)):
            table.add_column(title, justify="right")
        for row in self._rows:
            table.add_row(_step(row), *_figures(row), *self._idle(row))
        return table

    def _line(self, row: Mapping[str, float | None]) -> str:
        titles = (title for title, _ in COLUMNS.values())
        parts = [f"{title} {figure}" for title, figure in zip(titles, _figures(row), strict=True)]
        idle = ", ".join(f"{role} {share}" for role, share in zip(self._roles, self._idle(row), strict=True))
        return "  ".join([f"step {_step(row)}", *parts, *([f"idle: {idle}"] if idle else [])])

    def _idle(self, row: Mapping[str, float | None]) -> list[str]:
        return [_text(row.get(IDLE + role), ".0%") for role in self._roles]


def _step(row: Mapping[str, float | None]) -> str:
    replica = row.get("replica")
    return _text(row.get("step"), ".0f") + (f" (replica {replica:.0f})" if replica else "")


def _figures(row: Mapping[str, float | None]) -> list[str]:
    return [_text(row.get(name), spec) for name, (_, spec) in COLUMNS.items()]


def _text(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
