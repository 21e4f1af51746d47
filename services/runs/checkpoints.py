"""Checkpoints of a run: `checkpoints/step-N/`, each whole or not there.

    writing(40) ──▶ .step-40.1f2e.writing/ ──fsync──▶ manifest.json ──rename──▶ step-40/ ──▶ prune
                    (block fills it; a crash           (sizes and sha256
                    here leaves only this)             of every file)

The rename is the moment at which a checkpoint exists. The manifest guards against what happens to files later: a disk
that filled, a copy that was cut short, a bit that flipped. `latest` believes no checkpoint that its manifest does not
confirm. One process writes the checkpoints of a folder; any number may read them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.runs.atomic import sync, sync_tree, write_atomic

log = logging.getLogger(__name__)

WHOLE = re.compile(r"step-(\d+)")
ASIDE = re.compile(r"\.step-(\d+)\.[0-9a-f]+\.(writing|replaced)")
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state as of `step`: batches before it are trained."""

    step: int
    path: Path


class Checkpoints:
    """The checkpoints in `folder`, of which the newest `keep` whole ones stay. ValueError for `keep` under 1."""

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} would delete every checkpoint as soon as it is written: keep at least 1")
        self.folder = Path(folder)
        self.keep = keep

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A folder to fill; it becomes `step-N` when the block ends without an error, and is removed when it raises.

        A checkpoint of the same step is replaced. ValueError when the block wrote no file.
        """
        if step < 0:
            raise ValueError(f"a checkpoint's step is 0 or more, not {step}")
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f".step-{step}.{secrets.token_hex(4)}.writing"
        aside.mkdir()
        try:
            yield aside
            if not _files(aside):
                raise ValueError(f"checkpoint of step {step}: nothing was written into it")
            # The data reach the disk before the manifest that vouches for them, and both before the name.
            sync_tree(aside)
            write_atomic(aside / MANIFEST, json.dumps(_manifest(aside, step), indent=1) + "\n")
            self._publish(aside, step)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self.prune()
        self._remove_leftovers(step)

    def list(self) -> Sequence[Checkpoint]:
        """Every checkpoint by its name, oldest step first; whether it is whole is not looked at."""
        if not self.folder.is_dir():
            return []
        found = [(WHOLE.fullmatch(p.name), p) for p in self.folder.iterdir() if p.is_dir()]
        return sorted((Checkpoint(int(m[1]), p) for m, p in found if m), key=lambda c: c.step)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose files agree with its manifest, or None.

        Newer ones that do not are refused with a warning that names the checkpoint and the file. Reads every byte of
        the one it returns.
        """
        for checkpoint in reversed(self.list()):
            problem = damage(checkpoint.path)
            if problem is None:
                return checkpoint
            log.warning("checkpoint %s is refused: %s; the one before it is tried", checkpoint.path, problem)
        return None

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of `step`. FileNotFoundError lists those there are; ValueError says what is wrong with it."""
        found = {c.step: c for c in self.list()}
        if step not in found:
            there = ", ".join(map(str, found)) or "none"
            raise FileNotFoundError(f"no checkpoint of step {step} in {self.folder}; there are: {there}")
        if problem := damage(found[step].path):
            raise ValueError(f"checkpoint {found[step].path} cannot be used: {problem}; take another step")
        return found[step]

    def rewind(self, step: int) -> None:
        """Delete the checkpoints after `step`: call it when a run goes on from an older one than the newest.

        Without it a later resume would find the steps of the abandoned course again.
        """
        for checkpoint in self.list():
            if checkpoint.step > step:
                shutil.rmtree(checkpoint.path)

    def prune(self) -> None:
        """Delete all but the newest `keep` checkpoints.

        Damaged ones count for nothing and stay for inspection, so they never push out a whole one. Judged by names
        and sizes alone: this runs after every save.
        """
        whole = [c for c in self.list() if damage(c.path, contents=False) is None]
        for checkpoint in whole[: -self.keep]:
            shutil.rmtree(checkpoint.path)

    def sweep(self) -> None:
        """Remove what killed writers left, of any step: call it when the writer before is dead, and before `latest`."""
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else ():
            match = ASIDE.fullmatch(path.name)
            if match and match[2] == "replaced" and not (target := self.folder / f"step-{match[1]}").exists():
                path.rename(target)  # killed before its successor had the name
            elif match:
                shutil.rmtree(path)

    def _publish(self, aside: Path, step: int) -> None:
        target = self.folder / f"step-{step}"
        replaced = self.folder / f".step-{step}.{secrets.token_hex(4)}.replaced"
        if target.exists():
            target.rename(replaced)  # a folder with content cannot be renamed over
        aside.rename(target)
        sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _remove_leftovers(self, step: int) -> None:
        """Remove what killed writers of earlier steps left; a writer of this step or a later one may be at work."""
        for path in self.folder.iterdir():
            if (match := ASIDE.fullmatch(path.name)) and int(match[1]) < step:
                shutil.rmtree(path, ignore_errors=True)


def damage(path: Path, *, contents: bool = True) -> str | None:
    """What is wrong with the checkpoint at `path`, naming the first file; None when its manifest confirms it.

    With `contents` every byte is read and compared by sha256, else only presence and size.
    """
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})"
    for name, (nbytes, digest) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != nbytes:
            return f"{name} has {size} bytes instead of {nbytes}"
        if contents and _sha256(file) != digest:
            return f"{name} is corrupt: its sha256 is not the one in {MANIFEST}"
    return None


def _manifest(folder: Path, step: int) -> dict[str, object]:
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in _files(folder)
    }
    return {"step": step, "files": files}


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
