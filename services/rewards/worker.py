"""The process that runs reward functions: `python -m services.rewards.worker package.module:function ...`.

Frames (4 bytes of length, big-endian, then the body) come in over stdin and go out over what was stdout at the start.
In: pickled `(path, timeout_s, rollout)`. Out: JSON, first `{"ready": true}` or `{"error": ...}` for a path that cannot
be imported, then one `{"value": ...}` or `{"error": ...}` per request; JSON, because what comes out of a reward
function's process is not trusted to be unpickled.

Functions run in the main thread. A second one reads stdin, so that the end of the parent ends this process even while
a function is busy; an alarm that no handler catches ends it even when the function never lets another thread run.
"""

from __future__ import annotations

import importlib
import json
import math
import numbers
import os
import pickle
import queue
import signal
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from mesh.messages import Rollout

RewardFunction = Callable[[Rollout], float]

HEADER = struct.Struct(">I")
_ALARM_AFTER_S = 5  # beyond the time limit, at which the parent kills this process anyway


def load_function(path: str) -> RewardFunction:
    """The callable at "package.module:function". ValueError says what is wrong with the path."""
    module_name, _, function_name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # a module may raise anything while it is imported
        raise ValueError(
            f"reward function {path!r} cannot be imported ({type(error).__name__}: {error}); give "
            '"package.module:function" with a module that Python finds from the folder you launch in'
        ) from error
    if not callable(function):
        raise ValueError(f"reward function {path!r} is a {type(function).__name__}, not a function")
    return function


def call(function: RewardFunction, rollout: Rollout) -> dict[str, Any]:
    """The reply for one call: the value as a finite float, or why there is none."""
    try:
        value = function(rollout)
        plain = value.item() if hasattr(value, "item") else value  # a numpy or torch scalar
        number = float(plain) if isinstance(plain, numbers.Real) else None
    except (Exception, SystemExit) as error:  # anything that user code raises is its failure, not ours
        return {"error": f"raised {type(error).__name__}: {error}"}
    if number is None:
        return {"error": f"returned a {type(value).__name__}, not a number"}
    if not math.isfinite(number):
        return {"error": f"returned {number}, which is not finite"}
    return {"value": number}


def main() -> None:
    requests, replies = _take_streams()
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # Before the imports, because they too may outlast the parent.
    threading.Thread(target=_receive, args=(requests, inbox), daemon=True).start()
    try:
        functions = {path: load_function(path) for path in sys.argv[1:]}
    except ValueError as error:
        _send(replies, {"error": str(error)})
        return
    _send(replies, {"ready": True})
    while True:
        path, timeout_s, rollout = pickle.loads(inbox.get())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(timeout_s) + _ALARM_AFTER_S)
        reply = call(functions[path], rollout)
        signal.alarm(0)
        _send(replies, reply)


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Private copies of stdin and stdout. A function that prints writes to stderr, one that reads finds nothing."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _receive(requests: BinaryIO, inbox: queue.SimpleQueue[bytes]) -> None:
    while len(header := requests.read(HEADER.size)) == HEADER.size:
        inbox.put(requests.read(HEADER.unpack(header)[0]))
    # The parent closed the pipe or died. What the functions started goes too, if this process leads its own group.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _send(replies: BinaryIO, reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode()
    replies.write(HEADER.pack(len(body)) + body)
    replies.flush()


if __name__ == "__main__":
    main()
