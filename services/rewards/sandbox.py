"""Scores rollouts: the environment's reward and reward functions, each call in a process that can be killed.

    score(rollout) ──▶ per function: take a worker ──▶ send ──▶ reply within the limit ──▶ give the worker back
                                                          └─ no reply, death, cancellation ──▶ kill -9

A worker is never reused after a call that did not end with its own reply, so no call ever reads another one's. The next
call that takes a killed worker's place starts it again.

A failure makes the rollout unscorable: `reward` is None and `reason` says which function and why. It never counts as 0,
which would teach the policy that the reward function's bug was its own mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pickle
import re
import signal
import sys
from collections import Counter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mesh.messages import Rollout
from mesh.roles import Rewarder, contract_of
from services.rewards.worker import HEADER

ENVIRONMENT = "environment"  # the environment's own reward among a rollout's rewards

SCORE_LIMIT_S = contract_of(Rewarder.score).limit_s
_KILL_LIMIT_S = 5.0
_MAX_REPLY_BYTES = 1 << 20


class RewardFunctionConfig(BaseModel):
    """One reward function: `function(rollout: mesh.messages.Rollout) -> float`."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(description='Where it is: "package.module:function".')
    name: str = Field(default="", description="Its name among the rewards and metrics; empty: the function's own.")
    weight: float = Field(default=1.0, allow_inf_nan=False, description="Its factor in the total reward.")
    timeout_s: float = Field(default=10.0, gt=0, description="Seconds one call may take before its process is killed.")

    @field_validator("path")
    @classmethod
    def _path_has_both_parts(cls, path: str) -> str:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", path):
            raise ValueError(f'{path!r} is no import path of a function: write "package.module:function"')
        return path

    @property
    def label(self) -> str:
        return self.name or self.path.partition(":")[2]


class RewardConfig(BaseModel):
    """What the reward of a rollout is made of."""

    model_config = ConfigDict(extra="forbid")

    functions: list[RewardFunctionConfig] = Field(default_factory=list, description="Reward functions.")
    environment_weight: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="Factor of the environment's own reward; 0 leaves it out."
    )
    workers: int = Field(default=2, ge=1, description="Processes that run reward functions: calls at the same time.")
    start_timeout_s: float = Field(
        default=60.0, gt=0, description="Seconds a process may take to import its functions."
    )
    on_failure: Literal["unscorable", "retry"] = Field(
        default="unscorable",
        description='What a failed call does: "unscorable" gives the rollout no reward (it is left out of the baseline '
        'and counted, never scored 0); "retry" first tries that function once more, in a fresh process if it was '
        "killed.",
    )

    @model_validator(mode="after")
    def _something_to_score(self) -> RewardConfig:
        if not self.functions and not self.environment_weight:
            raise ValueError("nothing gives a reward: add a function or set environment_weight above 0")
        labels = Counter([ENVIRONMENT, *(function.label for function in self.functions)])
        twice = [label for label, count in labels.items() if count > 1]
        if twice:
            raise ValueError(f"reward names must differ, {twice} occur twice: set `name` of one of the functions")
        return self

    def limit_s(self, concurrent: int) -> float:
        """Seconds after which a rollout is scored if every call of `concurrent` rollouts at once takes its whole limit.

        A caller waits that long, and never less than the contract of `mesh.roles.Rewarder.score` says. One start of a
        killed process is allowed for.
        """
        tries = 2 if self.on_failure == "retry" else 1
        calls_s = tries * sum(function.timeout_s for function in self.functions)
        if not calls_s:
            return SCORE_LIMIT_S
        return max(SCORE_LIMIT_S, calls_s * (1 + concurrent / self.workers) + self.start_timeout_s)


