"""Trainer tokens per second, packed against padded, on lengths spread as those of real rollouts.

    python tests/bench/bench_packing.py [--model tiny|small] [--sequences 48] [--median 120] [--spread 0.6]

One step of the policy channel (forward, loss, backward) over the same samples in both forms, with the same budget of
tokens per forward pass. Lengths are log-normal: multi-turn episodes end after one turn or go on for many. Tokens are
real ones in both cases, so the ratio is the speed-up of a step. `padding` is what the padded form computes in vain,
though not in the output head, which neither form runs over more than the sampled tokens. The forms take turns, and each
one's best time counts.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

# The script may be started from any folder.
sys.path.insert(0, str(Path(__file__).parents[2]))

from mesh.messages import TrainBatch
from services.losses.policy import PolicyConfig
from services.rollouts.collate import micro_batches
from services.rollouts.samples import TrainSample
from services.training.config import OptimizerConfig, ReplayConfig, SDPOConfig
from services.training.learner import Learner
from services.training.plan import MicroBatch, StepPlan
from services.training.policy_model import PolicyModel

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(vocab_size=64, hidden_size=80, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4),
    "small": dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=9,
        num_key_value_heads=3,
    ),
}  # fmt: skip


def samples(number: int, median: int, spread: float, vocab: int, seed: int = 0) -> list[TrainSample]:
    """Sequences of which a quarter of the tokens were sampled, the rest prompt and observations."""
    rng = random.Random(seed)
    made = []
    for index in range(number):
        length = max(8, round(median * rng.lognormvariate(0, spread)))
        ids = np.array([rng.randrange(3, vocab) for _ in range(length)], dtype=np.int64)
        mask = np.arange(length) % 8 >= 6
        logprobs = np.where(mask, -3.0, 0.0).astype(np.float32)
        versions = np.zeros(length, dtype=np.int64)
        made.append(TrainSample(str(index), 0, ids, mask, logprobs, versions, advantage=rng.choice([-1.0, 1.0])))
    return made


def learner(shape: dict[str, Any], packing: bool, max_tokens: int) -> Learner:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True, max_position_embeddings=8192))
    return Learner(
        PolicyModel(model, packing=packing), None, lambda text: [], 1, steps=10, optimizer=OptimizerConfig(),
        policy=PolicyConfig(), sdpo=SDPOConfig(alpha=0), replay=ReplayConfig(beta=0), max_tokens=max_tokens,
    )  # fmt: skip


def plan(made: list[TrainSample], max_tokens: int, padded: bool) -> StepPlan:
    groups = micro_batches([sample.length for sample in made], max_tokens, padded=padded)
    micro = [MicroBatch([made[i] for i in group], [], distills=False) for group in groups]
    return StepPlan(TrainBatch(0, [], []), micro, [], 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="small")
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--median", type=int, default=120)
    parser.add_argument("--spread", type=float, default=0.6, help="of the logarithm of the lengths")
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = SHAPES[arguments.model]
    made = samples(arguments.sequences, arguments.median, arguments.spread, shape["vocab_size"])
    tokens = sum(sample.length for sample in made)
    forms = {}
    for name, packing in (("padded", False), ("packed", True)):
        forms[name] = learner(shape, packing, arguments.max_tokens), plan(made, arguments.max_tokens, not packing)
    best = dict.fromkeys(forms, float("inf"))
    for _ in range(arguments.repeats + 1):  # the first is a warm-up that the best time forgets
        for name, (of, steps) in forms.items():
            start = time.perf_counter()
            of.step(steps, None)
            best[name] = min(best[name], time.perf_counter() - start)
    padded_tokens = sum(
        len(micro.samples) * max(sample.length for sample in micro.samples)
        for micro in forms["padded"][1].micro_batches
    )
    lengths = sorted(sample.length for sample in made)
    print(
        f"{arguments.model}: {len(made)} sequences of {lengths[0]} to {lengths[-1]} tokens (median "
        f"{lengths[len(lengths) // 2]}), {tokens} in all, at most {arguments.max_tokens} per forward pass, one thread"
    )
    print(f"{'form':<10}{'passes':>8}{'computed':>10}{'seconds':>10}{'tokens/s':>10}{'of padded':>11}")
    for name, (_, steps) in forms.items():
        computed = tokens if name == "packed" else padded_tokens
        print(
            f"{name:<10}{len(steps.micro_batches):>8}{computed:>10}{best[name]:>10.3f}{tokens / best[name]:>10.0f}"
            f"{best['padded'] / best[name]:>11.2f}"
        )
    print(f"padding: {1 - tokens / padded_tokens:.2f} of what the padded form computes")


if __name__ == "__main__":
    main()
