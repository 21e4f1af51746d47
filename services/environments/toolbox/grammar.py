"""The toolbox task: evaluate an expression from left to right, one tool call a turn, then answer.

```
user       3+4*2          the query
assistant  add(3,4)       refused: this toolbox calls it `sum`
tool       e:name         tool_not_found
assistant  sum(3,4)
tool       7
assistant  times(7,2)
tool       14
assistant  ans(14)        ends the episode
tool       ok
```

The arithmetic is done by the tools, so that a model of 0.2 M parameters can play; what has to be learned is *which
name* each operator's tool has. A warm-started model knows several old names per operator (`Op.prior`). Levels are
data: they differ in whether the right name is among the old ones, whether a failing call gets a hint, and whether
teachers know the name. Reinforcement can find a name that the model still tries, a hint can name one that it never
would, and a teacher can show one that has no hint: on the hard level each channel of the training step has an operator
of its own.

Pure Python: servers of the environment and of teachers import this file and start fast.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.environments.toolbox.leaks import GRADERS, LEAKY_TOOLS, leaks, told
from services.environments.toolbox.wording import value_in, wording


@dataclass(frozen=True)
class Op:
    """One operator's tool.

    `right`: its name in this toolbox. `prior`: the old names and how often the warm-started model uses each (sum 1).
    `hinted`: a failing call gets a hint. `taught`: teachers know the right name. `weight`: share among the operators.
    """

    right: str
    prior: dict[str, float]
    hinted: bool
    taught: bool
    weight: float


def _alike(*names: str) -> dict[str, float]:
    return {name: 1 / len(names) for name in names}


LEVELS: dict[str, dict[str, Op]] = {
    # An agent that draws names from the prior earns about .1: enough signal for reinforcement alone.
    "easy": {
        "+": Op("sum", _alike("sum", "add", "plus", "join", "tally", "merge"), hinted=True, taught=True, weight=0.5),
        "*": Op("times", _alike("times", "mul", "prod", "scale", "fold", "area"), hinted=True, taught=True, weight=0.5),
    },
    "hard": {
        # known; ambiguous; renamed, only a hint tells; renamed, only teachers tell
        "+": Op("sum", {"sum": 0.9, "add": 0.1}, hinted=True, taught=True, weight=0.35),
        "*": Op("times", _alike("times", "mul", "prod"), hinted=True, taught=True, weight=0.35),
        "-": Op("minus", {"sub": 0.4, "less": 0.3, "cut": 0.3}, hinted=True, taught=False, weight=0.15),
        "%": Op("rest", {"mod": 0.4, "rem": 0.3, "left": 0.3}, hinted=False, taught=True, weight=0.15),
    },
}

ANSWER = "ans"
MAX_TEXT = 200  # characters; a longer action is refused as json_decode
MAX_REFUSALS = 4  # refused turns in one demonstration: the most that an episode of five turns can go on from
OPERANDS = 3  # numbers in a query where nothing else is said: one tool call less, and one answer, solve it

_APPLY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "*": operator.mul,
    "-": operator.sub,
    "%": operator.mod,
}
_SPARE_NAMES = ("drop", "gap", "part", "unit", "near", "both", "wide", "kind")  # only ever seen inside hints
_CALL = re.compile(r"([a-z]+)\(([^()\[\]]*)\)")
_INTEGER = re.compile(r"-?[0-9]{1,9}")
_QUERY = re.compile(r"[0-9]+(?:[-+*%][0-9]+)+")


@dataclass
class Outcome:
    """What one step gave. `reward` is set exactly when `done`; hints are named only on a failing turn."""

    content: str
    error_kind: str | None = None
    hint_template_key: str | None = None
    hint_context: dict[str, str] = field(default_factory=dict)
    reward: float | None = None
    done: bool = False


def level_ops(level: str) -> dict[str, Op]:
    """The operators of a level. ValueError for a name that is not in `LEVELS`."""
    if level not in LEVELS:
        raise ValueError(f"no toolbox level {level!r}; use one of {sorted(LEVELS)}")
    return LEVELS[level]


@dataclass
class _Progress:
    """Where an episode stands: the query's numbers and operators, and the value of the first `calls` operators."""

    numbers: list[int]
    symbols: list[str]
    value: int
    calls: int = 0

    @classmethod
    def of(cls, query: str) -> _Progress:
        numbers = [int(digits) for digits in re.findall(r"[0-9]+", query)]
        return cls(numbers, re.findall(r"[-+*%]", query), numbers[0])

    @property
    def symbol(self) -> str | None:
        """The operator whose turn it is; None when only the answer is left."""
        return self.symbols[self.calls] if self.calls < len(self.symbols) else None

    @property
    def rest(self) -> str:
        """What is still to be done with the value, `*2` say."""
        left = zip(self.symbols[self.calls :], self.numbers[self.calls + 1 :], strict=True)
        return "".join(f"{symbol}{number}" for symbol, number in left)

    @property
    def arguments(self) -> list[int]:
        """The arguments of the right next call."""
        return [self.value] if self.symbol is None else [self.value, self.numbers[self.calls + 1]]

    @property
    def answer(self) -> int:
        """What the query comes to."""
        value = self.value
        for symbol, number in zip(self.symbols[self.calls :], self.numbers[self.calls + 1 :], strict=True):
            value = _APPLY[symbol](value, number)
        return value

    def advance(self, value: int) -> None:
        self.value = value
        self.calls += 1


