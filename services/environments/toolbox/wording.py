"""What the toolbox says: tersely to the bundled tiny model, which reads characters, or plainly to a language model.

```
             terse     plain
query        3+4*2     3+4*2
sum(3,4)     7         left 7*2
times(7,2)   14        result 14
add(7,2)     e:name    error: no such tool
```

`plain` says what is left to compute: a small language model calls tools by example long before it keeps its place in an
expression. Errors are the same four kinds in either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_VALUE = re.compile(r"(?:result )?(-?[0-9]{1,9})|left (-?[0-9]{1,9})(?:[-+*%][0-9]+)+")


@dataclass(frozen=True)
class Wording:
    """`left` answers a call that leaves something to compute, `result` the last one; `errors` by their kind."""

    left: str  # fields: value, rest
    result: str  # field: value
    errors: dict[str, str]


WORDINGS: dict[str, Wording] = {
    "terse": Wording(
        left="{value}",
        result="{value}",
        errors={"tool_not_found": "e:name", "json_decode": "e:json", "type_error": "e:type", "runtime_error": "e:run"},
    ),
    "plain": Wording(
        left="left {value}{rest}",
        result="result {value}",
        errors={
            "tool_not_found": "error: no such tool",
            "json_decode": "error: not a call",
            "type_error": "error: wrong arguments",
            "runtime_error": "error: not the next step",
        },
    ),
}


def wording(name: str) -> Wording:
    """The wording of that name. ValueError for one that is not in `WORDINGS`."""
    if name not in WORDINGS:
        raise ValueError(f"no toolbox wording {name!r}; use one of {sorted(WORDINGS)}")
    return WORDINGS[name]


def value_in(content: str) -> int | None:
    """The value that a message of the toolbox reports, in whatever wording; None when it reports none."""
    match = _VALUE.fullmatch(content)
    return int(match[1] or match[2]) if match else None