class RewardSandbox:
    """`config.workers` processes and what they make of rollouts. `start`, then `score` any number at once, `close`."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.failures: Counter[str] = Counter()  # failed calls by reward name
        self.kills = 0  # processes killed because a call did not end
        paths = [function.path for function in config.functions]
        self._workers = [_Worker(paths, config.start_timeout_s) for _ in range(config.workers if paths else 0)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._open = False

    async def start(self) -> None:
        """Start the processes. ValueError for a function that cannot be imported; nothing is left running then."""
        try:
            # One alone first: a bad path is then reported once.
            for batch in (self._workers[:1], self._workers[1:]):
                await asyncio.gather(*(worker.start() for worker in batch))
        except BaseException:
            await self.close()
            raise
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self._open = True

    async def score(self, rollout: Rollout) -> Rollout:
        """The rollout with `rewards` by name and `reward`, their weighted sum; `reward=None` where any is missing.

        A rollout that failed is not scored. Takes at most the functions' time limits plus the wait for workers that
        other rollouts occupy. Raises RuntimeError before `start` and after `close`, never for what a function does.
        """
        if not self._open:
            raise RuntimeError(
                "this reward sandbox is not running: await start() first, and do not score after close()"
            )
        if rollout.status == "failed":
            return dataclasses.replace(rollout, reward=None, reason=rollout.reason or "the episode failed")
        outcomes = await asyncio.gather(*(self._evaluate(function, rollout) for function in self.config.functions))
        rewards: dict[str, float | None] = {ENVIRONMENT: rollout.env_reward}
        weights, reasons = {ENVIRONMENT: self.config.environment_weight}, []
        for function, (value, why) in zip(self.config.functions, outcomes, strict=True):
            rewards[function.label], weights[function.label] = value, function.weight
            if value is None:
                reasons.append(f"reward function {function.label!r} {why}")
        if rollout.env_reward is None and self.config.environment_weight:
            reasons.append("the environment gave no reward")
        total = None if reasons else sum(weights[name] * value for name, value in rewards.items() if value is not None)
        reason = "; ".join([rollout.reason, *reasons] if rollout.reason else reasons)
        return dataclasses.replace(rollout, rewards=rewards, reward=total, reason=reason)

    def pids(self) -> list[int]:
        """The processes that run now."""
        return [worker.process.pid for worker in self._workers if worker.alive and worker.process]

    async def close(self) -> None:
        """Kill the processes; calls under way make their rollouts unscorable. Bounded and idempotent."""
        self._open = False
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def _evaluate(self, function: RewardFunctionConfig, rollout: Rollout) -> tuple[float | None, str]:
        """The function's value, or None and why."""
        why = ""
        for _ in range(2 if self.config.on_failure == "retry" else 1):
            worker = await self._idle.get()
            try:
                return await self._ask(worker, function, rollout), ""
            except _CallFailed as failure:
                why = str(failure)
                self.failures[function.label] += 1
            finally:
                self._idle.put_nowait(worker)
        return None, why

    async def _ask(self, worker: _Worker, function: RewardFunctionConfig, rollout: Rollout) -> float:
        if not self._open:
            raise _CallFailed("was not called: the sandbox was closed")
        if not worker.alive:
            try:
                await worker.start()
            except ValueError as error:
                raise _CallFailed(f"was not called: {error}") from error
            if not self._open:  # closed meanwhile, when there was no process to kill yet
                await worker.kill()
                raise _CallFailed("was not called: the sandbox was closed")
        try:
            reply = await asyncio.wait_for(worker.ask(function, rollout), function.timeout_s)
        except TimeoutError:
            self.kills += 1
            await worker.kill()
            raise _CallFailed(f"took longer than {function.timeout_s:g} s and was killed") from None
        except (EOFError, ConnectionError) as error:
            await worker.kill()
            raise _CallFailed(f"ended its process ({worker.ending()})") from error
        except BaseException:
            # Cancelled: the reply may still come, and must not be the next call's.
            await worker.kill()
            raise
        if "value" not in reply:
            raise _CallFailed(str(reply.get("error", "sent no value")))
        return float(reply["value"])


class _CallFailed(Exception):
    """One call gave no value; the text continues "reward function NAME ..."."""


class _Worker:
    """One process; at most one call at a time."""

    def __init__(self, paths: list[str], start_timeout_s: float) -> None:
        self.paths, self.start_timeout_s = paths, start_timeout_s
        self.process: asyncio.subprocess.Process | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        """ValueError when the functions cannot be imported in time."""
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.rewards.worker", *self.paths),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # so that a kill reaches what the functions started, and Ctrl-C does not
        )
        try:
            reply = await asyncio.wait_for(self._reply(), self.start_timeout_s)
        except TimeoutError:
            await self.kill()
            raise ValueError(
                f"importing {self.paths} took longer than {self.start_timeout_s:g} s: make their modules import "
                "faster, or raise rewards.start_timeout_s"
            ) from None
        except (EOFError, ConnectionError):
            await self.kill()
            raise ValueError(f"importing {self.paths} ended the process ({self.ending()})") from None
        except BaseException:
            await self.kill()
            raise
        if "ready" not in reply:
            await self.kill()
            raise ValueError(reply.get("error", f"importing {self.paths} failed"))

    async def ask(self, function: RewardFunctionConfig, rollout: Rollout) -> dict[str, Any]:
        """The worker's reply. EOFError or ConnectionError when the process ends first."""
        assert self.process is not None
        assert self.process.stdin is not None
        body = pickle.dumps((function.path, function.timeout_s, rollout))
        self.process.stdin.write(HEADER.pack(len(body)) + body)
        await self.process.stdin.drain()
        return await self._reply()

    async def kill(self) -> None:
        """Kill the process and what it started; waits a few seconds for its end."""
        if self.process is None or self.process.returncode is not None:
            return  # the pid of a process that was waited for may be somebody else's by now
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdin is not None:
            self.process.stdin.close()
        await asyncio.wait_for(self.process.wait(), _KILL_LIMIT_S)

    def ending(self) -> str:
        code = self.process.returncode if self.process else None
        return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"

    async def _reply(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        (length,) = HEADER.unpack(await self.process.stdout.readexactly(HEADER.size))
        if length > _MAX_REPLY_BYTES:
            raise EOFError(f"a reply of {length} bytes is none of ours")
        return json.loads(await self.process.stdout.readexactly(length))
