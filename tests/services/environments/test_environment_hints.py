from __future__ import annotations

import subprocess
import sys

import pytest

from services.environments import hints
from services.environments.hints import HintLayers, dispatch, load_hint_modules, register

KINDS = ("tool_not_found", "json_decode", "type_error", "runtime_error", "repeated_failure")
FULL = {
    "tool": "serch",
    "tools": "search, open",
    "error_text": "no such file",
    "form": "open(path: str)",
    "repeats": "3",
}


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    load_hint_modules(["services.environments.toolbox.hints"])  # before the copy, because an import happens only once
    monkeypatch.setattr(hints, "_templates", dict(hints._templates))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_a_template_that_uses_its_context(kind: str) -> None:
    hint = dispatch(kind, FULL)
    assert hint is not None
    assert "{" not in hint
    used = FULL["tools"] if kind == "tool_not_found" else FULL["error_text"]
    assert used in hint


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_without_its_context_gives_nothing(kind: str) -> None:
    assert dispatch(kind, {}) is None
    assert dispatch(kind, dict.fromkeys(FULL, "")) is None


def test_an_unknown_kind_gives_nothing() -> None:
    assert dispatch("solar_flare", FULL) is None


def test_values_with_braces_are_inserted_as_they_are() -> None:
    register("quoted", "Got {error_text}, write {{}} instead.")
    assert dispatch("quoted", {"error_text": "{tools.__class__}"}) == "Got {tools.__class__}, write {} instead."


def test_the_last_registration_of_a_kind_counts() -> None:
    register("json_decode", "Write JSON.")
    assert dispatch("json_decode", {}) == "Write JSON."


@pytest.mark.parametrize("template", ["", "  ", "{", "{0}", "{}", "{form.__class__}", "{form[0]}"])
def test_a_template_that_could_not_be_filled_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="hint template 'odd'"):
        register("odd", template)
    assert dispatch("odd", FULL) is None


def test_the_template_comes_before_the_raw_error() -> None:
    assert HintLayers().hint_for("json_decode", "json_decode", {}, "line 1 column 2") == (
        dispatch("json_decode", {"error_text": "line 1 column 2"}),
        "template",
    )


def test_a_template_that_lacks_context_falls_to_the_raw_error() -> None:
    assert HintLayers().hint_for("tool_not_found", "tool_not_found", {}, "no tool x") == ("no tool x", "raw_error")
    assert HintLayers(("template",)).hint_for("tool_not_found", "tool_not_found", {}, "no tool x") is None


def test_without_a_template_key_only_the_raw_error_is_left() -> None:
    assert HintLayers().hint_for("json_decode", None, FULL, "e:json") == ("e:json", "raw_error")
    assert HintLayers(("template",)).hint_for("json_decode", None, FULL, "e:json") is None
    assert HintLayers().hint_for("json_decode", None, FULL, "  ") is None


def test_layers_left_out_are_not_tried() -> None:
    assert HintLayers(("raw_error",)).hint_for("json_decode", "json_decode", FULL, "boom") == ("boom", "raw_error")
    assert HintLayers(()).hint_for("json_decode", "json_decode", FULL, "boom") is None


@pytest.mark.parametrize("layers", [("raw_error", "template"), ("template", "template"), ("templates",)])
def test_layers_that_are_unknown_or_in_an_order_that_hides_one_are_refused(layers: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="hint layers"):
        HintLayers(layers)


def test_a_repeated_failure_has_its_own_template() -> None:
    first = HintLayers().hint_for("runtime_error", "runtime_error", {}, "timeout", repeats=1)
    second = HintLayers().hint_for("runtime_error", "runtime_error", {}, "timeout", repeats=2)
    assert first == (dispatch("runtime_error", {"error_text": "timeout"}), "template")
    assert second == (dispatch("repeated_failure", {"error_text": "timeout", "repeats": "2"}), "template")


def test_an_environment_without_a_template_for_repeats_keeps_its_plain_one() -> None:
    register("shop/type_error", "Use {form}.")
    given = {"form": "buy(item)"}
    assert HintLayers().hint_for("type_error", "shop/type_error", given, "e", repeats=4) == (
        "Use buy(item).",
        "template",
    )
    register("shop/repeated_failure", "Stop, use {form}.")
    assert HintLayers().hint_for("type_error", "shop/type_error", given, "e", repeats=4) == (
        "Stop, use buy(item).",
        "template",
    )


def test_the_toolbox_hint_is_the_bare_form_also_when_it_repeats() -> None:
    for kind in KINDS:
        assert dispatch(f"toolbox/{kind}", {"form": "minus(a,b)"}) == "minus(a,b)"
    for repeats in (1, 3):
        hint = HintLayers().hint_for("type_error", "toolbox/type_error", {"form": "ans(a)"}, "e:type", repeats)
        assert hint == ("ans(a)", "template")


def test_a_hint_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ValueError, match=r"no_such_package\.hints"):
        load_hint_modules(["no_such_package.hints"])


def test_the_package_is_light_to_import() -> None:
    code = "import sys, services.environments; print({'torch', 'openenv', 'gradio', 'transformers'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.strip() == "set()"