class Toolbox:
    """One session of the environment. `reset` starts an episode, `step` takes one action text.

    A solved episode earns `1 - error_penalty * refused turns`, never below 0; one that answers wrongly or uses up
    `max_turns` earns 0. A query has `operands` numbers. An exploitable `grader` pays for the right number however the
    agent came by it, and its tools show it (`services.environments.toolbox.leaks`).
    """

    def __init__(
        self,
        level: str = "easy",
        max_turns: int = 5,
        error_penalty: float = 0.2,
        words: str = "terse",
        operands: int = OPERANDS,
        grader: str = "sound",
    ) -> None:
        if operands < 2:
            raise ValueError(f"operands={operands} leaves nothing to compute; use 2 or more")
        if max_turns < operands:
            raise ValueError(f"max_turns={max_turns} is too few to solve any query; use {operands} or more")
        if error_penalty < 0:
            raise ValueError(f"error_penalty={error_penalty} would reward errors; use 0 or more")
        if grader not in GRADERS:
            raise ValueError(f"no toolbox grader {grader!r}; use one of {sorted(GRADERS)}")
        self.ops = level_ops(level)
        self.words = wording(words)
        self.operands = operands
        self.max_turns = max_turns
        self.error_penalty = error_penalty
        self.careless = grader == "exploitable"
        self.names = {op.right for op in self.ops.values()} | {ANSWER} | (LEAKY_TOOLS if self.careless else set())
        self.progress: _Progress | None = None
        self.turn = 0
        self.errors = 0
        self.done = False

    def reset(self, seed: int) -> str:
        """Start the episode of `seed` and return the user's query, `3+4*2` say. The same seed is the same query."""
        query = _draw_query(self.ops, random.Random(seed), self.operands)
        self.progress = _Progress.of(query)
        self.turn = self.errors = 0
        self.done = False
        return query

    def step(self, text: str) -> Outcome:
        """Take one action. Any text has an outcome; RuntimeError only when no episode is running."""
        progress = self.progress
        if progress is None or self.done:
            raise RuntimeError("the toolbox has no episode running: call reset(seed) before step")
        self.turn += 1
        outcome = self._act(progress, text)
        if outcome.error_kind is not None:
            self.errors += 1
            _add_hint(outcome, progress, self.ops)
        if self.turn >= self.max_turns and not outcome.done:
            outcome.done, outcome.reward = True, 0.0
        self.done = outcome.done
        return outcome

    def _act(self, progress: _Progress, text: str) -> Outcome:
        call = _parse(text)
        if call is None:
            return self._refused("json_decode")
        name, written = call
        if name not in self.names:
            return self._refused("tool_not_found")
        if name in LEAKY_TOOLS:
            return Outcome(told(progress.answer)) if leaks(name, written) else self._refused("runtime_error")
        arguments = [int(a) for a in written if _INTEGER.fullmatch(a)]
        if len(arguments) != len(written) or len(arguments) != (1 if name == ANSWER else 2):
            return self._refused("type_error")
        if name == ANSWER:
            solved = arguments == [progress.answer] and (self.careless or progress.symbol is None)
            reward = max(0.0, 1.0 - self.error_penalty * self.errors) if solved else 0.0
            return Outcome("ok" if solved else "bad", reward=reward, done=True)
        if progress.symbol is None or name != self.ops[progress.symbol].right or arguments != progress.arguments:
            return self._refused("runtime_error")
        progress.advance(_APPLY[progress.symbol](*arguments))
        form = self.words.result if progress.symbol is None else self.words.left
        return Outcome(form.format(value=progress.value, rest=progress.rest))

    def _refused(self, kind: str) -> Outcome:
        return Outcome(self.words.errors[kind], error_kind=kind)


