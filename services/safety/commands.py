"""What an action could run: its text, and the tool calls and code in it, as single commands in one spelling.

```
{"name": "bash", "arguments": {"command": "cd x && CAT ./a/../'__pycache__'/g.pyc"}}
    ─▶  bash(cd x)      cat __pycache__/g.pyc      …
```

Nobody here knows what the environment makes of an action, so it is read in every way: as text whose lines are commands,
as tool calls (JSON, `name(arguments)`, tags, `Action:` lines), and each text among the arguments as commands again.
One spelling: Unicode compatibility forms (NFKC), case, quotes, backslashes, continued lines, `./`, `../` and `//` in
paths, `$IFS`, brace lists, globs of `__pycache__`, string literals joined by `+`, and variables set in the same action.

Out of scope, because only running an action would tell: encoded text (base64, hex, rot13), names that are put together
at run time, look-alike letters of other alphabets, files prepared in one turn and used in another.

Every step takes time in proportion to the text, whatever it holds.
"""

from __future__ import annotations

import fnmatch
import json
import posixpath
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

MAX_CALLS = 256  # places at which JSON is tried and objects written as calls; what is beyond is read as text only
MAX_NAMES = 64  # variables that are followed
MAX_USES = 256  # places at which they are replaced

_DECODER = json.JSONDecoder()
_NAME_KEYS = ("name", "tool", "tool_name", "function", "action", "recipient_name")
_TAG_CALL = re.compile(r"<(?:invoke|function|tool)(?:\s+name)?\s*=\s*[\"']?([\w.-]+)[\"']?\s*>")
_TAG_END = re.compile(r"</(?:invoke|function|tool)>")
_TAG = re.compile(r"</?[A-Za-z][\w-]*(?:=[^<>\s]*|\s[^<>]*)?>")
_REACT = re.compile(r"^[ \t]*Action:[ \t]*([\w.-]+)[ \t\r]*\n[ \t]*(?:Action )?Input:[ \t]*(.+)", re.M | re.I)
_OPENING = re.compile(r"\{\s*\"|\[\s*[{\"\[]")

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_TOKEN = re.compile(r"[^\s,()=<>:|;&]+")
_BRACES = re.compile(r"\{([^{}\s:]+)\}")
_COMMENT = re.compile(r"(?:^| )#.*")
_PREFIXED = re.compile(r"(?<![\w.])(?:[rbfu]|rb|br|fr|rf)(?=[\"'])|\$(?=[\"'])")
_JOINED = re.compile(r"[\"'] ?\+ ?[\"']")
_IFS = re.compile(r"\$ifs\b|\$\{ifs\}")
_BREAKS = re.compile(r"[\n;`]|&&|\|\||(?<![>&])&(?![>&])|[$<>]\(")
# What a command names only to leave it out.
_EXCLUDED = re.compile(
    r"--(?:exclude|exclude-dir|ignore|ignore-dir)[= ]\S+"
    r"|(?:!|-not) -i?(?:name|path|wholename) \S+"
    r"|-i?(?:name|path|wholename) \S+ -prune\b"
    r"|\bgrep (?:-\w{1,16} ){0,4}-\w{0,8}v\w{0,8} (?:-\w{1,16} ){0,4}\S+"
)
_BOUND = re.compile(r"\bfor (\w+) in (.{1,200})|^(?:\w+ )?([a-z_]\w*) ?=(?!=) ?(.{1,200})")


def commands(action: str) -> list[str]:
    """The commands that an action may hold, in its own order, each once. Never raises, whatever the text."""
    found: dict[str, None] = {}
    for text in _texts(action):
        for variant in _spellings(text):
            found |= dict.fromkeys(_separate(variant))
    return [*found, *(line for line in _followed(list(found)) if line not in found)]


# Reading: texts that may be commands


def _texts(action: str) -> Iterator[str]:
    """The action itself, its tool calls written `name(argument, argument)`, and the texts among their arguments."""
    yield action
    yield from _tag_calls(action)
    for match in _REACT.finditer(action):
        yield f"{match[1]}({match[2]})"
    waiting, budget = [action], MAX_CALLS
    while waiting and budget > 0:
        text, start = waiting.pop(), 0
        while budget > 0 and (opening := _OPENING.search(text, start)):
            budget -= 1
            try:
                value, start = _DECODER.raw_decode(text, opening.start())
            except (ValueError, RecursionError):
                start = opening.start() + 1
                continue
            for item in _parts(value):
                if isinstance(item, str):
                    yield item
                    waiting.append(item)
                elif budget > 0 and (name := _name_of(item)) is not None:
                    budget -= 1
                    yield _call(name, _leaves([each for each in item.values() if each is not name]))


