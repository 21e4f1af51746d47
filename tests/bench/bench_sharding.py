"""A trainer's step over several procs against one: tokens per second, and the bytes that each proc keeps.

    python tests/bench/bench_sharding.py [--model tiny|small] [--procs 2] [--sequences 48] [--median 120]

One step of the policy channel over the same samples, each proc with one thread. The limit is as many times the speed of
one proc as there are procs, and as many times less to keep; what is missing to the first is gathering parameters and
summing gradients over gloo, and whatever else runs on the machine's cores. bfloat16 keeps the same bytes (float32) and
computes faster only where the processor has instructions for it. Each form's best time counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

# The script may be started from any folder.
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE.parent / "services" / "training")]

import torch  # noqa: E402
from bench_packing import SHAPES, samples  # noqa: E402
from procs import on_procs  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from mesh.messages import TrainBatch  # noqa: E402
from services.losses.policy import PolicyConfig  # noqa: E402
from services.rollouts.collate import even_micro_batches  # noqa: E402
from services.training.config import OptimizerConfig, ReplayConfig, SDPOConfig  # noqa: E402
from services.training.learner import Learner  # noqa: E402
from services.training.plan import MicroBatch, StepPlan  # noqa: E402
from services.training.policy_model import PolicyModel  # noqa: E402
from services.training.sharding import Replica, alone, shard  # noqa: E402


def steps(replica: Replica, shape: dict[str, Any], dtype: Any, sequences: int, median: int, repeats: int) -> Any:
    """Seconds of the best step, and the bytes of parameters and moments that this proc keeps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True, max_position_embeddings=8192))
    policy_model = PolicyModel(model)
    shard(policy_model, replica, dtype)
    learner = Learner(
        policy_model, None, lambda text: [], 1, steps=10, optimizer=OptimizerConfig(), policy=PolicyConfig(),
        sdpo=SDPOConfig(alpha=0), replay=ReplayConfig(beta=0), total=replica.total,
    )  # fmt: skip
    made = samples(sequences, median, 0.6, shape["vocab_size"])
    groups = even_micro_batches([sample.length for sample in made], 4096, replica.size)
    micro = [MicroBatch([made[i] for i in group], [], distills=False) for group in groups]
    share = StepPlan(TrainBatch(0, [], []), micro, [], 0).share(replica.rank, replica.size)
    best = float("inf")
    for _ in range(repeats):
        replica.total({})  # all begin together
        began = time.perf_counter()
        learner.step(share, None)
        best = min(best, time.perf_counter() - began)
    kept = sum(local(p).nbytes for p in learner.parameters)
    moments = (local(state[name]) for state in learner.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    return best, kept + sum(moment.nbytes for moment in moments), sum(sample.length for sample in made)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def one_proc(_: Replica, *args: Any) -> Any:
    """As a trainer of one proc does it: in float32 the model stays as it is."""
    return steps(alone(), *args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="small")
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--median", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    rest = (given.sequences, given.median, given.repeats)
    forms = [(1, "float32", one_proc), (1, "bfloat16", steps), (given.procs, "float32", steps)]
    base = None
    for size, dtype, function in forms:
        measured = on_procs(size, function, SHAPES[given.model], dtype, *rest, collective_s=600.0, answer_s=1800.0)
        seconds, tokens = max(each[0] for each in measured), measured[0][2]
        kept = max(each[1] for each in measured)
        base = base or (seconds, kept)
        print(
            f"{size} proc(s), {dtype:8}  {tokens / seconds:8.0f} tokens/s  {base[0] / seconds:5.2f} x one proc"
            f"   keeps {kept / 2**20:7.1f} MB a proc, {kept / base[1]:4.2f} x"
        )


if __name__ == "__main__":
    main()
