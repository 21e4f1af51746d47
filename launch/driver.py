"""The driver of a run: it places the actors, watches, records, and ends the run. No rollout or weight passes here.

    watch   supervisor.watch      status of every member ─▶ dead or hung ─▶ placed again
    follow  trainer.reports       one row per step ─▶ metrics.jsonl, tb/, table
    beat    directory.beat        view out, commands in; status.json; dead servers started again

The run ends when all trainers are done, when it is told to stop (Ctrl-C, `milkweed stop`), or when a role keeps dying.
Released in this order, each step bounded: trainer (ends its step, saves) ─▶ generators ─▶ teachers ─▶ SDPO teacher ─▶
rewarders ─▶ lighthouse ─▶ rollout buffer ─▶ all procs ─▶ directory ─▶ servers ─▶ the run's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import traceback
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from monarch.actor import shutdown_context, this_host

from actors.following import buffer_name, number_in, trainer_name
from actors.replicas import checkpoints_of
from launch.config import Config
from launch.evaluation import Evaluation, evaluate, evaluate_beside_training
from launch.front import Front
from launch.guard import RunGuard
from launch.leftovers import FILE as PIDS
from launch.leftovers import end_leftovers, remember
from launch.places import FINISH_ORDER, places
from launch.record import Record, mean_rewards
from launch.services import LocalServers
from launch.summary import Summary, added_up
from mesh import roles
from mesh.binding import Binding, BindingError
from mesh.supervision import RoleKeepsDying, StartFailed, Supervisor, install_fault_hook
from mesh.topology import configure_monarch
from services.environments.client import EnvironmentClient, EnvironmentFailure
from services.environments.process import ServerFailure
from services.rollouts.tasks import TaskStream
from services.runs.deaths import DeathLog
from services.runs.folder import RunFolder
from services.runs.lock import RunLock
from services.safety.guard import CollapseStopError
from services.telemetry.table import ProgressTable
from services.weights.region import sweep_dead_regions


class RunFailed(Exception):
    """The run ended by an error. The message is for the user."""


class Driver:
    """Drives one run from start to end. `model_path` is the initial policy's folder."""

    def __init__(self, config: Config, run: RunFolder, model_path: Path, table: ProgressTable) -> None:
        self.config, self.run, self.model_path = config, run, model_path
        self.servers = LocalServers(config, run.logs)
        self.deaths = DeathLog(run.path)
        self.supervisor = Supervisor(this_host(), config.supervision, self.say, self.deaths)
        self.supervisor.listeners.append(lambda table: self.bindings[table.role].update(table))
        self.bindings = {role: Binding[Any](role) for role in roles.ROLES}
        replicas = range(config.trainer.replicas)
        self.trainers = [self.bindings["trainer"].only(trainer_name(replica), patience_s=0.0) for replica in replicas]
        self.buffers = [self.bindings["rollout_buffer"].only(buffer_name(replica)) for replica in replicas]
        self.checkpoints = [checkpoints_of(run.path, r, config.trainer.keep_checkpoints) for r in replicas]
        self.records = [Record(run.path, table, self.supervisor, self.say, replica) for replica in replicas]
        stream = TaskStream(config.run.seed, 0, *config.share(0))
        self.guard = RunGuard(config.safety, run.path, config.trainer.steps, stream, self._play_held_out, self.say)
        self.records[0].guard = self.guard
        self.stopping = asyncio.Event()
        self.state = "starting"
        self._releasing = False
        self.front = Front(run, self.supervisor.host, self.say)
        self._beats: asyncio.Task[None] | None = None
        self._log = (run.logs / "driver.log").open("a", buffering=1)

    def say(self, text: str) -> None:
        """A line for the log; what the user must see is in the table, the summary or the error."""
        self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def stop(self) -> None:
        """Ask for an orderly end: the step in work is finished and a checkpoint is written."""
        self.say("asked to stop")
        self.stopping.set()

    async def drive(self) -> Summary:
        """The whole run. RunFailed with one sentence when it could not start or a role kept dying."""
        began = time.monotonic()
        with RunLock(self.run.lock):
            if not self.run.config.exists():
                self.run.write_config(self.config.resolved())
            # First of all: an orphan of an earlier driver may be writing the very checkpoint that is looked for.
            await asyncio.to_thread(end_leftovers, self.run.path, self.say)
            for checkpoints, record in zip(self.checkpoints, self.records, strict=True):
                checkpoints.sweep()
                latest = checkpoints.latest()
                record.open(latest.step if latest else 0)
            self._handle_signals()
            try:
                self.guard.raise_if_it_stops()
                await self._unless_stopped(self._place())
                # Only now: settings of a resume that cannot start must not stay behind.
                self.run.write_config(self.config.resolved())
                await self._unless_stopped(self._loops())
                summary = await self._end(began)
                self.guard.raise_if_it_stops()
                return summary
            except CollapseStopError as error:
                self.say(str(error))
                if self.state != "failed":
                    self._write_status("failed", reason=str(error))
                raise RunFailed(str(error)) from None
            except (EnvironmentFailure, ServerFailure, StartFailed, RoleKeepsDying) as error:
                self.say(str(error))
                if self.bindings["rollout_buffer"].bound:
                    # Before everything is stopped: a trainer that lives has steps that no checkpoint holds yet, and it
                    # saves them together with the buffer.
                    await self.supervisor.finish("trainer")
                self._write_status("failed", reason=str(error))
                raise RunFailed(str(error)) from None
            except Exception as error:
                self.say(traceback.format_exc())
                self._write_status("failed", reason=f"{type(error).__name__}: {error}")
                raise RunFailed(f"a defect of Milkweed ({type(error).__name__}: {error}); see driver.log") from error
            finally:
                await self._release()

    # ---- start ---------------------------------------------------------------------------------------------------

    async def _place(self) -> None:
        self._write_status("starting")
        await self.servers.start()
        # Before anything heavier is placed: an environment that does not answer would fail every episode.
        await EnvironmentClient(self.servers.environment_url, self.config.environment).probe()
        await self.front.open(self._view())
        self._beats = asyncio.create_task(self._beat())
        await self.supervisor.place(places(self.config, self.run, self.model_path, self.servers))
        self._write_status("running")

    # ---- the loops -----------------------------------------------------------------------------------------------

    async def _loops(self) -> None:
        """Until the trainer is done. The first loop that fails ends the others with it."""
        assert self._beats is not None
        loops = [asyncio.create_task(self.supervisor.watch()), asyncio.create_task(self._follow())]
        try:
            await asyncio.wait([*loops, self._beats], return_when=asyncio.FIRST_COMPLETED)
            for task in (*loops, self._beats):
                if task.done():
                    task.result()
        finally:
            await _cancelled(*loops)

    async def _follow(self) -> None:
        """Record every step; returns when all trainers have done their last one and saved, or the guard says stop."""
        # Each by itself, because one that is gone must not keep the others' steps from being seen.
        await asyncio.gather(*[self._follow_one(*each) for each in zip(self.trainers, self.records, strict=True)])

    async def _follow_one(self, trainer: Binding[Any], record: Record) -> None:
        while not (self.guard.stops or self._done(self.supervisor.health.get(record.trainer, {}))):
            if record.trainer in self.supervisor.given_up:
                await self._close_books(self.buffers[number_in(record.trainer)])
                return
            if trainer.bound:
                await self._read_reports_of(trainer, record, wait_s=1.0)
            else:
                await asyncio.sleep(0.2)

    async def _close_books(self, buffer: Binding[Any]) -> None:
        """Nobody will train what this buffer holds: its tasks are dropped, and accounted for."""
        try:
            await buffer.call(roles.RolloutBuffer.move_to, self.config.trainer.steps)
        except BindingError as error:
            self.say(f"{buffer.member} still has tasks in work: {error}")

    def _done(self, trainer: dict[str, Any]) -> bool:
        return bool(trainer.get("done")) and not trainer["failure"] and trainer["step"] >= self.config.trainer.steps

    async def _read_reports_of(self, trainer: Binding[Any], record: Record, wait_s: float) -> None:
        try:
            known = (record.life, record.step - 1)
            reports = await trainer.call_within(wait_s + 5.0, roles.Trainer.reports, *known, wait_s)
            record.add(reports)
            self.deaths.stepped(reports)
        except BindingError as error:
            self.say(f"no report: {error}")

    async def _play_held_out(self, seeds: list[int]) -> Evaluation:
        safety, trainer = self.config.safety, self.records[0].trainer

        def alive(generator: Binding[Any]) -> bool:
            assert generator.table is not None
            return generator.table.members[0] in self.supervisor.tables["generator"].members

        generators = [Binding[Any].to(member) for member in self.supervisor.tables["generator"].members]
        return await evaluate_beside_training(generators, seeds, trainer, safety.hold_s, self.say, safety.score, alive)

    async def _beat(self) -> None:
        """Once a second: show the run to whoever attached, do what they asked for, mend what is not an actor."""
        while True:
            self._write_status(self.state)
            remember(self.run.path, self.supervisor.processes)
            await self.front.beat(self._view(), self.supervisor.tables, self._obey)
            if not self.stopping.is_set():
                await self.servers.revive(self.say)
            await asyncio.sleep(1.0)

    async def _obey(self, command: str) -> str:
        if command == "stop":
            self.stop()
            return f"stopping after step {self._step}"
        if command == "checkpoint":
            try:
                saved = await asyncio.gather(*[one.call(roles.Trainer.checkpoint) for one in self.trainers])
                return ", ".join(saved)
            except BindingError as error:
                return f"no checkpoint: {error}"
        return f"unknown command {command!r}; known: stop, checkpoint"

    @property
    def _step(self) -> int:
        """Of the trainer that is furthest."""
        return max(record.step for record in self.records)

    def _view(self) -> dict[str, Any]:
        rewards = mean_rewards(self.records)
        return {
            "state": self.state,
            "step": self._step,
            "steps": self.config.trainer.steps,
            "reward": fmean(rewards[-5:]) if rewards else None,
            "deaths": dict(self.supervisor.deaths),
            "members": {name: dict(health) for name, health in sorted(self.supervisor.health.items())},
            "warning": self.guard.warning,
            "driver_pid": os.getpid(),
            "beat": time.time(),
        }

    def _write_status(self, state: str, **more: Any) -> None:
        self.state = state
        self.run.write_status({**self._view(), **more})

    # ---- the end -------------------------------------------------------------------------------------------------

    async def _end(self, began: float) -> Summary:
        """Evaluate if asked to, let every role end in order, and sum up."""
        outcome = "failed" if self.guard.stops else "stopped" if self.stopping.is_set() else "finished"
        self._write_status("ending")
        await self.guard.settle()
        held_out = None
        if outcome == "finished" and self.config.run.evaluate:
            held_out = await evaluate(self.bindings["generator"], self.config, self.say)
        await self.supervisor.finish("trainer")
        accounts: dict[str, Any] = {}
        if self.bindings["trainer"].bound:  # a run that was stopped while it started may have neither of the two
            pairs = zip(self.trainers, self.records, strict=True)
            await asyncio.gather(*[self._read_reports_of(trainer, record, wait_s=0.0) for trainer, record in pairs])
        await self.supervisor.finish(*[role for role in FINISH_ORDER if role not in ("trainer", "rollout_buffer")])
        if self.bindings["rollout_buffer"].bound:
            accounts = await self._accounts()
        await self.supervisor.finish("rollout_buffer")
        latest = self.checkpoints[0].latest()
        summary = Summary(
            outcome,
            latest.step if latest else 0,
            time.monotonic() - began,
            mean_rewards(self.records),
            accounts,
            held_out,
            str(latest.path / "policy") if latest else None,
            {
                **{name: health["trouble"] for name, health in self.supervisor.health.items() if health.get("trouble")},
                **self.supervisor.given_up,
            },
            self.guard.warning,
        )
        reason = {"reason": self.guard.warning} if outcome == "failed" else {}
        self._write_status(outcome, summary=asdict(summary), **reason)
        return summary

    async def _accounts(self) -> dict[str, Any]:
        """Of all rollout buffers together; of those that answer."""
        calls = [buffer.call_within(10.0, roles.RolloutBuffer.accounts) for buffer in self.buffers]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                self.say(f"no accounts: {answer}")
        return added_up([answer for answer in answers if not isinstance(answer, BaseException)])

    async def _release(self) -> None:
        """Leave nothing behind, whatever happened before."""
        self._releasing = True
        await _cancelled(self._beats)
        await self.guard.settle()
        await self.supervisor.stop()
        self.say("stopping the directory and the servers")
        await self.front.close()
        await self.servers.stop()
        for record in self.records:
            record.close()
        self.guard.close()
        self.deaths.close()
        with contextlib.suppress(Exception):  # Monarch's many kinds; every proc is stopped already
            await asyncio.wait_for(shutdown_context(), 30.0)
        sweep_dead_regions()
        (self.run.path / PIDS).unlink(missing_ok=True)
        if self.state not in ("finished", "stopped", "failed"):
            self._write_status("stopped", reason="it was ended at once")
        self.say("all released")
        self._log.close()

    # ---- signals -------------------------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        """The first Ctrl-C (or SIGTERM) ends the run in order; the second at once. The release is never cut short."""
        loop, driving = asyncio.get_running_loop(), asyncio.current_task()

        def on_signal() -> None:
            if self._releasing:
                return
            if self.stopping.is_set() and driving is not None:
                self._releasing = True
                driving.cancel()
            self.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, or leave it when the run is told to stop meanwhile."""
        if self.stopping.is_set():
            work.close()
            return
        task, stop = asyncio.create_task(work), asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            await _cancelled(task, stop)


async def drive(config: Config, run: RunFolder, model_path: Path) -> Summary:
    """Drive a run on this machine. RunFailed tells in one sentence why it ended early."""
    configure_monarch()
    with ProgressTable() as table:
        driver = Driver(config, run, model_path, table)
        install_fault_hook(driver.say)
        return await driver.drive()


async def _cancelled(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel these tasks and wait until they are over, whatever they end by."""
    living = [task for task in tasks if task is not None]
    for task in living:
        task.cancel()
    await asyncio.gather(*living, return_exceptions=True)
