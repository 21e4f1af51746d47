"""A command that cannot outlive whoever started it: `python guard.py --grace 30 -- command …`.

    starter ──standard input──▶ guard ──▶ command ──▶ whatever that starts, in groups and sessions of its own or not

The starter holds the other end of the guard's standard input and never writes to it. The kernel closes it however the
starter dies, `kill -9` included. Then, or on SIGTERM, or when `--limit` seconds are over, the guard sends SIGTERM to
the command, SIGKILL `--grace` seconds later, and SIGKILL to all that is left below it: under Linux the guard adopts the
orphans among its descendants, so that none escapes. A guard that is killed itself takes the command with it.

It ends as the command did: with its exit code, with 128 + N when signal N ended it, with 124 when the limit did. It is
a process of its own because a thread beside the command's work would not run while that holds the interpreter. It
imports nothing of ours, so that it starts fast.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LIMIT_REACHED = 124  # as the command `timeout` has it
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of <linux/prctl.h>
_SWEEP_S = 10.0
_LOOK_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run a command on a lifeline.")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds that the command may run")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args(argv)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = _start(arguments.command)
    code = _watch(child, asked, arguments.grace, arguments.limit)
    _sweep()
    return code


def _watch(child: int, asked: list[int], grace_s: float, limit_s: float) -> int:
    """Until the child has ended; its exit code, as the module says."""
    over_at, kill_at, limited = time.monotonic() + limit_s, float("inf"), False
    while True:
        if kill_at == float("inf"):
            starter_gone = bool(select.select([0], [], [], _LOOK_S)[0]) and not os.read(0, 4096)
            limited = time.monotonic() > over_at
            if limited:
                print(f"guard: the command ran longer than {limit_s:g} s and is ended", flush=True)
            if starter_gone or limited or asked:
                os.kill(child, signal.SIGTERM)
                kill_at = time.monotonic() + grace_s
        else:
            time.sleep(_LOOK_S / 4)
            if time.monotonic() > kill_at:
                os.kill(child, signal.SIGKILL)
        status = _reaped().get(child)
        if status is not None:
            if limited:
                return LIMIT_REACHED
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _start(command: Sequence[str]) -> int:
    """Fork and run the command, which dies with this process. Its pid."""
    parent, ends = os.getpid(), {signal.SIGTERM, signal.SIGINT}
    # Held back until the child has let go of our handlers: one that came in between would end nothing.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
        return child
    try:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could be told
            os._exit(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"guard: cannot run {command[0]!r}: {error}", file=sys.stderr, flush=True)
    os._exit(127)


def _sweep() -> None:
    """Kill what the command left behind, generation by generation: a parent's death makes its children ours."""
    until = time.monotonic() + _SWEEP_S
    while (left := _children()) and time.monotonic() < until:
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # ours and not yet waited for: the pid cannot be anybody else's
        time.sleep(0.02)
        _reaped()


def _reaped() -> dict[int, int]:
    """The children that have ended, with their wait status; adopted ones among them."""
    found: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found[pid] = status


def _children() -> list[int]:
    """Pids of this process's children, by Linux's /proc (field 4 of `stat` is the parent); elsewhere none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if int(parent) == os.getpid():
            found.append(int(path.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the command's orphans are not adopted."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
