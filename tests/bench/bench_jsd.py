"""Memory and time of the generalized JSD over a large vocabulary: plain autograd against chunks.

    python tests/bench/bench_jsd.py [--rows 2048] [--vocab 151936] [--beta 0.5] [--device cpu|cuda]

Each variant runs forward and backward once in a child process of its own, so that its peak is its own. On a CPU the
peak is the growth of the process's maximum resident size after both logits were made; on CUDA the allocator's peak
above the same point. The student's logits come from a linear head, as in training; their gradient (one copy of the
logits) is part of the peak, except with `reuse_rows`, which writes it over the logits. Rows are cut when memory is
short.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

# The script may be started from any folder.
sys.path.insert(0, str(Path(__file__).parents[2]))

from services.losses import chunked_jsd, jsd_rows

VARIANTS = ("plain", "chunked", "chunked, reuse_rows")
HIDDEN = 16
PLAIN_COPIES = 12.5  # (rows, vocab) float32 tensors alive at the plain variant's peak, the two inputs included
TIME_LIMIT_S = 1800


def divergence(variant: str, student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    if variant == "plain":
        return jsd_rows(student, teacher, beta=beta)
    return chunked_jsd(student, teacher, beta=beta, reuse_rows=variant == "chunked, reuse_rows")


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(variant: str, rows: int, vocab: int, beta: float, device: str) -> dict[str, float]:
    """One forward and backward: peak bytes above the inputs, seconds, loss, and the head's gradient norm."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warm = torch.randn(2, HIDDEN, device=device, requires_grad=True)
    divergence(
        variant, warm @ torch.randn(HIDDEN, 64, device=device), torch.randn(2, 64, device=device), beta
    ).sum().backward()

    hidden = torch.randn(rows, HIDDEN, device=device)
    head = (torch.randn(HIDDEN, vocab, device=device) / 2).requires_grad_()
    with torch.no_grad():
        teacher = hidden @ (head + torch.randn_like(head) / 4)
    student = hidden @ head
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    baseline, start = peak_bytes(device), time.perf_counter()
    loss = divergence(variant, student, teacher, beta).mean()
    loss.backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {
        "peak": peak_bytes(device) - baseline,
        "seconds": seconds,
        "loss": loss.item(),
        "gradient": head.grad.norm().item(),
    }


def fitting_rows(rows: int, vocab: int, device: str) -> int:
    """As many rows as the plain variant can take in three quarters of the memory that is free now."""
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    return max(1, min(rows, int(free * 3 / 4 / (PLAIN_COPIES * vocab * 4))))


def in_child(variant: str, arguments: argparse.Namespace, rows: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--variant", variant, "--rows", str(rows), "--vocab", str(arguments.vocab)]
    command += ["--beta", str(arguments.beta), "--device", arguments.device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"variant {variant!r} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one here and print JSON")
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments.variant, arguments.rows, arguments.vocab, arguments.beta, arguments.device)))
        return

    rows = fitting_rows(arguments.rows, arguments.vocab, arguments.device)
    if rows < arguments.rows:
        print(f"memory is short: {rows} rows instead of {arguments.rows}")
    logits = rows * arguments.vocab * 4
    print(
        f"T={rows} V={arguments.vocab} float32 (logits {logits / 2**20:.0f} MiB), beta={arguments.beta}, "
        f"{arguments.device}, one thread"
    )
    results = {variant: in_child(variant, arguments, rows) for variant in VARIANTS}
    plain = results["plain"]
    titles = ("peak MiB", "x logits", "of plain", "seconds", "of plain", "loss", "|grad|")
    print(f"{'variant':<22}" + "".join(f"{title:>12}" for title in titles))
    for variant, r in results.items():
        print(
            f"{variant:<22}{r['peak'] / 2**20:>12.0f}{r['peak'] / logits:>12.2f}{r['peak'] / plain['peak']:>12.3f}"
            f"{r['seconds']:>12.2f}{r['seconds'] / plain['seconds']:>12.2f}{r['loss']:>12.6f}{r['gradient']:>12.4e}"
        )


if __name__ == "__main__":
    main()
