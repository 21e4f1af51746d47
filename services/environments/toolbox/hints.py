"""The toolbox's hint templates: the form of the right call, `minus(a,b)` say, and not a word more.

The bundled model reads characters and has learned to copy a form, so a sentence around it would only be noise. A
repeated failure gets the same hint.
"""

from __future__ import annotations

from services.environments.hints import register

for _kind in ("tool_not_found", "json_decode", "type_error", "runtime_error", "repeated_failure"):
    register(f"toolbox/{_kind}", "{form}")
