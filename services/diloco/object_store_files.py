"""Files of a store that several replicas share, and the one promise that they agree by: put if absent.

A store is whatever fsspec opens: a local path (or a mounted one), s3://, gs://, abfs://, hf://, memory:// (threads of
one process). What a name stands for is whole or absent: locally a file is written aside and renamed, an object store
shows an object once its upload is complete. Nothing is synced to the disk: a round that a machine lost is trained
again.

`put_if_absent` decides among replicas that put at the same time. How, depends on what the store can do; every replica
finds the same, because they share it:

- a local path: a finished file is linked to the name, which fails where the name is taken;
- memory://: one lock of the process;
- s3, gs and abfs: the store's own conditional put. Servers that speak S3 and ignore the condition are found out by a
  trial when the store is opened;
- any other store (hf, sftp, a file system without links): the replicas vote by Disk Paxos (Gafni and Lamport, 2000)
  over one file of ballots per replica. It needs a store that shows a finished write to every later read, and one
  process per rank; a replica that dies in the vote does not stop the others.

Nothing that is read is trusted: tensors are loaded with weights_only, names and texts are checked by who asks for them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

CONDITIONAL_PUT = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}  # their fsspec classes pass mode="create" on
TRIES = 3  # of an operation on a store that is not local, with growing pauses
SETTLE_S = 60.0  # longest vote

_memory_lock = threading.RLock()  # fsspec's memory file system has none
T = TypeVar("T")


class MalformedFileError(ValueError):
    """A file that is not what it should be: cut off, foreign, or a pickle of more than tensors and plain values."""


class Store:
    """The files under `uri`, as replica `rank` of `world_size` sees them. Paths are relative to it, with slashes.

    ValueError for a protocol that fsspec does not know, ImportError where the package for it is missing, OSError for a
    store that cannot be written; each one sentence that says what to do.
    """

    def __init__(self, uri: str, rank: int, world_size: int) -> None:
        self.uri, self.rank, self.world_size = uri, rank, world_size
        self._fs, self._root = _open(uri)
        self._local = isinstance(self._fs, LocalFileSystem)
        self._lock = _memory_lock if type(self._fs) is MemoryFileSystem else contextlib.nullcontext()
        self._exclusive = self._try_out()

    def read(self, path: str) -> bytes | None:
        """The bytes of a file; None where there is none."""
        try:
            if self._local:
                return Path(self._full(path)).read_bytes()
            return self._tried("read", path, lambda: self._fs.cat_file(self._full(path)))
        except FileNotFoundError:
            return None

    def read_json(self, path: str) -> Any:
        """The value of a file of JSON, None where there is none. A store that shows half a file is asked again."""
        for attempt in range(TRIES + 1):
            data = self.read(path)
            if data is None:
                return None
            try:
                return json.loads(data)
            except ValueError:
                time.sleep(0.1 * 2**attempt)
        raise MalformedFileError(f"{self.where(path)} is no JSON: another program wrote it, or it was cut off")

    def load(self, path: str) -> Any:
        """What `save` wrote, on the CPU. FileNotFoundError; MalformedFileError unless it is tensors and values."""
        source: str | io.BytesIO = self._full(path)
        if not self._local:
            data = self.read(path)
            if data is None:
                raise FileNotFoundError(self.where(path))
            source = io.BytesIO(data)
        try:
            return torch.load(source, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # torch raises a different class for each way in which a file can be broken
            reason = str(error).strip().split("\n")[0]
            raise MalformedFileError(
                f"{self.where(path)} holds no tensors that can be loaded safely: {type(error).__name__}: {reason}"
            ) from error

    def save(self, path: str, value: Any) -> None:
        """Write tensors and plain values, in place of what was there."""
        if self._local:
            self._aside(path, lambda aside: torch.save(value, aside), os.replace)
        else:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            self.write(path, buffer.getvalue())

    def write(self, path: str, data: bytes) -> None:
        if self._local:
            self._aside(path, lambda aside: aside.write_bytes(data), os.replace)
        else:
            self._tried("write", path, lambda: self._fs.pipe_file(self._full(path), data))

    def names(self, path: str = "") -> list[str]:
        """Names in a folder, sorted; none where there is no folder."""
        try:
            if self._local:
                return sorted(os.listdir(self._full(path)))
            paths = self._tried("list", path, lambda: self._fs.ls(self._full(path), detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for full in paths if (name := full.rstrip("/").rpartition("/")[2]))

    def remove(self, path: str) -> None:
        """Delete a file or a folder; fine where there is none, or where another replica deletes it too."""
        with contextlib.suppress(FileNotFoundError):
            if self._local and os.path.isdir(self._full(path)):
                shutil.rmtree(self._full(path), ignore_errors=True)  # others may delete at the same time
            elif self._local:
                os.unlink(self._full(path))
            else:
                self._tried("delete", path, lambda: self._fs.rm(self._full(path), recursive=True))

    def put_if_absent(self, path: str, data: bytes) -> bytes:
        """Write `data` (JSON) unless the file is there; what it holds then, the same for all who put, whoever won."""
        self._exclusive(path, data)
        held = self.read(path)
        if held is None:
            raise FileNotFoundError(f"{self.where(path)} was deleted as soon as it was written")
        return held

    def where(self, path: str) -> str:
        """A path as messages name it."""
        return f"{self.uri.rstrip('/')}/{path}"

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/") if path else self._root

    def _tried(self, what: str, path: str, operation: Callable[[], T]) -> T:
        """An operation, again after a failure. fsspec's listings are forgotten first: other replicas changed them."""
        for attempt in range(TRIES):
            try:
                with self._lock:
                    self._fs.invalidate_cache()
                    return operation()
            except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError):
                raise
            except Exception as error:  # each store's package has its own classes for a bad connection
                if attempt == TRIES - 1:
                    raise OSError(f"{self.where(path)}: cannot {what} it, tried {TRIES} times: {error}") from error
                time.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")

    def _aside(self, path: str, write: Callable[[Path], Any], publish: Callable[[Path, Path], None]) -> None:
        """A local file, whole or absent: written under a hidden name, then renamed or linked."""
        target = Path(self._full(path))
        aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.aside")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write(aside)
            publish(aside, target)
        finally:
            aside.unlink(missing_ok=True)

    def _try_out(self) -> Callable[[str, bytes], None]:
        """How this store puts if absent; found by putting one file twice."""
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        able = self._local or type(self._fs) is MemoryFileSystem or bool(CONDITIONAL_PUT & set(protocols))
        probe = f"probe-{self.rank}-{secrets.token_hex(4)}"
        try:
            if not able:
                self.write(probe, b"{}")
                return self._vote
            put = self._link if self._local else self._create
            for content in (b"1", b"2"):
                try:
                    put(probe, content)
                except OSError:  # no links here
                    self.write(probe, b"{}")
                    return self._vote
            return put if self.read(probe) == b"1" else self._vote
        except Exception as error:
            raise OSError(
                f"{self.uri} cannot be written ({error}): give diloco.uri a place that exists and that every replica "
                "may write to, and check its credentials"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                self.remove(probe)

    def _link(self, path: str, data: bytes) -> None:
        with contextlib.suppress(FileExistsError):
            self._aside(path, lambda aside: aside.write_bytes(data), os.link)

    def _create(self, path: str, data: bytes) -> None:
        with contextlib.suppress(FileExistsError):
            self._tried("create", path, lambda: self._fs.pipe_file(self._full(path), data, mode="create"))

    def _vote(self, path: str, data: bytes) -> None:
        """Disk Paxos with the store as the one disk. A replica writes only its own ballot, and reads all.

        It promises a number higher than any it saw, takes the value accepted under the highest number (its own where
        there is none) and accepts that; a higher promise of another sends it back, after a random pause, because two
        that outbid each other would never end.
        """
        end = time.monotonic() + SETTLE_S
        mine = self._ballot(path, self.rank)
        turn = mine["promised"] // self.world_size + 1
        while self.read(path) is None:
            number = turn * self.world_size + self.rank
            mine["promised"] = number
            highest, latest = self._cast(path, mine)
            if highest <= number:
                chosen = latest if latest["accepted"] else {"value": data.decode()}
                mine |= {"accepted": number, "value": chosen["value"]}
                highest, _ = self._cast(path, mine)
                if highest <= number:
                    return self.write(path, mine["value"].encode())
            if time.monotonic() > end:
                raise TimeoutError(f"{self.where(path)}: no decision in {SETTLE_S:g} s; do two processes share a rank?")
            turn = highest // self.world_size + 1
            time.sleep(random.uniform(0, 0.05 * self.world_size))

    def _cast(self, path: str, mine: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Write a ballot; the highest number that any replica promised, and the ballot accepted last."""
        self.write(f"{path}-ballot-{self.rank:04d}", json.dumps(mine).encode())
        ballots = [mine, *(self._ballot(path, rank) for rank in range(self.world_size) if rank != self.rank)]
        return max(b["promised"] for b in ballots), max(ballots, key=lambda b: b["accepted"])

    def _ballot(self, path: str, rank: int) -> dict[str, Any]:
        empty = {"promised": 0, "accepted": 0, "value": None}
        return self.read_json(f"{path}-ballot-{rank:04d}") or empty


def _open(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    protocol = fsspec.core.split_protocol(uri)[0]
    try:
        fs, root = fsspec.core.url_to_fs(uri)
    except ImportError as error:
        raise ImportError(f"{uri} needs a package that is missing ({error}): pip install it beside fsspec") from error
    except ValueError as error:
        if protocol in fsspec.available_protocols():
            raise
        raise ValueError(
            f"{uri}: fsspec knows no store {protocol}://; use a path, s3://, gs://, hf:// or memory://"
        ) from error
    return fs, root.rstrip("/")