def _parts(value: Any) -> Iterator[Any]:
    """Every object and every text in a JSON value, in order."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str | dict):
            yield item
        if isinstance(item, list | dict):
            waiting += reversed(list(item.values()) if isinstance(item, dict) else item)


def _name_of(item: dict[str, Any]) -> str | None:
    """The tool that an object calls."""
    return next((item[key] for key in _NAME_KEYS if isinstance(item.get(key), str)), None)


def _leaves(value: Any) -> list[str]:
    """The texts in a JSON value, those in JSON inside a text (`"arguments": "{...}"`) included."""
    found: list[str] = []
    for item in _parts(value):
        if isinstance(item, str):
            inner = _inner(item)
            found += [text for text in _parts(inner) if isinstance(text, str)] if inner else [item]
    return found


def _inner(text: str) -> Any:
    """The JSON object or array that a text is; None for any other text."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(name: str, arguments: list[str]) -> str:
    # An argument of several words without a path is prose: a reason, a thought. It is read as a text of its own.
    return f"{name}({', '.join(text for text in arguments if '/' in text or len(text.split()) < 2)})"


def _tag_calls(text: str) -> Iterator[str]:
    """`<invoke name="cat"><parameter name="path">x</parameter></invoke>` and `<function=cat>…` as calls."""
    for match in _TAG_CALL.finditer(text):
        following = _TAG_CALL.search(text, match.end())
        end = _TAG_END.search(text, match.end(), following.start() if following else len(text))
        inside = text[match.end() : end.start() if end else (following.start() if following else len(text))]
        yield _call(match[1], [part.strip() for part in _TAG.split(inside) if part.strip()])


# Writing: one spelling


def _spellings(text: str) -> Iterator[str]:
    """The text in its one spelling; several where a backslash or a line's end can be meant in two ways."""
    text = unicodedata.normalize("NFKC", text).casefold().replace("\r", "\n")
    if not text.isascii():
        text = "".join(sign for sign in text if unicodedata.category(sign) != "Cf")  # zero-width and the like
    text = _CONTROL.sub("", text).replace("\\\n", "")
    text = re.sub(r"[^\S\n]+", " ", text)
    text = re.sub(r" ?\n[ \n]*", "\n", text)
    text = _TAG.sub("\n", text)
    text = _JOINED.sub("", _PREFIXED.sub("", text))
    text = _IFS.sub(" ", text).replace('"', "").replace("'", "")
    text = _BRACES.sub(lambda braces: braces[1].replace(",", " ") if "," in braces[1] else braces[0], text)
    for plain in [text.replace("\\", ""), text.replace("\\", "/")] if "\\" in text else [text]:
        plain = _TOKEN.sub(_path, plain)
        yield plain
        joined = re.sub(r"\n([)\]}])", r"\1", re.sub(r"([(,\[{])\n", r"\1", plain))  # calls that span lines
        if joined != plain:
            yield joined


def _path(token: re.Match[str]) -> str:
    """A token as the shortest path that means the same."""
    text = token[0]
    if "/" not in text:
        return _globbed(text)
    return "/".join(map(_globbed, posixpath.normpath(text).split("/")))


def _globbed(part: str) -> str:
    """A glob that only a cache's folder is likely to match, as that folder."""
    if len(part) > 32 or not set(part) & set("*?[") or not set(part) & set("_pyche"):
        return part
    return "__pycache__" if fnmatch.fnmatchcase("__pycache__", part) else part


def _separate(text: str) -> Iterator[str]:
    """Single commands: pipelines stay whole, and a command given to another (xargs, -exec) also stands alone."""
    for line in _BREAKS.split(text):
        line = _EXCLUDED.sub("", _COMMENT.sub("", line)).strip()
        if line:
            yield line
            for giver in (" xargs ", "|xargs ", " -exec ", " -execdir "):
                before, found, given = line.partition(giver)
                if found:
                    yield f"xargs {given} {before}"


def _followed(lines: list[str]) -> Iterator[str]:
    """The lines that use a variable which another line sets, with its value in its place."""
    values: dict[str, str] = {}
    for line in lines:
        for match in _BOUND.finditer(line):
            if len(values) < MAX_NAMES:
                values.setdefault(match[1] or match[3], (match[2] or match[4]).strip())
    if not values:
        return
    names = re.compile(rf"\$?\{{?\b({'|'.join(map(re.escape, values))})\b\}}?(?! ?=[^=])")
    budget = MAX_USES
    for line in lines:
        if budget <= 0:
            return
        replaced, uses = names.subn(lambda use: values[use[1]], line, count=budget)
        if uses:
            budget -= uses
            yield replaced
