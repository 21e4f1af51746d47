"""The held-out guard of a run: who feeds it, what it says in the metrics, and what is left of it on disk.

    row of step k ──watch──▶ in-loop reward, KL ────────────────────┐
       │ k is due                                                   ▼
       └──▶ an evaluation begins ··· its score, with a later row ─▶ HeldOutGuard ─▶ safety/* of that row
                                                                    │
                                                              guard.jsonl, one line per row

`guard.jsonl` holds what the guard was fed, not what it concluded. To go on at step k is to replay the lines before it:
the state is then that of the checkpoint, judged by the limits that are set now. So a guard that fired has fired again
when the run is resumed, unless its limit was raised.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TextIO

from launch.evaluation import Evaluation
from services.rollouts.tasks import TaskStream, held_out_seeds
from services.runs.atomic import write_atomic
from services.safety.config import SafetyConfig
from services.safety.guard import CollapseStopError, HeldOutGuard
from services.safety.split import HeldoutSplit
from services.telemetry.metrics import read_metrics

FILE = "guard.jsonl"
FED = ("in_loop", "held_out", "kl")

Evaluate = Callable[[list[int]], Coroutine[Any, Any, Evaluation]]


class RunGuard:
    """The guard of a run of `steps` steps whose folder is `run_dir`. `evaluate` plays the tasks of these seeds.

    It watches the rows of one trainer, which trains the tasks of `stream`; replicas differ from it no longer than until
    their next sync. Without `safety.evaluate_every` it does nothing, and has nothing to say. Belongs to the driver's
    event loop.
    """

    def __init__(
        self,
        safety: SafetyConfig,
        run_dir: Path,
        steps: int,
        stream: TaskStream,
        evaluate: Evaluate,
        say: Callable[[str], None],
    ) -> None:
        self.safety, self.path, self.steps, self.say = safety, run_dir / FILE, steps, say
        self.seeds = held_out_seeds(safety.held_out_tasks, stream.seed) if safety.on else []
        self.guard = HeldOutGuard(safety)
        self._evaluate = evaluate
        self._running: asyncio.Task[Evaluation] | None = None
        self._settled = False  # no evaluation begins any more
        self._file: TextIO | None = None
        self._split = HeldoutSplit(held_out=[(str(each), None) for each in self.seeds])
        self._stream = stream

    # ---- what the driver and the user ask ------------------------------------------------------------------------

    @property
    def warning(self) -> str:
        """One sentence once the guard has fired, else nothing."""
        return str(self.guard.verdict) if self.guard.verdict else ""

    @property
    def stops(self) -> bool:
        """Whether the run must end."""
        return self.guard.fired and self.safety.on_fire == "stop"

    def raise_if_it_stops(self) -> None:
        """CollapseStopError, with what the user can do, when the guard has fired and is to stop the run."""
        if self.guard.verdict is not None and self.stops:
            raise CollapseStopError(self.guard.verdict)

    # ---- the steps of the run ------------------------------------------------------------------------------------

    def open(self, step: int) -> None:
        """The run goes on with `step`: replay what was known before it, and forget the rest."""
        if not self.safety.on:
            return
        self._abandon()
        self.close()
        kept = [line for line in read_metrics(self.path) if line["step"] < step]
        self.guard = HeldOutGuard(self.safety)
        for line in kept:
            self.guard.update(line["step"], *[_number(line.get(name)) for name in FED])
        write_atomic(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")

    def watch(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Take in the row of a step, begin an evaluation when one is due, and say what belongs into that row."""
        if not self.safety.on or self._file is None:
            return {}
        figures: dict[str, float] = {}
        held_out, version = None, None
        # The score of one that began at the last step would come after the last row.
        due = step % (self.safety.evaluate_every or 1) == 0 and step + 1 < self.steps and not self._settled
        if self._running is not None and self._running.done():
            held_out, version, figures = self._result(self._running)
            self._running = None
        if due and self._running is None:
            self._check_split(metrics)
            self._running = asyncio.get_running_loop().create_task(self._evaluate(self.seeds))
        elif due:
            self.say(f"no evaluation at step {step}: the one before is not done yet")
            held_out = math.nan
        fed = {"in_loop": metrics.get("reward/mean"), "held_out": held_out, "kl": metrics.get("policy/ref_kl")}
        self._write({"step": step, "version": version, **{name: _jsonable(value) for name, value in fed.items()}})
        fired_before = self.guard.fired
        self.guard.update(step, **fed)
        if self.guard.fired and not fired_before:
            self.say(self.warning)
        figures |= {"safety/fired": float(self.guard.fired), "safety/skipped": float(self.guard.skipped)}
        if self.guard.gap is not None:
            figures["safety/gap"] = self.guard.gap
        if fed["kl"] is not None:
            figures["safety/kl"] = fed["kl"]
        return figures

    async def settle(self) -> None:
        """Begin no evaluation any more, and end the one under way; its generators are let go."""
        self._settled = True
        running = self._abandon()
        if running is not None:
            await asyncio.wait({running}, timeout=30.0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _result(self, task: asyncio.Task[Evaluation]) -> tuple[float, int | None, dict[str, float]]:
        """Score (NaN: none), version and figures of an evaluation that is over."""
        if task.cancelled() or task.exception() is not None:
            self.say(f"no evaluation: {'it was cancelled' if task.cancelled() else repr(task.exception())}")
            return math.nan, None, {}
        evaluation = task.result()
        for seed in evaluation.seeds:
            self._split.hold_out(str(seed))
        figures = {
            "safety/evaluation_s": evaluation.seconds,
            "safety/held_out_scored": float(len(evaluation.scores)),
            "safety/held_out_discarded": float(evaluation.discarded),
        }
        if math.isnan(evaluation.score):
            return math.nan, None, figures
        figures |= {
            "safety/held_out_reward": evaluation.score,
            "safety/held_out_version": float(evaluation.version),
        }
        return evaluation.score, evaluation.version, figures

    def _check_split(self, metrics: dict[str, float]) -> None:
        """LeakedTaskError if a task that this run has issued so far is one that it evaluates on."""
        while self._stream.cursor < metrics.get("buffer/issued", 0.0):
            self._split.train(str(self._stream.next().seed))

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps({name: value for name, value in line.items() if value is not None}) + "\n")
        self._file.flush()

    def _abandon(self) -> asyncio.Task[Evaluation] | None:
        """Forget the evaluation under way, of a course that the run does not follow any more."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
        return running


def _jsonable(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity: their names in their place."""
    return value if value is None or math.isfinite(value) else repr(value)


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)
