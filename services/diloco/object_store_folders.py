"""The folders of a store, one per round, and what a replica can tell from them.

    round-00000007/
      contribution-0000-<time>-<nonce>.pt    a replica's tensors and what they count for; never written twice
      MEMBERS                                put if absent, once: which of these files the round averages
      rejoin-0002                            a replica that is behind waits for a state in this round
      state-0000.pt                          one, as it was before this round, written for those who wait
      healed-0002                            it was taken over: that replica is in step again
    again-0001/round-00000005/ ...           the same, after all replicas were restarted

A line is a sequence of rounds that follow from each other: the folders at the root, or those of one again-NNNN. A new
line begins when every replica waits for a state that none of them has. The last line is the one that counts.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field

from services.diloco.object_store_files import Store

MEMBERS = "MEMBERS"
CONTRIBUTION = re.compile(r"contribution-(\d{4})-\d{20}-[0-9a-f]{8}\.pt")
STATE = re.compile(r"state-(\d{4})\.pt")
MARK = re.compile(r"(rejoin|healed)-(\d{4})")
ROUND = re.compile(r"round-(\d{8})")
LINE = re.compile(r"again-(\d{4})")


@dataclass
class Look:
    """One look at a round's folder."""

    fixed: bool = False
    contributions: dict[int, list[str]] = field(default_factory=dict)  # by rank, the newest first
    states: list[str] = field(default_factory=list)
    rejoining: set[int] = field(default_factory=set)
    healed: set[int] = field(default_factory=set)

    @property
    def nobody_asks(self) -> bool:
        """No replica waits for a state that nobody has written yet."""
        return bool(self.states) or self.rejoining <= self.healed

    @property
    def nobody_else(self) -> bool:
        """Nothing is there but replicas that wait for a state."""
        return not (self.fixed or self.contributions or self.states or self.healed)


class RoundFolders:
    """Replica `store.rank`'s view of the rounds in a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.line = 0  # 0: the rounds at the root

    def path(self, number: int, name: str = "") -> str:
        """Of a file in the folder of a round, or of the folder."""
        return f"{_prefix(self.line)}round-{number:08d}/{name}".rstrip("/")

    def look(self, number: int) -> Look:
        """What is there now. Names that no replica writes are as if absent."""
        look = Look()
        for name in reversed(self.store.names(self.path(number))):
            if match := CONTRIBUTION.fullmatch(name):
                look.contributions.setdefault(int(match[1]), []).append(name)
            elif match := MARK.fullmatch(name):
                (look.rejoining if match[1] == "rejoin" else look.healed).add(int(match[2]))
            elif STATE.fullmatch(name):
                look.states.insert(0, name)
            elif name == MEMBERS:
                look.fixed = True
        return look

    def numbers(self) -> list[int]:
        """The rounds of this line that have a folder, the last first."""
        names = self.store.names(_prefix(self.line).rstrip("/"))
        return sorted((int(match[1]) for name in names if (match := ROUND.fullmatch(name))), reverse=True)

    def newest(self) -> int:
        """The last round that some replica is known to have finished: its members are fixed, or the next has begun."""
        for number in self.numbers():
            look = self.look(number)
            if look.fixed:
                return number
            if look.contributions or look.states:
                return number - 1
        return 0

    def last_line(self) -> int:
        """The line that counts; `line` is the one that is looked at."""
        return max((int(match[1]) for name in self.store.names() if (match := LINE.fullmatch(name))), default=0)

    def begin_line(self) -> None:
        """Begin the line after this one; all who see that nobody is left in this one begin the same."""
        self.store.write(f"{_prefix(self.line + 1)}begun", b"{}")

    def new_contribution(self) -> str:
        """A name; of those of one rank the newest comes first."""
        return f"contribution-{self.store.rank:04d}-{time.time_ns():020d}-{secrets.token_hex(4)}.pt"

    def mark(self, number: int, kind: str) -> None:
        """Leave the mark `rejoin` or `healed` of this replica."""
        self.store.write(self.path(number, f"{kind}-{self.store.rank:04d}"), b"{}")

    def unmark(self, number: int) -> None:
        """Take back the mark `rejoin` of an earlier process of this rank."""
        self.store.remove(self.path(number, f"rejoin-{self.store.rank:04d}"))

    def remove_until(self, number: int) -> None:
        """Delete the rounds up to this one, and what earlier lines left."""
        for old in self.numbers():
            if old <= number:
                self.store.remove(self.path(old))
        for name in self.store.names() if self.line else []:
            if ROUND.fullmatch(name) or ((match := LINE.fullmatch(name)) and int(match[1]) < self.line):
                self.store.remove(name)


def _prefix(line: int) -> str:
    return f"again-{line:04d}/" if line else ""


def rank_of(contribution: str) -> int:
    match = CONTRIBUTION.fullmatch(contribution)
    assert match is not None
    return int(match[1])
