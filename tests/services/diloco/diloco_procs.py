"""Replicas as real processes that do what a test orders, so that they can be killed for real."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diloco_builders import adamw, inner_step, parameters

from services.diloco.config import DilocoConfig
from services.diloco.lighthouse import Lighthouse
from services.diloco.manager import open_manager
from services.diloco.replicas import Outer

ANSWER_S = 240.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["services.diloco.replicas", "services.diloco.manager", "services.diloco.lighthouse"])


class Proc:
    """A process that takes orders; `order` returns at once, `answer` waits for what the oldest order returned."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(function, args, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def order(self, name: str, *args: Any) -> Proc:
        self._pipe.send((name, args))
        return self

    def answer(self, limit_s: float = ANSWER_S) -> Any:
        assert self._pipe.poll(limit_s), f"no answer in {limit_s} s"
        fine, answer = self._pipe.recv()
        assert fine, answer
        return answer

    def ask(self, name: str, *args: Any) -> Any:
        return self.order(name, *args).answer()

    @property
    def answered(self) -> bool:
        return self._pipe.poll(0)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, how)
        if how == signal.SIGKILL:
            self._process.join(60)

    def died(self, limit_s: float = ANSWER_S) -> int | None:
        self._process.join(limit_s)
        return self._process.exitcode

    def end(self) -> None:
        self._process.kill()
        self._process.join(60)


@contextmanager
def replicas(
    config: DilocoConfig, numbers: list[int], lighthouse: str, kind: type[Replica] | None = None
) -> Iterator[dict[int, Proc]]:
    """Replicas by number, all open. Others may be added to the dict; all are ended."""
    made = {number: Proc(kind or Replica, config, number, lighthouse) for number in numbers}
    try:
        for proc in made.values():
            proc.answer()
        yield made
    finally:
        for proc in made.values():
            proc.end()


class Replica:
    """The toy under an outer loop. Step k of replica r trains r + 1 tokens."""

    def __init__(self, config: DilocoConfig, number: int, lighthouse: str) -> None:
        torch.set_num_threads(1)
        self.number = number
        self.trained = parameters()
        self.optimizer = adamw(self.trained)
        self.manager = open_manager(config, replica=number, lighthouse=lighthouse)
        self.contributions: list[float] = []
        allreduce = self.manager.allreduce

        def noted(tensor: torch.Tensor, **settings: Any) -> Any:
            self.contributions.append(float(tensor.abs().max()))
            return allreduce(tensor, **settings)

        self.manager.allreduce = noted  # type: ignore[method-assign]
        self.outer = Outer(config, self.trained, self.optimizer, self.manager)

    def train(self, to: int, pause_s: float = 0.0) -> dict[str, Any]:
        """Inner steps until `to` of them are done."""
        while self.outer.step < to:
            step = self.outer.step
            self.outer.step = step + 1
            self.outer.trained(self.number + 1)
            time.sleep(pause_s)
            inner_step(self.trained, self.optimizer, self.number, step)
        return self.report()

    def catch_up(self, at_least: int) -> dict[str, Any]:
        healed = self.outer.catch_up(at_least)
        return self.report() | {"healed": healed}

    def report(self) -> dict[str, Any]:
        moments = self.optimizer.state_dict()
        return {
            "parameters": {name: p.detach().numpy().copy() for name, p in self.trained.items()},
            "outer": {name: t.numpy().copy() for name, t in self.outer.state_dict().items()},
            "inner": {
                f"{number} {name}": torch.as_tensor(value).numpy().copy()
                for number, state in moments["state"].items()
                for name, value in state.items()
            },
            "lr": moments["param_groups"][0]["lr"],
            "step": self.outer.step,
            "rounds": self.outer.rounds,
            "retries": self.outer._loop.retries,
            "rounds_lost": self.outer._loop.rounds_lost,
            "participants": self.manager.num_participants(),
            "contributions": list(self.contributions),
        }

    def set_lr(self, rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = rate

    def stop_at(self, point: str, how: int, delay_s: float = 0.0) -> None:
        """Send itself a signal in the next sync: before the "data", the "vote", or after the vote ("commit")."""
        inner = self.manager._manager
        allreduce, commit, seen = inner.allreduce, inner.should_commit, [0]

        def strike(reached: str) -> None:
            if reached != point:
                return
            if delay_s:
                threading.Timer(delay_s, os.kill, (os.getpid(), how)).start()
            else:
                os.kill(os.getpid(), how)

        def counted(tensor: torch.Tensor) -> Any:
            strike(["weight", "data", "vote"][min(seen[0], 2)])
            seen[0] += 1
            return allreduce(tensor)

        def committed() -> bool:
            strike("commit")
            return commit()

        inner.allreduce, inner.should_commit = counted, committed

    def close(self) -> None:
        self.outer.close()


class LargeReplica(Replica):
    """Of four million elements that all move by `number` + 1 a step, so that a sync takes a while."""

    def __init__(self, config: DilocoConfig, number: int, lighthouse: str) -> None:
        torch.set_num_threads(1)
        self.number = number
        self.trained = {"all": torch.nn.Parameter(torch.zeros(4_000_000))}
        self.optimizer = torch.optim.SGD(self.trained.values(), lr=1.0)
        self.manager = open_manager(config, replica=number, lighthouse=lighthouse)
        self.outer = Outer(config, self.trained, self.optimizer, self.manager)

    def train(self, to: int, pause_s: float = 0.0) -> dict[str, Any]:
        while self.outer.step < to:
            self.outer.step += 1
            self.trained["all"].grad = torch.full_like(self.trained["all"], self.number + 1.0)
            self.optimizer.step()
        held = self.trained["all"].detach()
        return {"least": held.min().item(), "most": held.max().item(), "rounds_lost": self.outer._loop.rounds_lost}


class LighthouseProc:
    """A lighthouse in a process of its own."""

    def __init__(self, config: DilocoConfig, port: int) -> None:
        self._lighthouse = Lighthouse(config, port)
        self.address = self._lighthouse.address

    def where(self) -> str:
        return self.address


def _serve(function: Any, args: Any, pipe: Any) -> None:
    try:
        served = function(*args)
        pipe.send((True, None))
        while True:
            name, given = pipe.recv()
            pipe.send((True, getattr(served, name)(*given)))
    except EOFError:
        os._exit(0)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        signal.pause()  # alive and silent, as its sockets are, until the test ends it