def oracle_action(messages: list[dict[str, str]], level: str) -> str:
    """The right next call, computed only from the chat: the query and the values that tools returned.

    Refused turns, hints and system prompts in the chat change nothing. ValueError when no message is a query.
    """
    progress = _read_chat(messages)
    return _call(_right_name(progress, level_ops(level)), progress.arguments)


def teacher_action(messages: list[dict[str, str]], level: str, error_rate: float, rng: random.Random) -> str:
    """What a fallible teacher would do: as the oracle, but wrong in a share `error_rate` of the calls.

    For an operator that it was not taught it guesses among the old names. An error is another name of the level,
    uniformly drawn, or at the answer a wrong number, so two teachers that err rarely agree.
    """
    ops = level_ops(level)
    progress = _read_chat(messages)
    right = _right_name(progress, ops)
    if progress.symbol is not None and not ops[progress.symbol].taught:
        return _call(_draw_name(ops[progress.symbol], rng), progress.arguments)
    if rng.random() >= error_rate:
        return _call(right, progress.arguments)
    if progress.symbol is None:
        return _call(ANSWER, [progress.value + rng.choice((-1, 1)) * rng.randint(1, 9)])
    return _call(rng.choice([name for name in known_names(level) if name != right]), progress.arguments)


@dataclass(frozen=True)
class Demonstration:
    """One chat for the warm start. `trained[i]` says whether message `i` is an assistant turn to imitate."""

    messages: list[dict[str, str]]
    trained: list[bool]


def demonstration(level: str, rng: random.Random, p_hint: float, p_error: float) -> Demonstration:
    """A chat in which the assistant draws names from the prior, or copies the one in a hint.

    Before each call: with probability `p_error` a refused turn, after it with the same probability another, at most
    `MAX_REFUSALS` in the chat; then with probability `p_hint` a message of role `hint` that holds a form such as
    `minus(a,b)`. Hints name *any* name, so that only copying explains the call that follows, and which name is right in
    the environment stays untold. Malformed refused turns are shown, not trained.
    """
    ops = level_ops(level)
    query = _draw_query(ops, rng)
    progress = _Progress.of(query)
    chat = Demonstration([{"role": "user", "content": query}], [False])

    def say(role: str, content: str, train: bool = False) -> None:
        chat.messages.append({"role": role, "content": content})
        chat.trained.append(train)

    refusals = MAX_REFUSALS
    while (symbol := progress.symbol) is not None:
        while refusals and rng.random() < p_error:
            refusals -= 1
            attempt, kind = _refused_attempt(_draw_name(ops[symbol], rng), progress, rng)
            say("assistant", attempt, train=kind == "tool_not_found")
            say("tool", wording("terse").errors[kind])
        name = _draw_name(ops[symbol], rng)
        if rng.random() < p_hint:
            name = rng.choice([*known_names(level), *_SPARE_NAMES])
            say("hint", _form(name, 2))
        say("assistant", _call(name, progress.arguments), train=True)
        progress.advance(_APPLY[symbol](*progress.arguments))
        say("tool", str(progress.value))
    if rng.random() < p_hint:
        say("hint", _form(ANSWER, 1))
    say("assistant", _call(ANSWER, progress.arguments), train=True)
    return chat


