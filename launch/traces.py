"""What a run leaves on this host, looked for from outside: processes, open ports, shared memory, half-written files.

Every process of a run descends from its driver and inherits its environment. A word in it tells them from all others,
those too that no status names: a sandbox of a rewarder, an engine's worker, a server.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
import time
from pathlib import Path

from launch.leftovers import FILE as PIDS
from mesh.processes import ProcessId, process

VARIABLE = "MILKWEED_TRACE"
UNFINISHED = re.compile(r".*\.(writing|replaced|aside|tmp|takeover)")
OF_A_LIVE_RUN = ("mesh.ref", "driver.lock", PIDS)


class Traces:
    """Of one run, or a run and its resumes: start each driver with `mark` in its environment. Needs Linux's /proc."""

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self.word = secrets.token_hex(8)
        self.seen: set[int] = set()  # pids that the run had at some time

    @property
    def mark(self) -> dict[str, str]:
        return {VARIABLE: self.word}

    def processes(self) -> list[ProcessId]:
        """The run's processes that live now. Call it now and then: shared memory is found by its owner's pid."""
        wanted, found = f"{VARIABLE}={self.word}".encode(), list[ProcessId]()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = wanted in (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # it has just ended, or is another user's
                continue
            living = process(int(folder.name)) if marked else None
            if living is not None:
                found.append(living)
        self.seen |= {each.pid for each in found}
        return found

    def left(self, wait_s: float = 10.0) -> list[str]:
        """What is left of a run that has ended, each in one line; what is about to end has `wait_s` seconds for it."""
        until = time.monotonic() + wait_s
        while self.processes() and time.monotonic() < until:
            time.sleep(0.1)
        living = self.processes()
        return [
            *(f"process {each.pid}: {_command(each.pid)}" for each in living),
            *(f"port {port} is open" for port in sorted(listening([each.pid for each in living]))),
            *(f"shared memory {path}" for path in self._shared_memory()),
            *(f"file {path}" for path in self._files()),
        ]

    def _shared_memory(self) -> list[Path]:
        """Files that carry the pid of one of the run's processes in their names."""
        folders = {Path("/dev/shm"), Path(tempfile.gettempdir())}
        names = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
        kinds = ("milkweed-region-", "torch_", "psm_", "sem.")
        return [
            path
            for path in names
            if path.name.startswith(kinds) and self.seen & {int(number) for number in re.findall(r"\d+", path.name)}
        ]

    def _files(self) -> list[Path]:
        """What only a run that lives, or a writer that was killed, has in its folder."""
        half = [path for path in self.run_dir.rglob("*") if UNFINISHED.fullmatch(path.name)]
        return half + [path for name in OF_A_LIVE_RUN if (path := self.run_dir / name).exists()]


def listening(pids: list[int], beyond_this_host: bool = False) -> set[str]:
    """Addresses, "7F000001:1F90" as the kernel writes them, on which these processes accept connections.

    `beyond_this_host`: only those that another host could reach.
    """
    sockets = {link for pid in pids for link in _descriptors(pid)}
    loopback = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        lines = Path(table).read_text().splitlines()[1:] if Path(table).exists() else []
        for line in lines:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in sockets:  # 0A: listening
                found.add(local)
    return {local for local in found if not (beyond_this_host and local.startswith(loopback))}


def _descriptors(pid: int) -> list[str]:
    links: list[str] = []
    with contextlib.suppress(OSError):  # the process, or this descriptor, has just ended
        links += [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    return links


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "(ended just now)"
    return b" ".join(words).decode(errors="replace").strip()[:200]
