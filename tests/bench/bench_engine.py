"""Sampled tokens per second of the vLLM engine against the transformers engine, at 1, 8 and 32 requests at once.

    OMP_NUM_THREADS=1 python tests/bench/bench_engine.py [--smollm2 | --model FOLDER] [--tokens 64] [--rounds 3]

Both engines hold the same weights in one process, on one CPU thread, and take turns; each one's best round counts. The
clock is the CPU time of the process, which on one thread is the time on a machine that does nothing else. All requests
have prompts of 64 tokens of their own, so nothing is reused, and the time includes computing the prompts. The last
lines are an update of all weights between two steps, for which each engine stands still, beside a memcpy of the same
bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
sys.path.insert(0, str(Path(__file__).parents[2]))  # the script may be started from any folder

import torch

from services.engines.engine import Engine, EngineConfig, GenerationRequest
from services.engines.factory import make_engine
from services.models import load_model

PROMPT = 64
REQUESTS = (1, 8, 32)


def seconds(work: Callable[..., object], *arguments: object) -> float:
    began = time.process_time()
    work(*arguments)
    return time.process_time() - began


def sample(engine: Engine, requests: int, tokens: int, vocabulary: int, offset: int) -> None:
    for number in range(requests):
        ids = [(7 * offset + 31 * number + 3 * place * place) % vocabulary for place in range(PROMPT)]
        engine.submit(GenerationRequest(f"{offset}/{number}", ids, tokens, seed=number))
    while engine.running:
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", action="store_true", help="the bundled SmolLM2-135M-Instruct")
    parser.add_argument("--model", help="a Hugging Face folder; the default is the demo's model")
    parser.add_argument("--tokens", type=int, default=64, help="sampled per request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()

    if options.smollm2:
        from services.bundled import SMOLLM2, bundled_model

        options.model = str(bundled_model(SMOLLM2))
    elif options.model is None:
        from services.demo.warm_start import demo_model

        options.model = str(demo_model("easy"))
    model = load_model(options.model)
    weights, vocabulary = model.state_dict(), model.get_input_embeddings().num_embeddings
    engines: dict[str, Engine] = {}
    for name in ("transformers", "vllm"):
        shape = {"max_batch": max(REQUESTS), "max_length": PROMPT + options.tokens + 1, "threads": 1}
        engines[name] = make_engine(options.model, EngineConfig(engine=name, dtype=options.dtype, **shape))

    print(f"{options.model}\n{'requests':>10}{'transformers':>16}{'vllm':>10}{'ratio':>9}   tokens/s")
    for engine in engines.values():
        sample(engine, 2, 4, vocabulary, offset=0)  # whatever the first use costs
    for requests in REQUESTS:
        best = dict.fromkeys(engines, float("inf"))
        for number in range(options.rounds):
            for name, engine in engines.items():
                offset = 1 + number + 100 * requests
                taken = seconds(sample, engine, requests, options.tokens, vocabulary, offset)
                best[name] = min(best[name], taken)
        rate = {name: requests * options.tokens / taken for name, taken in best.items()}
        ratio = rate["vllm"] / rate["transformers"]
        print(f"{requests:>10}{rate['transformers']:>16,.0f}{rate['vllm']:>10,.0f}{ratio:>9.2f}")

    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    best = dict.fromkeys([*engines, "memcpy"], float("inf"))
    for number in range(options.rounds):
        for name, engine in engines.items():
            best[name] = min(best[name], seconds(engine.load_weights, number + 1, weights))
        copying = seconds(torch._foreach_copy_, list(copies.values()), list(weights.values()))
        best["memcpy"] = min(best["memcpy"], copying)
    for name in engines:
        print(f"update, {name:13}{best[name] * 1e3:>9.1f} ms, {best[name] / best['memcpy']:>6.1f} memcpys")


if __name__ == "__main__":
    main()
