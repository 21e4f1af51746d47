"""Folders that are expensive to make and made once: models that a run builds or converts for itself.

A folder appears whole, in one move, under a name that says what went into it. No lock: of two processes that make the
same folder at once the first to finish wins and the other's work is thrown away, so that a process that died while it
built never keeps others waiting.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """`milkweed` under `$XDG_CACHE_HOME`, or under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "milkweed"


def fill_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """`folder`; unless it is there, `fill` writes a new folder beside it, which then takes its name.

    What `fill` raises comes through, and nothing stays. OSError when the cache cannot be written.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.building-", dir=folder.parent) as beside:
        aside = Path(beside) / "folder"
        fill(aside)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, and its folder stays
                raise
    return folder
