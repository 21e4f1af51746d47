"""One replica: calls a function with a `Replica`, and leaves its value in the store.

```
python -m services.executors.replica_entrypoint --target package.module:function --rank R --world-size W --uri URI
                                                [--payload JSON]
```

Exit code 0: the record holds the value. 1: the target raised, its traceback is in the log, the record says what. 2: it
was not called, because an argument is wrong; one sentence says which. 143: it was asked to end (SIGTERM), which the
target sees as `SystemExit`. The log is one stream: standard error goes where standard output goes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from services.executors.protocol import Replica, ReplicaSpec
from services.executors.results import check_store, write_record

Target = Callable[[Replica], Any]
ENDED = 128 + signal.SIGTERM


class NoTarget(ValueError):
    """There is no such function. The message says which part of its path leads nowhere."""


def load_target(path: str) -> Target:
    """The function at "package.module:function". NoTarget when there is none; what its module raises passes."""
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        raise NoTarget(
            f"target {path!r}: there is no module {error.name!r} here; it must be installed, or lie in a folder that "
            "PYTHONPATH names"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise NoTarget(f"target {path!r}: {module_name} has no function {function_name!r}")
    return function


def run(path: str, replica: Replica) -> dict[str, Any]:
    """Call the target; its record, without the label. What it raises is printed and becomes the record's error."""
    try:
        value = load_target(path)(replica)
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{path} returned what JSON cannot hold ({error})") from None
        return {"value": value}
    except NoTarget as error:
        print(f"replica: {error}", flush=True)
        return {"error": str(error), "exit_code": 2}
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        why = "it was asked to end (SIGTERM)" if code == ENDED else f"SystemExit: {end.code}"
        return {"error": why, "exit_code": code} if code else {"value": None}
    except BaseException as error:  # whatever it is, the launcher must get to know it
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "exit_code": 1}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one replica, leave its record, and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        replica = _replica(arguments)
    except ValueError as error:
        print(f"replica: {error}", file=sys.stderr, flush=True)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ENDED))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a text stream
    os.dup2(1, 2)
    record = run(arguments.target, replica)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the record is written now, and then it ends anyway
    try:
        write_record(replica.uri, replica.rank, {"launch": arguments.launch, "rank": replica.rank, **record})
    except OSError as error:
        print(f"replica: {error}; the record was {json.dumps(record)}", flush=True)
        return record.get("exit_code") or 1
    return record.get("exit_code", 0)


def _replica(arguments: argparse.Namespace) -> Replica:
    """ValueError says which argument is wrong."""
    try:
        payload = json.loads(arguments.payload)
    except json.JSONDecodeError as error:
        raise ValueError(f"--payload is not JSON: {error}") from None
    spec = ReplicaSpec(arguments.target, arguments.world_size, arguments.uri, payload)
    if not 0 <= arguments.rank < spec.world_size:
        raise ValueError(f"--rank {arguments.rank} is none of the {spec.world_size} ranks from 0 on (--world-size)")
    check_store(spec.uri)
    return Replica(arguments.rank, spec.world_size, spec.uri, payload)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services.executors.replica_entrypoint", description="Run a replica."
    )
    parser.add_argument("--target", required=True, help='"package.module:function"')
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--uri", required=True, help="the store in which the replicas meet")
    parser.add_argument("--payload", default="{}", help="JSON object that the target is given")
    parser.add_argument("--launch", default="", help="label of the launch, written into the record")
    return parser


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not by way of exit handlers and threads of the target: they could undo a replica that is done
