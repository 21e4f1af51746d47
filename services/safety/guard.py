"""The guard that notices when a run gets better at its training signal and worse, or no better, at the task.

It is a fold over updates, one per training step: the same updates make the same state, so a resumed run replays those
of the steps that its checkpoint has. Most updates bring only an in-loop reward and a KL; one that also brings a
held-out score is a *tick*. At a tick the mean in-loop reward since the last one and the held-out score are smoothed,
both on this clock: smoothed on different clocks two figures that rise together would drift apart by their lags alone.

    step      0     1     2     3     4     5      smoothing 0.5
    in-loop  0.20  0.30  0.40  0.60  0.60  0.80
    held-out  -     -    0.30   -     -    0.20
    tick                  ▲                 ▲
    smoothed in-loop     0.300             0.300 + 0.5 (0.667 - 0.300) = 0.483
    smoothed held-out    0.300             0.300 + 0.5 (0.200 - 0.300) = 0.250
    gap                  0.000             0.233

It fires, once and for good, at a step that is not in the warm-up, when

    kl          this step's KL to the initial policy >= kl_hard_stop (not smoothed: one such step is enough)
    divergence  at `patience` ticks in a row the smoothed held-out score fell and the smoothed in-loop reward rose, and
                over them together the former lost at least `min_decline`
    gap         at a tick, the gap exceeds that of the warm-up's last tick by `gap_limit` or more (without a tick in the
                warm-up: that of the first one after it)

With the figures above, `min_steps = 3` and `gap_limit = 0.2` it fires at step 5: 0.233 - 0.000 >= 0.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from services.safety.config import GuardConfig

Reason = Literal["kl", "divergence", "gap"]

ADVICE: dict[Reason, str] = {"kl": "kl_hard_stop", "divergence": "patience or min_decline", "gap": "gap_limit"}


class CollapseStopError(RuntimeError):
    """A guard fired. The message says why, and how to go on all the same; `verdict` has the figures."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(
            f"{verdict}: compare the policy with the initial one on tasks of your own; to go on all the same, resume "
            f"with a higher safety.{ADVICE[verdict.reason]}, or with safety.on_fire = warn"
        )
        self.verdict = verdict

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.verdict,)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a guard fired, at which step, and the figures at that time (None: not known)."""

    reason: Reason
    step: int
    in_loop: float | None  # smoothed
    held_out: float | None  # smoothed
    gap: float | None
    kl: float | None
    value: float  # what reached the limit: the KL, the fall of the held-out score, the growth of the gap
    limit: float

    def __str__(self) -> str:
        what = {
            "kl": "the KL to the initial policy reached {value:.4g} nats per token (kl_hard_stop {limit:g})",
            "divergence": "the held-out score fell by {value:.4g} to {held_out:.4g} (min_decline {limit:g}) while the "
            "in-loop reward rose to {in_loop:.4g}",
            "gap": "the gap between in-loop reward {in_loop:.4g} and held-out score {held_out:.4g} grew by {value:.4g} "
            "since the warm-up (gap_limit {limit:g})",
        }[self.reason]
        return f"the held-out guard fired at step {self.step}: {what.format(**asdict(self))}"


@dataclass(slots=True)
class _State:
    """Everything that updates change; json-able but for the verdict."""

    step: int = -1  # of the last update
    kl: float | None = None  # of the last update that had one
    pending_sum: float = 0.0  # in-loop rewards since the last tick
    pending: int = 0
    in_loop: float | None = None  # smoothed
    held_out: float | None = None  # smoothed
    ticks: int = 0
    falling: int = 0  # ticks in a row at which the two diverged
    fell_from: float = 0.0  # the held-out score before the first of them
    first_gap: float | None = None  # the gap that later ones are compared with
    skipped: int = 0  # held-out evaluations without a score
    unusable: int = 0  # in-loop rewards and KLs that were no numbers
    verdict: Verdict | None = None


class HeldOutGuard:
    """Takes one update per training step. Reading it changes nothing; once fired it stays fired."""

    def __init__(self, config: GuardConfig | None = None) -> None:
        self.config = config or GuardConfig()
        self._state = _State()

    def update(
        self, step: int, in_loop: float | None = None, held_out: float | None = None, kl: float | None = None
    ) -> Verdict | None:
        """What is known of `step`: mean in-loop reward, held-out score, KL to the initial policy (nats per token).

        None: not measured at this step. NaN: measured without a result, which is counted and never taken for 0; an
        infinite KL is one. A step that is not after the last one changes nothing. Returns the verdict once fired.
        """
        state = self._state
        if step <= state.step:
            return state.verdict
        state.step = step
        if (kl := self._number(kl, math.isnan)) is not None:
            state.kl = kl
        if (in_loop := self._number(in_loop)) is not None:
            state.pending_sum, state.pending = state.pending_sum + in_loop, state.pending + 1
        ticks = held_out is not None and math.isfinite(held_out) and self._tick(float(held_out))
        state.skipped += held_out is not None and not math.isfinite(held_out)
        if state.verdict is None and not self._warming_up:
            state.verdict = self._judge(kl, ticks)
        return state.verdict

    # ---- what it knows -------------------------------------------------------------------------------------------

    @property
    def fired(self) -> bool:
        return self._state.verdict is not None

    @property
    def verdict(self) -> Verdict | None:
        return self._state.verdict

    @property
    def in_loop(self) -> float | None:
        """Smoothed, as of the last tick."""
        return self._state.in_loop

    @property
    def held_out(self) -> float | None:
        """Smoothed, as of the last tick."""
        return self._state.held_out

    @property
    def gap(self) -> float | None:
        """In-loop reward minus held-out score, both smoothed, as of the last tick."""
        state = self._state
        return None if state.in_loop is None or state.held_out is None else state.in_loop - state.held_out

    @property
    def kl(self) -> float | None:
        return self._state.kl

    @property
    def skipped(self) -> int:
        """Evaluations that brought no score."""
        return self._state.skipped

    def state_dict(self) -> dict[str, Any]:
        """Json-able, except that a KL may be infinite."""
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        verdict = state["verdict"]
        self._state = _State(**{**state, "verdict": Verdict(**verdict) if verdict else None})

    # ---- the fold ------------------------------------------------------------------------------------------------

    @property
    def _warming_up(self) -> bool:
        return self._state.step < self.config.min_steps

    def _number(self, value: float | None, unusable: Callable[[float], bool] | None = None) -> float | None:
        if value is None:
            return None
        if unusable(value) if unusable else not math.isfinite(value):
            self._state.unusable += 1
            return None
        return float(value)

    def _tick(self, held_out: float) -> bool:
        """Smooth both figures; False while no in-loop reward is known that the score could be compared with."""
        state = self._state
        before = state.in_loop, state.held_out
        if state.pending:
            state.in_loop = self._smoothed(state.in_loop, state.pending_sum / state.pending)
        state.held_out = self._smoothed(state.held_out, held_out)
        state.pending_sum, state.pending = 0.0, 0
        state.ticks += 1
        self._count_divergence(*before)
        if self._warming_up or state.first_gap is None:
            state.first_gap = self.gap
        return state.in_loop is not None

    def _smoothed(self, before: float | None, value: float) -> float:
        # In this form equal values stay equal: no rounding can make a constant score fall.
        return value if before is None else before + (1.0 - self.config.smoothing) * (value - before)

    def _count_divergence(self, in_loop: float | None, held_out: float | None) -> None:
        state = self._state
        if (
            self._warming_up
            or in_loop is None
            or held_out is None
            or state.in_loop is None
            or state.held_out is None
            or not (state.held_out < held_out and state.in_loop > in_loop)
        ):
            state.falling = 0
            return
        if state.falling == 0:
            state.fell_from = held_out
        state.falling += 1

    def _judge(self, kl: float | None, tick: bool) -> Verdict | None:
        state, config = self._state, self.config
        if kl is not None and config.kl_hard_stop is not None and kl >= config.kl_hard_stop:
            return self._verdict("kl", kl, config.kl_hard_stop)
        if not tick:
            return None
        if state.falling >= config.patience and state.held_out is not None:
            fell = state.fell_from - state.held_out
            if fell >= config.min_decline:
                return self._verdict("divergence", fell, config.min_decline)
        if config.gap_limit is not None and self.gap is not None and state.first_gap is not None:
            grown = self.gap - state.first_gap
            if grown >= config.gap_limit:
                return self._verdict("gap", grown, config.gap_limit)
        return None

    def _verdict(self, reason: Reason, value: float, limit: float) -> Verdict:
        state = self._state
        return Verdict(reason, state.step, state.in_loop, state.held_out, self.gap, state.kl, value, limit)


def raise_if_fired(guard: HeldOutGuard) -> None:
    """CollapseStopError once the guard has fired."""
    if guard.verdict is not None:
        raise CollapseStopError(guard.verdict)
