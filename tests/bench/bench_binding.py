"""What a call through a `Binding` costs beside the bare Monarch call that it makes.

    python tests/bench/bench_binding.py [--calls 2000] [--concurrent 64]

One actor on a proc of its own, one endpoint that returns its argument. The ways take turns, block by block, so that a
busy machine slows all of them alike: the bare call, the bare call under `asyncio.wait_for` (the least that a bounded
call can cost), and `Binding.call`. Shown are medians per call: of single calls one after the other, and of rounds of
calls at once, where a round's time is divided by its calls.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[2]
# Both here and in the spawned procs, the script's folder and the packages are importable from wherever it is started.
PATHS = [str(ROOT), str(Path(__file__).parent)]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])

from monarch.actor import Actor, concurrent_endpoint, shutdown_context, this_host  # noqa: E402

from mesh.binding import Binding, MemberRef, RoleTable  # noqa: E402
from mesh.roles import contract  # noqa: E402
from mesh.supervision import install_fault_hook  # noqa: E402
from mesh.topology import configure_monarch  # noqa: E402

BLOCKS = 100
ROUNDS = 2  # of calls at once, in each block
LIMIT_S = 30.0

Call = Callable[[int], Awaitable[int]]


class Echo(Protocol):
    @contract(LIMIT_S, retry=True)
    def echo(self, value: int) -> Awaitable[int]: ...


class EchoActor(Actor):
    @concurrent_endpoint
    async def echo(self, value: int) -> int:
        return value


def ways(handle: Any) -> dict[str, Call]:
    binding = Binding[Echo]("echo", RoleTable("echo", (MemberRef("echo-0", handle),)))
    return {
        "bare call": lambda value: handle.echo.call_one(value),
        "bare call, wait_for": lambda value: asyncio.wait_for(handle.echo.call_one(value), LIMIT_S),
        "Binding.call": lambda value: binding.call(Echo.echo, value),
    }


async def one_after_the_other(call: Call, calls: int) -> list[float]:
    """Seconds of each call."""
    times = []
    for value in range(calls):
        start = time.perf_counter()
        await call(value)
        times.append(time.perf_counter() - start)
    return times


async def at_once(call: Call, rounds: int, concurrent: int) -> list[float]:
    """Seconds per call of each round of `concurrent` calls."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        await asyncio.gather(*[call(value) for value in range(concurrent)])
        times.append((time.perf_counter() - start) / concurrent)
    return times


async def measure(handle: Any, calls: int, concurrent: int) -> dict[str, tuple[list[float], list[float]]]:
    """For every way, the times one after the other and the times at once."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways(handle)}
    for call in ways(handle).values():  # the first calls open connections
        await one_after_the_other(call, 50)
    for _ in range(BLOCKS):
        for name, call in ways(handle).items():
            times[name][0].extend(await one_after_the_other(call, calls // BLOCKS))
            times[name][1].extend(await at_once(call, ROUNDS, concurrent))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help=f"calls of each way, at least {BLOCKS}")
    parser.add_argument("--concurrent", type=int, default=64, help="calls at once")
    options = parser.parse_args()
    if options.calls < BLOCKS or options.concurrent < 1:
        parser.error(f"--calls must be {BLOCKS} or more and --concurrent 1 or more")

    configure_monarch()
    install_fault_hook(print)
    procs = this_host().spawn_procs(per_host={"procs": 1})
    handle = procs.spawn("echo", EchoActor)
    times = asyncio.run(measure(handle, options.calls, options.concurrent))
    bare = [statistics.median(column) for column in times["bare call"]]
    together = f"{options.concurrent} at once"
    print(f"{'median us per call':<22}{'1 at a time':>14}{'of bare':>9}{together:>14}{'of bare':>9}")
    for name, columns in times.items():
        medians = [statistics.median(column) for column in columns]
        cells = [f"{m * 1e6:>14.0f}{m / b:>9.2f}" for m, b in zip(medians, bare, strict=True)]
        print(f"{name:<22}" + "".join(cells), flush=True)
    procs.stop().get(timeout=60)
    shutdown_context().get(timeout=30)


if __name__ == "__main__":
    # The actor must belong to an importable module, not to __main__, for the spawned proc to find it.
    import bench_binding

    bench_binding.main()
    sys.stdout.flush()
    os._exit(0)
