"""Metrics of a run, twice: `metrics.jsonl` for programs and `tb/` for TensorBoard.

The JSON lines are the record. Each is flushed whole, so a reader that comes while the run goes on, or after a crash,
finds whole lines and at most one torn one at the end. On resume the lines of steps that will be done again are cut
before the first new one is written, and TensorBoard is told to forget those steps, so no step appears twice.

TensorBoard's own event writer is used directly: it needs no torch, so the driver that writes metrics loads none.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from services.runs.atomic import write_atomic

NONFINITE = "telemetry/nonfinite"
HISTOGRAM_BINS = 30


class MetricsWriter:
    """Appends one line per `write` to `run_dir/metrics.jsonl`, and the same values to `run_dir/tb/`.

    `resume_at` is the first step that will be written: everything from there on is cut out first. ValueError when the
    run has metrics already and `resume_at` is not given. A context manager; one writer per run at a time.
    """

    def __init__(self, run_dir: str | Path, resume_at: int | None = None) -> None:
        self.path = Path(run_dir) / "metrics.jsonl"
        self.nonfinite = 0  # values written as null since this writer was made
        if resume_at is not None:
            _cut(self.path, resume_at)
        elif self.path.exists() and self.path.stat().st_size:
            raise ValueError(
                f"{self.path} has lines already: pass resume_at, the first step to write, to go on with it"
            )
        self._file = self.path.open("a", encoding="utf-8")
        _await_a_new_second(Path(run_dir) / "tb")
        self._events = EventFileWriter(str(Path(run_dir) / "tb"))
        if resume_at is not None:
            self._add_event(resume_at, session_log=SessionLog(status=SessionLog.START))

    def write(
        self,
        step: int,
        metrics: Mapping[str, float | None],
        histograms: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """One line `{"step", "time" (Unix seconds), metrics...}`; histograms go to TensorBoard alone.

        NaN and infinities become null and are counted, in the line as "telemetry/nonfinite" and in `nonfinite`. None
        (nothing to say at this step) becomes null and is not counted. ValueError for a metric that is called step or
        time, TypeError for a value that is no number.
        """
        if taken := {"step", "time"} & metrics.keys():
            raise ValueError(f"a metric cannot be called {sorted(taken)[0]!r}: the line has that key; rename it")
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        values = {name: finite_or_none(number) for name, number in numbers.items()}
        if bad := sum(numbers[name] is not None and values[name] is None for name in values):
            values[NONFINITE] = float(bad)
            self.nonfinite += bad

        self._file.write(json.dumps({"step": int(step), "time": time.time(), **values}, allow_nan=False) + "\n")
        self._file.flush()

        summaries = [Summary.Value(tag=name, simple_value=v) for name, v in values.items() if v is not None]
        for name, samples in (histograms or {}).items():
            if finite := [float(s) for s in samples if math.isfinite(s)]:
                summaries.append(Summary.Value(tag=name, histo=_histogram(finite)))
        self._add_event(step, summary=Summary(value=summaries))

    def close(self) -> None:
        self._file.close()
        self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add_event(self, step: int, **what: Any) -> None:
        self._events.add_event(Event(wall_time=time.time(), step=step, **what))
        self._events.flush()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl (given itself, or its run folder), in file order; [] when there is none yet.

    A torn last line, of a writer that was killed or is just writing, is left out. ValueError names any other line that
    is not JSON: such a file was changed by something else.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], 1):  # after the last newline: nothing, or a torn line
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}): remove the line to read the rest"
            ) from error
    return rows


def finite_or_none(value: float | None) -> float | None:
    """JSON has no NaN and no infinities: None in their place."""
    return value if value is not None and math.isfinite(value) else None


def _await_a_new_second(folder: Path) -> None:
    """Until no event file has this second in its name: TensorBoard reads files in the order of their names."""
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)


def _cut(path: Path, resume_at: int) -> None:
    kept = [row for row in read_metrics(path) if row["step"] < resume_at]
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, str):
            raise TypeError("a string")
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} is {value!r}, a {type(value).__name__}, but must be a number") from error


def _histogram(values: list[float]) -> HistogramProto:
    """TensorBoard's histogram: `bucket[i]` counts values up to `bucket_limit[i]`."""
    array = np.asarray(values, dtype=np.float64)
    counts, edges = np.histogram(array, bins=HISTOGRAM_BINS)
    return HistogramProto(
        min=array.min(),
        max=array.max(),
        num=array.size,
        sum=array.sum(),
        sum_squares=np.square(array).sum(),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
