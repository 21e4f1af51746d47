"""A replica that trains a small model under DiLoCo over an object store: in a thread, or as a process of its own.

    python object_store_replica.py '{"uri": ..., "rank": 0, "world_size": 3, ...}'

The process trains until the file STOP in `log` names a round that it has reached, and writes one line of JSON for every
round it committed: the round, the participants, and a digest of parameters, originals and outer momentum.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RUST_LOG", "error")

import numpy as np
import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from services.diloco.config import DilocoConfig
from services.diloco.object_store import ObjectStoreManager

SHAPES = [[(3, 4), (5,)], [(2, 2), (7,)], [(6,), (1, 3)]]  # of the parameters of three fragments
INNER_LR, OUTER_LR, MOMENTUM = 0.1, 0.7, 0.9


class Fragment(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        for number, shape in enumerate(SHAPES[index]):
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, generator=generator)))


def gradient(rank: int, step: int, parameter: np.ndarray, index: int) -> np.ndarray:
    """Different on every replica and in every step, and dependent on the parameter."""
    wave = np.sin(np.arange(parameter.size, dtype=np.float64) * (rank + 1) + 0.7 * step + index)
    return (parameter - wave.reshape(parameter.shape)).astype(np.float32)


class Replica:
    def __init__(
        self, manager: ObjectStoreManager, rank: int, *, fragments=1, sync_every=4, delay=0, alpha=0.0
    ) -> None:
        self.manager, self.rank, self.step = manager, rank, 0
        self.fragments = [Fragment(index) for index in range(fragments)]
        self.parameters = [p for fragment in self.fragments for p in fragment.parameters()]
        self.inner = torch.optim.SGD(self.parameters, lr=INNER_LR)
        self.outer = [
            torch.optim.SGD(f.parameters(), lr=OUTER_LR, momentum=MOMENTUM, nesterov=True) for f in self.fragments
        ]
        self.loop = DiLoCo(
            manager, list(self.fragments), self.inner, list(self.outer), sync_every=sync_every,
            fragment_sync_delay=delay, fragment_update_alpha=alpha,
        )  # fmt: skip
        manager.register_state_dict_fn("model", self.load, self.save)

    def save(self) -> dict:
        originals = [original for f in self.loop._fragments for original in f.original_parameters.values()]
        return {"step": self.step, "parameters": [original.clone() for original in originals]}

    def load(self, state: dict) -> None:
        """The source's originals are the model: a first contribution of 0 (and it does not count)."""
        self.step = state["step"]
        with torch.no_grad():
            for parameter, value in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(value)

    def train(self, done: Callable[[], bool], weight: Callable[[int], float] = lambda step: 1.0) -> Iterator[int]:
        """Inner steps until `done`, with syncs inside; yields the step after each."""
        with self.loop:
            while not done():
                for index, parameter in enumerate(self.parameters):
                    values = gradient(self.rank, self.step, parameter.detach().numpy(), index)
                    parameter.grad = torch.from_numpy(values)
                self.manager.contribute(weight(self.step))
                self.step += 1
                self.inner.step()
                yield self.step

    def digest(self) -> str:
        """Of what replicas share right after a sync: originals, outer momenta, and the fragment that was synced."""
        synced = self.fragments[(self.manager.current_step() - 1) % len(self.fragments)]
        tensors = [*synced.parameters(), *(t for f in self.loop._fragments for t in f.original_parameters.values())]
        for outer in self.outer:
            for state in outer.state_dict()["state"].values():
                tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        sha = hashlib.sha256()
        for tensor in tensors:
            sha.update(tensor.detach().numpy().tobytes())
        return sha.hexdigest()


def main(options: dict) -> None:
    rank, log = options["rank"], Path(options["log"])
    config = DilocoConfig(uri=options["uri"], **options["config"])
    if options.get("die_writing"):
        die_writing(options["die_writing"])
    manager = ObjectStoreManager(config, rank, options["world_size"])
    replica = Replica(manager, rank, fragments=options.get("fragments", 1), sync_every=options.get("sync_every", 4))
    stop = log / "STOP"
    with (log / f"{rank}.jsonl").open("a", buffering=1) as lines:
        before = 0
        for step in replica.train(lambda: stop.exists() and manager.current_step() >= int(stop.read_text())):
            time.sleep(options.get("pace_s", 0.01))
            if manager.current_step() != before:
                before = manager.current_step()
                line = {
                    "round": before,
                    "digest": replica.digest(),
                    "participants": manager.num_participants(),
                    "left_out": manager.left_out,
                    "step": step,
                    "pid": os.getpid(),
                }
                lines.write(json.dumps(line) + "\n")
    manager.shutdown()


def die_writing(number: int) -> None:
    """Be killed in the middle of the file of the `number`-th contribution."""
    save, calls = torch.save, []

    def half(value, path) -> None:
        calls.append(path)
        save(value, path)
        if len(calls) == number:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
