"""How long one version takes from the trainer's tensors to the reader's, as a multiple of one memcpy of its bytes.

    python tests/bench/bench_weights.py [--megabytes 64 256] [--rounds 5]          any tensors, whole
    python tests/bench/bench_weights.py --deltas [--lr 1e-6 3e-6 1e-5] [--model PATH]     a model that learns, as deltas

Publishing is a copy, for which the optimizer waits, and a seal beside the next step (checksum, and what changed); a
pull is a read, or the changed words applied, and a checksum. The median of the rounds is shown, without those that
touch fresh memory for the first time.

With `--deltas` the model (SmolLM2-135M, or PATH) takes AdamW steps on a few sentences; its parameters are float32 and
published as bfloat16, once as deltas and once whole, to readers that have the version before.
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

WARM_UP = 3  # steps, after which the moments of AdamW are no longer those of its first gradient
LIMIT_S = 600
TEXTS = [
    "The agent calls search with the name of the city and reads the temperature from the observation.",
    "An unknown tool was called: the registry lists lookup, convert and finish, so lookup is what was meant.",
]


class BenchTrainer(Actor):
    """Publishes `named()` through one publisher that makes deltas and one that does not."""

    def __init__(self, nbytes: int, model: str = "") -> None:
        from services.weights.config import WeightsConfig
        from services.weights.shards import ShardWriter
        from services.weights.snapshots import SnapshotPublisher

        if model:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            self.inputs = AutoTokenizer.from_pretrained(model)(TEXTS, return_tensors="pt", padding=True)
            self.named = dict(self.model.named_parameters())
        else:
            self.named = {f"layer{i}": torch.full((nbytes // 64,), float(i)) for i in range(16)}
        self.publishers = {}
        for delta in ("auto", "off"):
            config = WeightsConfig(delta=delta, dtype="bfloat16" if model else "auto")
            self.publishers[delta] = SnapshotPublisher([ShardWriter(lambda: self.named, config)], config)

    @concurrent_endpoint
    async def begin(self, lr: float) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        for _ in range(WARM_UP):
            self.train()

    @concurrent_endpoint
    async def step(self) -> float:
        start = time.perf_counter()
        self.train()
        return time.perf_counter() - start

    def train(self) -> None:
        labels = self.inputs["input_ids"].masked_fill(self.inputs["attention_mask"] == 0, -100)
        self.model(**self.inputs, labels=labels).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @concurrent_endpoint
    async def memcpy_s(self) -> float:
        """Of as many bytes as a version has."""
        source = self.publishers["off"]._writers[0]._slots[0].region.tensor.clone()
        target = torch.empty_like(source)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    @concurrent_endpoint
    async def publish(self, version: int, delta: str):
        """Seconds of copy and seal, the metrics, and a lease for a reader of the version before."""
        publisher = self.publishers[delta]
        start = time.perf_counter()
        await publisher.copy(version)
        copied = time.perf_counter()
        await publisher.seal()
        sealed = time.perf_counter()
        return copied - start, sealed - copied, publisher.metrics(), publisher.lease(version - 1)

    @concurrent_endpoint
    async def release(self, lease_id: str, delta: str) -> None:
        self.publishers[delta].release(lease_id)

    @concurrent_endpoint
    async def close(self) -> None:
        for publisher in self.publishers.values():
            await publisher.close()


class BenchReader(Actor):
    def __init__(self) -> None:
        self.readers = {}

    @concurrent_endpoint
    async def pull(self, ref, via: str, delta: str) -> tuple[float, int]:
        """Seconds, and bytes that were fetched."""
        from services.weights.config import WeightsConfig
        from services.weights.reader import SnapshotReader

        if (via, delta) not in self.readers:
            self.readers[via, delta] = SnapshotReader(WeightsConfig(via=via, delta=delta))
        reader = self.readers[via, delta]
        await reader.pull(ref)
        return reader.last.seconds, reader.last.nbytes


def ask(endpoint, *args):
    return endpoint.call_one(*args).get(timeout=LIMIT_S)


def spawn(host, *args):
    procs = [host.spawn_procs(per_host={"gpus": 1}) for _ in range(2)]
    return procs, procs[0].spawn("trainer", BenchTrainer, *args), procs[1].spawn("reader", BenchReader)


def close(procs, trainer) -> None:
    ask(trainer.close)
    for proc in procs:
        proc.stop().get(timeout=60)


def whole_versions(host, sizes: list[int], rounds: int) -> None:
    head = ("MB", "way", "memcpy ms", "publish ms", "of it copy", "pull ms", "total ms", "x memcpy")
    print("{:>5} {:>5} {:>10} {:>11} {:>11} {:>9} {:>9} {:>9}".format(*head))
    for megabytes in sizes:
        for via in ("shm", "rdma"):
            procs, trainer, reader = spawn(host, megabytes << 20)
            memcpy = ask(trainer.memcpy_s)
            rows = []
            for version in range(1, rounds + 2):
                start = time.perf_counter()
                copy, seal, _, ref = ask(trainer.publish, version, "off")
                pull, _ = ask(reader.pull, ref, via, "off")
                rows.append((copy, copy + seal, pull, time.perf_counter() - start))
                ask(trainer.release, ref.lease_id, "off")
            close(procs, trainer)
            copy, publish, pull, total = medians(rows[1:])
            print(
                f"{megabytes:>5} {via:>5} {memcpy * 1e3:>10.1f} {publish * 1e3:>11.1f} {copy * 1e3:>11.1f} "
                f"{pull * 1e3:>9.1f} {total * 1e3:>9.1f} {total / memcpy:>9.1f}",
                flush=True,
            )


def deltas(host, rates: list[float], model: str, rounds: int) -> None:
    procs, trainer, reader = spawn(host, 0, model)
    memcpy = ask(trainer.memcpy_s)
    print(f"{model}: one memcpy of a version takes {memcpy * 1e3:.1f} ms; all below but bytes as multiples of it")
    head = ("lr", "way", "sent", "changed", "MB read", "of whole", "copy", "seal", "pull", "total", "step")
    print("{:>6} {:>5} {:>6} {:>8} {:>8} {:>9} {:>6} {:>6} {:>6} {:>7} {:>7}".format(*head))
    version = 0
    for lr in rates:
        ask(trainer.begin, lr)
        rows: dict[tuple[str, str], list[tuple[float, ...]]] = {}
        for done in range(rounds + 2):
            step, version = ask(trainer.step), version + 1
            for delta in ("off", "auto"):
                copy, seal, metrics, ref = ask(trainer.publish, version, delta)
                for via in ("shm", "rdma"):
                    pull, fetched = ask(reader.pull, ref, via, delta)
                    changed = metrics.get("weights/delta_density", float("nan"))
                    row = (changed, fetched, metrics["weights/bytes"], copy, seal, pull, copy + seal + pull, step)
                    if done >= 2:  # both slots have been written
                        rows.setdefault((via, delta), []).append(row)
                ask(trainer.release, ref.lease_id, delta)
        for (via, delta), of in sorted(rows.items(), reverse=True):
            changed, fetched, nbytes, *times = medians(of)
            copy, seal, pull, total, step = (seconds / memcpy for seconds in times)
            share = "" if delta == "off" else f"{changed:.2%}"
            print(
                f"{lr:>6.0e} {via:>5} {'whole' if delta == 'off' else 'delta':>6} {share:>8} {fetched / 1e6:>8.2f} "
                f"{fetched / nbytes:>9.2%} {copy:>6.1f} {seal:>6.1f} {pull:>6.1f} {total:>7.1f} {step:>7.0f}",
                flush=True,
            )
    close(procs, trainer)


def medians(rows: list[tuple[float, ...]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deltas", action="store_true")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--model", help="folder of a Hugging Face causal LM; default: the bundled SmolLM2-135M")
    options = parser.parse_args()

    from monarch.actor import shutdown_context, this_host

    from mesh.supervision import install_fault_hook
    from mesh.topology import configure_monarch

    configure_monarch()
    install_fault_hook(print)
    if options.deltas:
        from services.bundled import SMOLLM2, bundled_model

        deltas(this_host(), options.lr, options.model or str(bundled_model(SMOLLM2)), options.rounds)
    else:
        whole_versions(this_host(), options.megabytes, options.rounds)
    shutdown_context().get(timeout=30)


if __name__ == "__main__":
    import sys

    # The actors must belong to an importable module, not to __main__, for the spawned procs to find them.
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    import bench_weights

    bench_weights.main()
    sys.stdout.flush()
    os._exit(0)
