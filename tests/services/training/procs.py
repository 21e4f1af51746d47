"""Running a function on the procs of a replica, each a real process with a process group of its own."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from typing import Any

import torch

from services.training.sharding import join, meeting_point

# Forked off a server that has imported all this once: a new interpreter per proc would import for seconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["services.training.policy_model", "services.training.sharding", "transformers.models.qwen3.modeling_qwen3"]
)


def on_procs(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    collective_s: float = 30.0,
    answer_s: float = 120.0,
    lost: int | None = None,
) -> list[Any]:
    """`function(replica, *args)` on `size` procs; what it returned, by rank.

    `collective_s` is the limit of a collective, `answer_s` that of the whole. The proc `lost` is not expected to
    answer. AssertionError with the traceback of each that failed.
    """
    ports: Any = _context.Queue()
    pipes = [_context.Pipe(duplex=False) for _ in range(size)]
    procs = [
        _context.Process(target=_proc, args=(rank, size, ports, pipe, collective_s, function, args), daemon=True)
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for each in procs:
        each.start()
    try:
        answers = [
            pipe.recv() if rank != lost and pipe.poll(answer_s) else (rank == lost, None)
            for rank, (pipe, _) in enumerate(pipes)
        ]
    finally:
        for each in procs:
            each.kill()
            each.join()
    failures = [f"rank {rank}: {answer or 'no answer'}" for rank, (fine, answer) in enumerate(answers) if not fine]
    assert not failures, "\n".join(failures)
    return [answer for _, answer in answers]


def _proc(
    rank: int, size: int, ports: Any, answers: Any, limit_s: float, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    try:
        if rank == 0:
            meeting, port = meeting_point(size, limit_s)
            for _ in range(size - 1):
                ports.put(port)
        else:
            meeting = ports.get(timeout=limit_s)
        replica = join(rank, size, meeting, limit_s=limit_s)
        answers.send((True, function(replica, *args)))
        signal.pause()  # until all are done and this one is killed: who left would fail the others
    except Exception:
        answers.send((False, traceback.format_exc()))
