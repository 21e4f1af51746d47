"""Peak memory of a training step with whole logits, in chunks, and with activations computed again in backward.

    python tests/bench/bench_memory.py [--tokens 2048] [--vocab 49152] [--hidden 576] [--layers 6] [--distilled 512]

One step with the policy and SDPO channels; the teacher's rows come from a reader. `whole logits` is the step as one
writes it first: the model's logits (B, T, V), log-softmax over them, all teacher rows at once, plain autograd. The
others are the trainer's. Each variant runs in a child process of its own, so that its peak is its own: the growth of
the process's maximum resident size (on CUDA, the allocator's peak) over what it was before the step. That is without
the parameters, but with their gradients, one set per channel, which are the floor that no variant can go below. The
children's allocator gives large blocks back at once (glibc would keep those of some sizes for later), so that the
resident size is what is in use.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

# The script may be started from any folder.
sys.path.insert(0, str(Path(__file__).parents[2]))

from services.losses.logprobs import token_logprobs
from services.losses.sdpo import SDPOLossConfig, sdpo_loss
from services.rollouts.samples import TrainSample
from services.training.packing import pack
from services.training.policy_model import Distillation, PolicyModel

VARIANTS = ("whole logits", "chunked", "chunked, checkpointed")
SEQUENCE = 256
TIME_LIMIT_S = 1800


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def teacher_reader(vocab: int, device: str) -> Callable[[int], torch.Tensor]:
    """Rows as they come over the wire: made when they are asked for."""
    generator = torch.Generator(device).manual_seed(1)
    return lambda count: torch.randn(count, vocab, generator=generator, device=device)


def make_model(arguments: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.vocab, hidden_size=arguments.hidden, intermediate_size=arguments.hidden * 8 // 3,
        num_hidden_layers=arguments.layers, num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 192, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(arguments.device)


def make_samples(tokens: int, vocab: int) -> list[TrainSample]:
    """Sequences of one length: what is measured here is not padding. Half of their tokens were sampled."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(tokens // SEQUENCE):
        mask = np.arange(SEQUENCE) >= SEQUENCE // 2
        ids = rng.integers(3, vocab, SEQUENCE)
        nothing = np.zeros(SEQUENCE, dtype=np.float32)
        made.append(TrainSample(str(index), 0, ids, mask, nothing, np.zeros(SEQUENCE, dtype=np.int64), 1.0))
    return made


def whole_step(model: Any, samples: list[TrainSample], rows: torch.Tensor, read: Callable[[int], torch.Tensor]) -> Any:
    device = model.device
    ids = torch.from_numpy(np.stack([sample.token_ids for sample in samples])).to(device)
    mask = torch.from_numpy(np.stack([sample.loss_mask for sample in samples]))[:, 1:].to(device)
    logits = model(input_ids=ids, use_cache=False).logits
    logprobs = token_logprobs(logits, ids)
    policy = -(logprobs * mask).sum() / mask.sum()
    policy.backward(retain_graph=True)
    first = [p.grad for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    student = logits.flatten(0, 1)[rows]
    sdpo = sdpo_loss(student, read(len(rows)), config=SDPOLossConfig(), normalizer=float(len(rows))).loss
    sdpo.backward()
    return policy.item(), sdpo.item(), first


def chunked_step(
    model: PolicyModel, samples: list[TrainSample], rows: torch.Tensor, read: Callable[[int], torch.Tensor]
) -> Any:
    packed = pack(samples, model.device)
    config, normalizer = SDPOLossConfig(), float(len(rows))
    distillation = Distillation(rows, read, lambda s, t: sdpo_loss(s, t, config=config, normalizer=normalizer))
    output = model(packed, 1.0, distillation)
    policy = -output.logprobs.mean()
    policy.backward(retain_graph=True)
    first = [p.grad for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    assert output.distilled_loss is not None
    output.distilled_loss.backward()
    return policy.item(), output.distilled_loss.item(), first


def measure(variant: str, arguments: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    device = arguments.device
    model = make_model(arguments)
    if variant != "whole logits":
        checkpointing = variant == "chunked, checkpointed"
        model = PolicyModel(model, logits_chunk=arguments.chunk, checkpointing=checkpointing)
    step = whole_step if variant == "whole logits" else chunked_step
    read = teacher_reader(arguments.vocab, device)
    samples = make_samples(arguments.tokens, arguments.vocab)
    sampled = torch.from_numpy(np.concatenate([np.append(s.loss_mask[1:], False) for s in samples]).nonzero()[0])
    rows = sampled[: arguments.distilled].to(device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    baseline, start = peak_bytes(device), time.perf_counter()
    policy, sdpo, first = step(model, samples, rows, read)
    seconds = time.perf_counter() - start
    return {
        "peak": peak_bytes(device) - baseline,
        "seconds": seconds,
        "policy": policy,
        "sdpo": sdpo,
        "gradients": 2 * sum(g.numel() * g.element_size() for g in first),
    }


def in_child(variant: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"variant {variant!r} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of the step; half of them are in the loss")
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--distilled", type=int, default=512, help="rows that the SDPO channel reads")
    parser.add_argument("--chunk", type=int, default=512, help="rows of logits at a time (trainer.logits_chunk)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one here and print JSON")
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments.variant, arguments)))
        return
    logits = arguments.tokens * arguments.vocab * 4
    print(
        f"T={arguments.tokens} V={arguments.vocab} H={arguments.hidden}, {arguments.layers} layers, float32; "
        f"{arguments.distilled} rows distilled; whole logits {logits / 2**20:.0f} MiB; chunks of {arguments.chunk} rows"
    )
    results = {variant: in_child(variant) for variant in VARIANTS}
    whole = results["whole logits"]
    print(f"gradients of the two channels: {whole['gradients'] / 2**20:.0f} MiB of each peak")
    titles = ("peak MiB", "x logits", "of whole", "seconds", "of whole", "policy", "sdpo")
    print(f"{'variant':<24}" + "".join(f"{title:>11}" for title in titles))
    for variant, r in results.items():
        print(
            f"{variant:<24}{r['peak'] / 2**20:>11.0f}{r['peak'] / logits:>11.2f}{r['peak'] / whole['peak']:>11.3f}"
            f"{r['seconds']:>11.1f}{r['seconds'] / whole['seconds']:>11.2f}{r['policy']:>11.5f}{r['sdpo']:>11.5f}"
        )


if __name__ == "__main__":
    main()