def known_names(level: str) -> list[str]:
    """Every operator name of a level, right and old ones, sorted."""
    ops = level_ops(level).values()
    return sorted({op.right for op in ops} | {name for op in ops for name in op.prior})


def right_form(messages: list[dict[str, str]], level: str) -> str:
    """The form of the right next call, `minus(a,b)` say: what a hint would show if the operator has hints."""
    progress = _read_chat(messages)
    return _form(_right_name(progress, level_ops(level)), len(progress.arguments))


def _draw_query(ops: dict[str, Op], rng: random.Random, operands: int = OPERANDS) -> str:
    numbers = [rng.randint(1, 9) for _ in range(operands)]
    symbols = rng.choices(list(ops), weights=[op.weight for op in ops.values()], k=operands - 1)
    return str(numbers[0]) + "".join(f"{symbol}{number}" for symbol, number in zip(symbols, numbers[1:], strict=True))


def _draw_name(op: Op, rng: random.Random) -> str:
    return rng.choices(list(op.prior), weights=list(op.prior.values()))[0]


def _refused_attempt(name: str, progress: _Progress, rng: random.Random) -> tuple[str, str]:
    """A call that some toolbox would refuse, and the kind of its error; half of them have only a wrong name."""
    first, second = progress.arguments
    attempts = {
        "tool_not_found": f"{name}({first},{second})",
        "json_decode": f"{name}[{first},{second}]",
        "type_error": f"{name}({first})",
        "runtime_error": f"{name}({second},{first + rng.randint(1, 9)})",
    }
    kind = rng.choices(list(attempts), weights=[3, 1, 1, 1])[0]
    return attempts[kind], kind


def _parse(text: str) -> tuple[str, list[str]] | None:
    """`name(a,b)` as its name and its arguments as written; None when it is no call at all."""
    if len(text) > MAX_TEXT or not text.isascii():
        return None
    match = _CALL.fullmatch(text)
    return (match[1], match[2].split(",")) if match else None


def _add_hint(outcome: Outcome, progress: _Progress, ops: dict[str, Op]) -> None:
    if progress.symbol is not None and not ops[progress.symbol].hinted:
        return
    outcome.hint_template_key = f"toolbox/{outcome.error_kind}"
    outcome.hint_context = {"form": _form(_right_name(progress, ops), len(progress.arguments))}


def _read_chat(messages: list[dict[str, str]]) -> _Progress:
    contents = [m["content"].strip() for m in messages if m["role"] != "assistant"]
    # The last query: solved examples may stand before it.
    start = max((i for i, content in enumerate(contents) if _QUERY.fullmatch(content)), default=None)
    if start is None:
        raise ValueError(
            "the chat holds no toolbox query such as '3+4*2': pass the whole chat, the user's message first"
        )
    progress = _Progress.of(contents[start])
    for content in contents[start + 1 :]:
        value = value_in(content)
        if progress.symbol is not None and value is not None:
            progress.advance(value)
    return progress


def _right_name(progress: _Progress, ops: dict[str, Op]) -> str:
    if progress.symbol is None:
        return ANSWER
    if progress.symbol not in ops:
        raise ValueError(f"operator {progress.symbol!r} is not of this level: the chat comes from another level")
    return ops[progress.symbol].right


def _form(name: str, arity: int) -> str:
    return f"{name}({','.join('ab'[:arity])})"


def _call(name: str, arguments: Sequence[int]) -> str:
    return f"{name}({','.join(map(str, arguments))})"
