"""How long a round over a local path takes, as a multiple of writing and reading the same bytes without more.

    python tests/bench/bench_object_store.py [--parameters 10000000] [--replicas 2] [--rounds 7]

Replicas are processes that begin each round together. Beside every round they take turns at the plain thing: each
writes a file of its tensor's bytes (aside, then renamed) and, when all are there, reads those of the others. The
medians over the rounds of the slowest replica are shown, without the first, and their ratio. What a round adds is the
look at the folder every `poll_s` (0.02 s here), the archive of torch.save with its checksum, and the average.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402  after the environment that it and the children read
import torch  # noqa: E402

LIMIT_S = 300
POLL_S = 0.02


def replica(rank: int, world: int, parameters: int, rounds: int, folder: str, barrier, results) -> None:
    from services.diloco.object_store import ObjectStoreAllReduce

    torch.set_num_threads(1)
    reduce = ObjectStoreAllReduce(f"{folder}/store", rank, world, poll_s=POLL_S, timeout_s=LIMIT_S, keep_rounds=2)
    values = torch.randn(parameters, generator=torch.Generator().manual_seed(rank))
    for number in range(rounds + 1):
        tensor = values.clone()
        barrier.wait(LIMIT_S)
        start = time.perf_counter()
        plain(tensor, rank, world, Path(folder, f"plain-{number}"))
        plain_s = time.perf_counter() - start
        barrier.wait(LIMIT_S)
        start = time.perf_counter()
        assert reduce.average([tensor]) == list(range(world))
        results.put((number, plain_s, time.perf_counter() - start))


def plain(tensor: torch.Tensor, rank: int, world: int, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    aside = folder / f".{rank}"
    tensor.numpy().tofile(aside)
    aside.rename(folder / f"{rank}")
    for other in range(world):
        if other != rank:
            while not (folder / f"{other}").exists():
                time.sleep(0.001)
            assert np.fromfile(folder / f"{other}", dtype=np.float32).size == tensor.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(options.replicas), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        children = [
            context.Process(
                target=replica,
                args=(rank, options.replicas, options.parameters, options.rounds, folder, barrier, results),
            )
            for rank in range(options.replicas)
        ]
        for child in children:
            child.start()
        rows = [results.get(timeout=LIMIT_S) for _ in range(options.replicas * (options.rounds + 1))]
        for child in children:
            child.join(LIMIT_S)
    slowest = {number: [max(r[i] for r in rows if r[0] == number) for i in (1, 2)] for number in {r[0] for r in rows}}
    bytes_s, round_s = (statistics.median(slowest[number][i] for number in slowest if number) for i in (0, 1))
    print(
        f"{options.parameters / 1e6:g} M float32, {options.replicas} replicas: a round {round_s * 1e3:.0f} ms, "
        f"the same bytes written and read {bytes_s * 1e3:.0f} ms, ratio {round_s / bytes_s:.1f}"
    )


if __name__ == "__main__":
    main()
