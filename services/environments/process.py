"""Servers of our own that run beside the actors: one subprocess each, tied to the life of the process that started it.

The contract between the two sides: the server prints one JSON line `{"port": N}` once it accepts connections, and ends
when its standard input ends. `ServerProcess` holds the other end of that pipe and never writes to it. The kernel closes
it however the parent dies, `kill -9` included, so no server is left behind. (A child that the parent forks without exec
would hold the pipe too: start servers from processes that do not fork.)

A server's output goes to its log file, where the announcement is read from: a pipe would have to be drained for as long
as the server lives, and the log is also where the reason of a failed start is found.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]  # the folder that holds our top-level packages
TAIL_LINES = 15
TAIL_BYTES = 2**14


class ServerFailure(RuntimeError):
    """A server did not start, or is gone: says which, how it ended, and the last lines of its output."""


class ServerProcess:
    """One server. `start()` then `wait_ready()`, or `with ServerProcess(...) as server:`; `stop()` ends it, bounded.

    Several servers start in the time of one: call `start()` on all of them first.

    `command`: program and arguments; the server must watch its standard input as described above.
    `log_path`: both output streams are appended here. `ready_timeout_s`: longest wait for the announcement.
    """

    def __init__(self, command: Sequence[str], log_path: str | os.PathLike[str], ready_timeout_s: float = 60.0) -> None:
        self.command = list(command)
        self.log_path = Path(log_path)
        self.ready_timeout_s = ready_timeout_s
        self.port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._deadline = 0.0

    def start(self) -> None:
        """Start the subprocess without waiting for it. ServerFailure when the program cannot be run."""
        if self.alive:
            raise RuntimeError(f"{self.name} runs already, pid {self.pid}: stop() it first")
        self.port = None
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # The child finds the same packages as this process does, from whatever folder it was started.
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                    start_new_session=True,  # Ctrl-C reaches the parent only, which stops its servers in its own order
                )
            except OSError as error:
                raise ServerFailure(f"cannot run {self.name}: {error}; check the program's path") from error
        self._deadline = time.monotonic() + self.ready_timeout_s

    def wait_ready(self) -> int:
        """Wait for the announcement and return the port.

        ServerFailure when the server ends first, or was silent for `ready_timeout_s`; it is then stopped.
        """
        while (port := self._announced_port()) is None:
            code = self.exit_code
            if code is not None:
                self.stop()
                raise ServerFailure(f"{self.name} ended with exit code {code} before it was ready; {self._said()}")
            if time.monotonic() > self._deadline:
                self.stop()
                raise ServerFailure(
                    f"{self.name} was not ready after {self.ready_timeout_s:g} s and was stopped; "
                    f"raise its time limit if the machine is slow; {self._said()}"
                )
            time.sleep(0.05)
        self.port = port
        return port

    def stop(self, grace_s: float = 5.0) -> int | None:
        """End the server and return its exit code; None if it never started. Takes at most about three `grace_s`."""
        process = self._process
        if process is None:
            return None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        for harder in (process.terminate, process.kill):
            try:
                return process.wait(grace_s)
            except subprocess.TimeoutExpired:
                harder()
        return process.wait(grace_s)

    def check(self) -> None:
        """ServerFailure with the exit code and the end of the log when the server is not running."""
        if not self.alive:
            raise ServerFailure(f"{self.name} is not running (exit code {self.exit_code}); {self._said()}")

    @property
    def name(self) -> str:
        return f"server `{shlex.join(self.command)}`"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs, and before it was started."""
        return None if self._process is None else self._process.poll()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _output(self, last_bytes: int | None = None) -> str:
        """What this start of the server has written, or the end of it; earlier starts wrote to the same file."""
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(self._log_start if last_bytes is None else max(self._log_start, size - last_bytes))
            return log.read().decode(errors="replace")

    def _announced_port(self) -> int | None:
        for line in self._output().splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                with contextlib.suppress(json.JSONDecodeError):
                    port = json.loads(line).get("port")
                    if isinstance(port, int):
                        return port
        return None

    def _said(self) -> str:
        tail = self._output(TAIL_BYTES).splitlines()[-TAIL_LINES:]
        return f"log {self.log_path} ends with:\n" + "\n".join(tail or ["(nothing was written)"])


def watch_lifeline(stop: Callable[[], None], grace_s: float) -> None:
    """The server's side: call `stop` when standard input ends, and end a process that still runs `grace_s` later."""

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: a daemon thread inside its lock breaks the interpreter's shutdown
            pass
        stop()
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
