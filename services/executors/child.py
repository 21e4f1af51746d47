"""A replica's process on this host: started behind a guard, its log in a file, ended without a trace.

Used by `LocalProcessExecutor` for all its replicas and by the actor of `MonarchExecutor` for its one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

GUARD = (sys.executable, "-IS", str(Path(__file__).with_name("guard.py")))  # alone, it starts in no time
_SLACK_S = 20.0  # for the guard's sweep, on a loaded machine


class ChildProcess:
    """`env`: on top of this process's own; None takes a variable out. `log_path` gets both output streams, behind what
    an earlier process wrote there; `read` sees this one's part."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str | None], log_path: Path, grace_s: float, limit_s: float
    ) -> None:
        self.command, self.env, self.log_path = list(command), dict(env), log_path
        self.grace_s, self.limit_s = grace_s, limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self) -> None:
        """OSError when the guard cannot be run or the log not be written."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # It finds the packages that this process finds, from whatever folder.
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        env = {**os.environ, "PYTHONPATH": paths, **self.env}
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*GUARD, "--grace", str(self.grace_s), "--limit", str(self.limit_s), "--", *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in env.items() if value is not None},
                start_new_session=True,  # Ctrl-C reaches the starter only, which ends its replicas in its own order
            )

    @property
    def pid(self) -> int | None:
        """Of the guard."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + N after signal N; 124 after its limit."""
        code = None if self._process is None else self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def end(self) -> None:
        """End it and all that it started: SIGTERM, SIGKILL after the grace time. Idempotent and bounded."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(self.grace_s + _SLACK_S)
        except subprocess.TimeoutExpired:  # the guard is stopped, or starved
            self._kill_group()
            self._process.wait(_SLACK_S)
        self.settle()

    def settle(self) -> None:
        """After its end: close the lifeline, and kill what a guard that was killed left."""
        if self._process is not None and self.exit_code is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            if self._process.returncode < 0:
                self._kill_group()

    def read(self, offset: int = 0, at_most: int = 1 << 20) -> bytes:
        """Its output from `offset` on; a negative one counts from the end."""
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END) - self._log_start
            log.seek(self._log_start + (max(0, size + offset) if offset < 0 else min(offset, size)))
            return log.read(at_most)

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # nobody is left in it
            os.killpg(self._process.pid, signal.SIGKILL)
