"""Proof that no held-out task is among those that train, by id and by content.

A score on tasks that were trained is no held-out score. Ids alone do not show it: the same problem may stand in both
lists under two ids, with another indentation, or with the keys of its record in another order.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable
from typing import Any, Literal

Side = Literal["train", "held_out"]


class LeakedTaskError(ValueError):
    """A task is on both sides. The message names it, and its other id where only the content is the same."""


class HeldoutSplit:
    """The tasks of either side, each an id and, where it is known, its content: a text or a json-able record.

        HeldoutSplit(train=[("a", "3+4"), ("b", "5*6")], held_out=[("c", "7-1")])

    Tasks may be added later. Whatever would put an id or a content on both sides raises LeakedTaskError and changes
    nothing; adding a task to its own side again is harmless.
    """

    def __init__(self, train: Iterable[tuple[str, Any]] = (), held_out: Iterable[tuple[str, Any]] = ()) -> None:
        self._ids: dict[str, Side] = {}
        self._contents: dict[str, tuple[Side, str]] = {}  # hash -> side, the first id with this content
        for task_id, content in train:
            self.train(task_id, content)
        for task_id, content in held_out:
            self.hold_out(task_id, content)

    def train(self, task_id: str, content: Any = None) -> None:
        """This task trains. None: its content is not known, so only its id is compared."""
        self._add("train", task_id, content)

    def hold_out(self, task_id: str, content: Any = None) -> None:
        """This task is held out."""
        self._add("held_out", task_id, content)

    def count(self, side: Side) -> int:
        """How many ids are on a side."""
        return sum(each == side for each in self._ids.values())

    def _add(self, side: Side, task_id: str, content: Any) -> None:
        other = "train" if side == "held_out" else "held_out"
        if self._ids.get(task_id) == other:
            raise LeakedTaskError(f"task {task_id!r} is in both the train and the held_out set: remove it from one")
        digest = None if content is None else content_hash(content)
        if digest is not None:
            found, known_as = self._contents.setdefault(digest, (side, task_id))
            if found == other:
                raise LeakedTaskError(
                    f"task {task_id!r} of the {side} set has the same content as {known_as!r} of the {other} set: "
                    "remove one of them"
                )
        self._ids[task_id] = side


def content_hash(content: Any) -> str:
    """sha256 of a text or json-able record, the same for texts that differ only in white space or Unicode form, and
    for records whose keys stand in another order. TypeError for what json cannot hold."""
    text = json.dumps(_plain(content), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(content: Any) -> Any:
    if isinstance(content, str):
        return " ".join(unicodedata.normalize("NFKC", content).split())
    if isinstance(content, dict):
        return {_plain(str(key)): _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    return content
