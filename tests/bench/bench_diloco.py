"""What a sync of two replicas costs, against a raw all-reduce of the same bytes; and what the hook costs where none is.

    python tests/bench/bench_diloco.py [--millions 10] [--repeats 15] [--threads 1]

Two procs of one thread each, real quorums, gloo over loopback, float32. The limit is the raw all-reduce; beyond it a
sync reads and writes the model's size several times (pseudo-gradient, division, outer step, parameters) and makes a
quorum, two tiny all-reduces and a commit. Both are measured in turn in the same run, and medians compared. The inner
step is SGD's on the same parameters, with the hook and without, in turn; its overhead does not grow with the model.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# The script may be started from any folder.
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from services.diloco.config import DilocoConfig
from services.diloco.lighthouse import Lighthouse
from services.diloco.manager import open_manager
from services.diloco.replicas import Outer
from services.meeting import free_port, open_store

CONFIG = DilocoConfig(sync_every=1, collective_s=60, quorum_s=90)


def parameters(millions: float, tensors: int = 20) -> dict[str, torch.nn.Parameter]:
    each = int(millions * 1e6 / tensors)
    return {f"p{i}": torch.nn.Parameter(torch.ones(each)) for i in range(tensors)}


def replica(rank: int, lighthouse: str, port: int, given: argparse.Namespace, answers: Any) -> None:
    torch.set_num_threads(given.threads)
    store = dist.TCPStore("127.0.0.1", port, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    trained = parameters(given.millions)
    optimizer = torch.optim.SGD(trained.values(), lr=1e-3)
    outer = Outer(CONFIG, trained, optimizer, open_manager(CONFIG, replica=rank, lighthouse=lighthouse))
    flat = torch.ones(int(given.millions * 1e6))
    raw, synced = [], []
    for _ in range(given.repeats + 2):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(flat)
        raw.append(time.perf_counter() - began)
        flat.fill_(1)
        outer.trained(100)
        dist.barrier()
        began = time.perf_counter()
        optimizer.step()  # no gradients: all of it is the sync
        synced.append(time.perf_counter() - began)
    outer.close()
    plain, hooked = steps(given)
    # The first ones also connect, and touch memory for the first time.
    answers.put((rank, [statistics.median(each) for each in (raw[2:], synced[2:], plain, hooked)]))


def steps(given: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds of inner steps without an outer loop, and with one that syncs at none of them."""
    trained = parameters(given.millions)
    for parameter in trained.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(trained.values(), lr=1e-3)
    config = DilocoConfig(sync_every=10**6)
    outer = Outer(config, trained, optimizer, Nobody())
    plain, hooked = [], []
    for turn in range(given.repeats * 10):
        both = [(False, plain), (True, hooked)]
        for attached, found in both if turn % 2 else reversed(both):
            outer._loop.attach() if attached else outer._loop.detach()
            began = time.perf_counter()
            outer.trained(100)
            optimizer.step()
            found.append(time.perf_counter() - began)
    return plain, hooked


class Nobody:
    """A manager for steps that make no sync."""

    _use_async_quorum = False

    def register_state_dict_fn(self, *_: Any) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    lighthouse = Lighthouse(CONFIG, free_port(CONFIG.host))
    store, answers = open_store(CONFIG.host, 60), context.Queue()
    procs = [
        context.Process(target=replica, args=(r, lighthouse.address, store.port, given, answers), daemon=True)
        for r in range(2)
    ]
    for proc in procs:
        proc.start()
    figures = dict(answers.get(timeout=600) for _ in procs)
    for proc in procs:
        proc.join(30)
        proc.kill()
    lighthouse.close()
    raw, synced, plain, hooked = (max(each) for each in zip(*figures.values(), strict=True))
    print(f"{given.millions:g} M parameters, 2 replicas of {given.threads} thread(s)")
    print(f"raw all-reduce  {raw * 1e3:8.1f} ms")
    print(f"sync            {synced * 1e3:8.1f} ms   {synced / raw:5.2f} x the raw all-reduce")
    print(f"inner step      {plain * 1e3:8.3f} ms")
    print(f"  with the hook {hooked * 1e3:8.3f} ms   {hooked / plain:5.3f} x, {(hooked - plain) * 1e6:.0f} us more")


if __name__ == "__main__":
    main()
