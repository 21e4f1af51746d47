"""The record that a replica leaves in the store, `results/rank-R.json`: whole or not there.

    {"launch": "1f0a…", "rank": 0, "value": …}                              it returned
    {"launch": "1f0a…", "rank": 0, "error": "ValueError: …", "exit_code": 1}   it did not

`launch` tells the records of this launch from those of an earlier one in the same store.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from services.runs.atomic import write_atomic

_ATTEMPTS = 4
_BACKOFF_S = 0.5


def check_store(uri: str) -> None:
    """ValueError when the address is of no kind that can be read here."""
    try:
        url_to_fs(uri)
    except ImportError as error:
        raise ValueError(f"store {uri!r}: {error}; install that package where the replicas run") from None
    except Exception as error:  # each file system has its own kinds for an address that it cannot use
        known = ", ".join(sorted({"file", "s3", "gs", "hf"} & set(fsspec.available_protocols())))
        raise ValueError(f"store {uri!r} cannot be used ({error}): give a path, or one of {known}://") from None


def write_record(uri: str, rank: int, record: dict[str, Any]) -> None:
    """Put a replica's record into the store. OSError, after a few attempts, when the store does not take it."""
    fs, path = _place(uri, rank)
    body = json.dumps(record).encode()
    for attempt in range(_ATTEMPTS):
        try:
            if isinstance(fs.protocol, tuple) and "file" in fs.protocol:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, body)
            else:
                fs.pipe_file(path, body)  # one PUT, which object stores show whole or not at all
            return
        except Exception as error:  # each file system has its own kinds
            if attempt == _ATTEMPTS - 1:
                raise OSError(f"the result could not be written to {path} ({type(error).__name__}: {error})") from error
            time.sleep(_BACKOFF_S * 2**attempt)


def read_record(uri: str, rank: int, launch: str) -> dict[str, Any] | None:
    """What that rank of that launch left; None when it left nothing. OSError when the store cannot be read."""
    fs, path = _place(uri, rank)
    fs.invalidate_cache()
    try:
        record = json.loads(fs.cat_file(path))
    except FileNotFoundError:
        return None
    except Exception as error:  # as above
        raise OSError(f"{path} could not be read ({type(error).__name__}: {error})") from error
    return record if record.get("launch") == launch else None


def _place(uri: str, rank: int) -> tuple[Any, str]:
    fs, root = url_to_fs(uri)
    return fs, f"{root.rstrip('/')}/results/rank-{rank}.json"
