"""Hints for failing turns: a registry of templates, and the order in which sources of a hint are tried.

A hint stands in front of a turn that the environment refused, and the teacher reads it. An environment says in each
observation which template fits (`hint_template_key`) and fills it (`hint_context`), because only the environment knows
what would have been right. Keys are a kind of error, or `"<environment>/<kind>"` for templates of one environment; the
defaults below are written for language models that call tools by JSON.

A module that registers its templates when it is imported is named in the environment's config (`hints = [...]`), so
every process of a run holds the same templates.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from string import Formatter

REPEATED = "repeated_failure"
LAYERS = ("template", "raw_error")  # the only order: raw error text is always there, so nothing after it would be used

_FORMATTER = Formatter()
_templates: dict[str, tuple[str, frozenset[str]]] = {}  # kind -> template, the names of its fields


def register(kind: str, template: str) -> None:
    """Make `template` the hint for `kind`; the last registration of a kind counts.

    `template` has `str.format` fields that are plain names: `"Call {tool} as {form}."`. ValueError when it is empty, is
    malformed, or has a field that is not a plain name.
    """
    try:
        fields = {name for _, name, _, _ in _FORMATTER.parse(template) if name is not None}
    except ValueError as error:
        raise ValueError(f"hint template {kind!r} is malformed ({error}): write literal braces as {{{{ }}}}") from error
    odd = sorted(name for name in fields if not name.isidentifier())
    if not kind or not template.strip() or odd:
        why = f"field {odd[0]!r} is not a plain name" if odd else "the kind or the template is empty"
        raise ValueError(f"hint template {kind!r} cannot be registered: {why}")
    _templates[kind] = (template, frozenset(fields))


def registered() -> list[str]:
    """The kinds that have a template, sorted."""
    return sorted(_templates)


def dispatch(error_kind: str, context: Mapping[str, str]) -> str | None:
    """The hint for `error_kind`, filled from `context`.

    None when the kind has no template, or when the template needs something that the context lacks or holds empty: half
    a hint misleads, and the caller has another layer to try.
    """
    template, fields = _templates.get(error_kind, ("", frozenset()))
    if not template or any(not context.get(name) for name in fields):
        return None
    return template.format_map(context)


def load_hint_modules(paths: Sequence[str]) -> None:
    """Import the modules that register templates. ValueError, naming the path, for one that cannot be imported."""
    for path in paths:
        try:
            importlib.import_module(path)
        except ImportError as error:
            raise ValueError(
                f"hints: cannot import {path!r} ({error}); give the import path of a module that calls "
                f"services.environments.hints.register"
            ) from error


class HintLayers:
    """Finds the hint for a failing turn: first the environment's template, then the error text as it is.

    `layers` are the ones in use, in that order; `()` gives no hints. From `repeated_from` equal failures in a row on,
    the template for repeated failures is preferred where there is one.
    """

    def __init__(self, layers: Sequence[str] = LAYERS, repeated_from: int = 2) -> None:
        if list(layers) != [layer for layer in LAYERS if layer in layers]:
            raise ValueError(f"hint layers {list(layers)} must be some of {list(LAYERS)}, once each and in this order")
        if repeated_from < 2:
            raise ValueError(f"repeated_from={repeated_from}: a first failure repeats nothing; use 2 or more")
        self.layers = tuple(layers)
        self.repeated_from = repeated_from

    def hint_for(
        self,
        error_kind: str,
        hint_template_key: str | None,
        context: Mapping[str, str],
        error_text: str,
        repeats: int = 1,
    ) -> tuple[str, str] | None:
        """The hint and the layer it came from, or None when no layer in use has one.

        `hint_template_key` None: the environment has no template for this turn, and the template layer gives nothing.
        `repeats`: turns in a row, this one included, that failed with `error_kind`.
        """
        given = {"error_kind": error_kind, "error_text": error_text, "repeats": str(repeats), **context}
        for layer in self.layers:
            if layer == "template":
                hint = self._from_template(hint_template_key, given, repeats)
            else:
                hint = error_text.strip() or None
            if hint is not None:
                return hint, layer
        return None

    def _from_template(self, key: str | None, context: Mapping[str, str], repeats: int) -> str | None:
        if key is None:
            return None
        if repeats >= self.repeated_from:
            environment, slash, _ = key.rpartition("/")
            hint = dispatch(f"{environment}{slash}{REPEATED}", context)
            if hint is not None:
                return hint
        return dispatch(key, context)


register(
    "tool_not_found",
    "There is no tool named `{tool}`. The tools you can call are: {tools}. "
    "Pick the one that does what you need and use its name exactly as written here.",
)
register(
    "json_decode",
    "Your tool call could not be parsed: {error_text}. "
    "Send one JSON object and nothing around it: keys and strings in double quotes, no comments, no trailing comma.",
)
register(
    "type_error",
    "The arguments of your call do not fit the tool: {error_text}. "
    "Its signature is {form}: give every required argument, no other ones, each with the type named there.",
)
register(
    "runtime_error",
    "The call was well formed, but the tool failed: {error_text}. "
    "Check the values against what you have seen so far, correct the one that the message points at, and call again.",
)
register(
    REPEATED,
    "This is failure {repeats} in a row of the same kind: {error_text}. "
    "Do not send the same call again. Reread the error, say which assumption it contradicts, and try another way.",
)
