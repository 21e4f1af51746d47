"""Files that are whole or not there.

The recipe, in this order: write aside in the same folder, fsync the bytes, rename, fsync the folder. The bytes are on
disk before the name is, so no crash leaves a name that stands for half a file; the folder is synced last, so a caller
that returned may rely on the name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_atomic(path: str | Path, data: bytes | str, *, mode: int = 0o666) -> None:
    """Replace the file `path` by `data` (text as UTF-8); readers see the old content or the new, never a mixture.

    `mode` is what the file is created with, less the process's umask; it holds from the first byte on, so a secret
    written with 0o600 is at no time readable by others. OSError when the folder is missing or full: the old file is
    then still in place and nothing is left aside.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.aside")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()
        raise
    sync(path.parent)


def sweep_asides(folder: Path) -> None:
    """Remove what killed writers left in `folder`, in which nobody may be writing now."""
    for aside in folder.glob(".*.aside"):
        aside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Bring everything under `folder` to the disk: each folder after what it holds."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))
