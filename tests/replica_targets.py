"""Targets that the executor tests launch: they live in an importable module, as replicas need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from services.executors import Replica


def describe(replica: Replica) -> dict[str, Any]:
    print(f"I am {replica.rank} of {replica.world_size}", flush=True)
    print("this went to standard error", file=sys.stderr)
    return {"rank": replica.rank, "payload": replica.payload, "env": os.environ.get("REPLICA_TEST")}


def fail_at_rank_1(replica: Replica) -> str:
    if replica.rank == 1:
        print("about to fail")
        raise ValueError("the shard is empty")
    return "done"


def kill_itself(replica: Replica) -> None:
    print("no memory left", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def leave(replica: Replica) -> None:
    sys.exit(int(replica.payload["code"]))


def not_json(replica: Replica) -> Any:
    return {1, 2}


def meet(replica: Replica) -> list[int]:
    """Every replica leaves its rank in the store and waits for the others': all of them run at the same time."""
    store = Path(replica.uri)
    (store / f"here-{replica.rank}").touch()
    until = time.monotonic() + 120
    while len(found := sorted(int(p.name[5:]) for p in store.glob("here-*"))) < replica.world_size:
        assert time.monotonic() < until, f"only {found} came"
        time.sleep(0.05)
    return found


def sleep_with_stubborn_family(replica: Replica) -> None:
    """Starts a child in a session of its own and a grandchild whose parent is gone, none of which heeds SIGTERM."""
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    orphan = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-S', '-c', {stubborn!r}], stdout=sys.stderr, start_new_session=True)\n"
        "print(p.pid, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-S", "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    child.stdout.readline()
    grandchild = subprocess.run([sys.executable, "-S", "-c", orphan], stdout=subprocess.PIPE, timeout=60, check=True)
    pids = [os.getpid(), child.pid, int(grandchild.stdout.split()[0])]
    if replica.payload.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    aside = Path(replica.uri, f".pids-{replica.rank}")
    aside.write_text(" ".join(map(str, pids)))
    aside.rename(Path(replica.uri, f"pids-{replica.rank}"))
    time.sleep(600)


def clean_up_when_asked_to_end(replica: Replica) -> None:
    try:
        Path(replica.uri, "started").touch()
        time.sleep(600)
    finally:
        Path(replica.uri, "cleaned").touch()


def count(replica: Replica) -> int:
    """Prints a line whenever it is asked to, by a file in the store."""
    until = time.monotonic() + 120
    for i in range(3):
        while not Path(replica.uri, f"go-{i}").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        print(f"line {i}", flush=True)
    return 3


def environment(replica: Replica) -> dict[str, str]:
    return dict(os.environ)


def sleep_or_return(replica: Replica) -> str:
    """Rank 0 sleeps for ever."""
    if replica.rank == 0:
        print("sleeping", flush=True)
        sleep_with_stubborn_family(replica)
    return "returned"
