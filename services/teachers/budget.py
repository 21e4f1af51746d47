"""What calls cost, and a sum of money that calls in flight cannot exceed.

Before a call is sent its worst case is reserved; afterwards the reservation gives way to the real cost. Because
`spent + reserved` never exceeds the limit when a reservation is made, the bill cannot either, in whatever order calls
end. A call whose outcome is unknown is settled at its worst case: the money may be gone.

The class does no I/O and awaits nothing. `Ledger` drives it, under its lock.
"""

from __future__ import annotations

import logging
import math

from services.teachers.config import TeacherConfig

logger = logging.getLogger(__name__)

# What a chat template may add around the texts, in tokens. Vendors document 3 to 10 per message.
TEMPLATE_TOKENS_PER_MESSAGE = 32
TEMPLATE_TOKENS_PER_CHAT = 64


class BudgetExceeded(Exception):
    """The worst case of a call no longer fits the budget. Nothing was sent."""


def cost_usd(teacher: TeacherConfig, prompt_tokens: int, completion_tokens: int) -> float:
    """Price of a call in USD."""
    prompt = prompt_tokens * teacher.usd_per_million_prompt
    return (prompt + completion_tokens * teacher.usd_per_million_completion) / 1e6


def worst_case_usd(teacher: TeacherConfig, body: bytes, messages: int, max_tokens: int) -> float:
    """An upper bound of a call's price in USD.

    A byte-level tokenizer makes at most one token per byte, so the JSON `body` (in bytes) plus the template's additions
    for `messages` messages bound the prompt; `max_tokens` bounds the completion.
    """
    prompt_tokens = len(body) + TEMPLATE_TOKENS_PER_MESSAGE * messages + TEMPLATE_TOKENS_PER_CHAT
    return cost_usd(teacher, prompt_tokens, max_tokens)


class Budget:
    """`max_total_usd` and what is left of it."""

    def __init__(self, max_total_usd: float) -> None:
        if not (max_total_usd >= 0 and math.isfinite(max_total_usd)):
            raise ValueError(f"max_total_usd must be a finite amount of at least 0, not {max_total_usd}")
        self.max_total_usd = max_total_usd
        self.overruns = 0  # calls that cost more than their worst case, i.e. wrong prices or an API that ignores limits
        self._spent = 0.0
        self._reserved: dict[str, float] = {}

    @property
    def spent_usd(self) -> float:
        return self._spent

    @property
    def reserved_usd(self) -> float:
        # Summed anew each time: adding and subtracting a running total would drift. From a list, because another
        # thread may be asking while the ledger's adds a call.
        return math.fsum(list(self._reserved.values()))

    @property
    def remaining_usd(self) -> float:
        return self.max_total_usd - self._spent - self.reserved_usd

    def check(self, usd: float) -> None:
        """Raise BudgetExceeded unless a reservation of `usd` fits. A free call always does."""
        if usd > 0 and math.fsum([self._spent, *self._reserved.values(), usd]) > self.max_total_usd:
            raise BudgetExceeded(
                f"not asked: the call may cost ${usd:.6f}, but of the budget of ${self.max_total_usd:.6f} "
                f"${self._spent:.6f} are spent and ${self.reserved_usd:.6f} are reserved by calls in flight or of "
                "unknown outcome; raise max_total_usd to go on"
            )

    def hold(self, call_id: str, usd: float) -> None:
        """Reserve `usd` for a call without a check (it was made, or the ledger tells of a call that was sent)."""
        self._reserved[call_id] = usd

    def settle(self, call_id: str, usd: float) -> None:
        """The call ended and cost `usd`: its reservation is gone. KeyError for a call that holds none."""
        held = self._reserved.pop(call_id)
        self._spent += usd
        if usd > held + 1e-12:
            self.overruns += 1
            logger.warning(
                "a teacher's call cost $%.6f, more than its worst case of $%.6f: the configured prices or "
                "max_tokens_field do not fit this API",
                usd,
                held,
            )
