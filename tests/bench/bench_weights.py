"""How long one version takes from the trainer's tensors to the reader's, as a multiple of one memcpy of its bytes.

    python tests/bench/bench_weights.py [--megabytes 64 256] [--rounds 5]

Publish is a copy and a checksum, pull is a read and a checksum; the median of the rounds is shown. The first round,
which touches fresh memory, is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402  after the environment that it and the spawned procs read
from monarch.actor import Actor, concurrent_endpoint  # noqa: E402


class BenchTrainer(Actor):
    def __init__(self, nbytes: int) -> None:
        from services.weights.snapshots import SnapshotPublisher

        self.named = {f"layer{i}": torch.full((nbytes // 64,), float(i)) for i in range(16)}
        self.publisher = SnapshotPublisher(self.named)

    @concurrent_endpoint
    async def memcpy_s(self) -> float:
        source = torch.cat(list(self.named.values()))
        target = torch.empty_like(source)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    @concurrent_endpoint
    async def publish(self, version: int):
        start = time.perf_counter()
        await self.publisher.publish(version, self.named)
        return time.perf_counter() - start, self.publisher.lease(version - 1)

    @concurrent_endpoint
    async def release(self, lease_id: str) -> None:
        self.publisher.release(lease_id)

    @concurrent_endpoint
    async def close(self) -> None:
        await self.publisher.close()


class BenchReader(Actor):
    def __init__(self, via: str) -> None:
        from services.weights.snapshots import SnapshotReader, WeightsConfig

        self.reader = SnapshotReader(WeightsConfig(via=via))

    @concurrent_endpoint
    async def pull(self, ref) -> float:
        start = time.perf_counter()
        await self.reader.pull(ref)
        return time.perf_counter() - start


def measure(host, megabytes: int, via: str, rounds: int) -> tuple[float, float, float, float]:
    """Seconds of one memcpy, of publish, of pull, and from the start of publish to the end of pull."""
    procs = [host.spawn_procs(per_host={"gpus": 1}) for _ in range(2)]
    trainer = procs[0].spawn("trainer", BenchTrainer, megabytes << 20)
    reader = procs[1].spawn("reader", BenchReader, via)
    memcpy = trainer.memcpy_s.call_one().get(timeout=60)
    results = []
    for version in range(1, rounds + 2):
        start = time.perf_counter()
        publish, ref = trainer.publish.call_one(version).get(timeout=60)
        pull = reader.pull.call_one(ref).get(timeout=60)
        results.append((publish, pull, time.perf_counter() - start))
        trainer.release.call_one(ref.lease_id).get(timeout=60)
    trainer.close.call_one().get(timeout=60)
    for proc in procs:
        proc.stop().get(timeout=60)
    publish, pull, total = (statistics.median(column) for column in zip(*results[1:], strict=True))
    return memcpy, publish, pull, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    from monarch.actor import shutdown_context, this_host

    from mesh.supervision import install_fault_hook
    from mesh.topology import configure_monarch

    configure_monarch()
    install_fault_hook(print)
    print(f"{'MB':>5} {'way':>5} {'memcpy ms':>10} {'publish ms':>11} {'pull ms':>9} {'total ms':>9} {'x memcpy':>9}")
    for megabytes in options.megabytes:
        for via in ("shm", "rdma"):
            memcpy, publish, pull, total = measure(this_host(), megabytes, via, options.rounds)
            print(
                f"{megabytes:>5} {via:>5} {memcpy * 1e3:>10.1f} {publish * 1e3:>11.1f} {pull * 1e3:>9.1f} "
                f"{total * 1e3:>9.1f} {total / memcpy:>9.1f}",
                flush=True,
            )
    shutdown_context().get(timeout=30)


if __name__ == "__main__":
    import sys

    # The actors must belong to an importable module, not to __main__, for the spawned procs to find them.
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    import bench_weights

    bench_weights.main()
    sys.stdout.flush()
    os._exit(0)
