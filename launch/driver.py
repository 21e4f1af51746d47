"""The driver of a run: it places the actors, watches, records, and ends the run. No rollout or weight passes here.

    watch   supervisor.watch      status of every member ─▶ dead or hung ─▶ placed again
    follow  trainer.reports       one row per step ─▶ metrics.jsonl, tb/, table
    beat    directory.beat        view out, commands in; status.json; dead servers started again

The run ends when the trainer is done, when it is told to stop (Ctrl-C, `milkweed stop`), or when a role keeps dying.
Released in this order, each step bounded: trainer (ends its step, saves) ─▶ generators ─▶ teachers ─▶ SDPO teacher ─▶
rewarders ─▶ rollout buffer ─▶ all procs ─▶ directory ─▶ servers ─▶ the run's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from monarch.actor import shutdown_context, this_host

from launch.config import Config
from launch.leftovers import end_leftovers, remember
from launch.places import FINISH_ORDER, places
from launch.progress import Progress
from launch.services import LocalServers
from mesh import roles
from mesh.binding import Binding, BindingError, RoleTable
from mesh.directory import Directory, save_reference
from mesh.supervision import RoleKeepsDying, StartFailed, Supervisor, install_fault_hook
from mesh.topology import Place, Placed, ProcSpec, configure_monarch, fill
from services.environments.client import EnvironmentClient, EnvironmentFailure
from services.environments.process import ServerFailure
from services.rollouts.tasks import held_out_seeds
from services.runs.checkpoints import Checkpoints
from services.runs.folder import RunFolder
from services.runs.lock import RunLock
from services.telemetry.metrics import MetricsWriter
from services.telemetry.table import ProgressTable


class RunFailed(Exception):
    """The run ended by an error. The message is for the user."""


@dataclass(slots=True)
class Summary:
    """How a run ended."""

    outcome: str  # "finished" | "stopped"
    steps: int
    seconds: float
    rewards: list[float] = field(default_factory=list)  # mean reward by step, of this drive
    accounts: dict[str, Any] = field(default_factory=dict)
    held_out_reward: float | None = None
    policy: str | None = None  # folder of the newest checkpoint's policy


class Driver:
    """Drives one run from start to end. `model_path` is the initial policy's folder."""

    def __init__(self, config: Config, run: RunFolder, model_path: Path, table: ProgressTable) -> None:
        self.config, self.run, self.model_path, self.table = config, run, model_path, table
        self.servers = LocalServers(config, run.logs)
        self.supervisor = Supervisor(this_host(), config.supervision, self.say)
        self.supervisor.listeners.append(self._learn)
        self.bindings = {role: Binding[Any](role) for role in roles.ROLES}
        self.checkpoints = Checkpoints(run.checkpoints, keep=config.trainer.keep_checkpoints)
        self.stopping = asyncio.Event()
        self.state = "starting"
        self.step = 0
        self.rewards: list[float] = []
        self.metrics: MetricsWriter
        self._trainer_life: tuple[int, ...] = (0,)
        self._directory: Placed | None = None
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
        latest = self.checkpoints.latest()
        self.step = latest.step if latest else 0
        with RunLock(self.run.lock):
            self.metrics = MetricsWriter(self.run.path, resume_at=self.step)
            self._handle_signals()
            try:
                await self._unless_stopped(self._place())
                self.state = "running"
                await self._unless_stopped(self._loops())
                return await self._end(began)
            except (EnvironmentFailure, ServerFailure, StartFailed, RoleKeepsDying) as error:
                self.state = "failed"
                self.say(str(error))
                self._write_status({"reason": str(error)})
                raise RunFailed(str(error)) from None
            finally:
                await self._release()

    # ---- start ---------------------------------------------------------------------------------------------------

    async def _place(self) -> None:
        await asyncio.to_thread(end_leftovers, self.run.path, self.say)
        self._write_status()
        await self.servers.start()
        # Before anything heavier is placed: an environment that does not answer would fail every episode.
        await EnvironmentClient(self.servers.environment_url, self.config.environment).probe()
        await self._place_directory()
        await self.supervisor.place(places(self.config, self.run, self.model_path, self.servers))

    async def _place_directory(self) -> None:
        """The directory, and the reference through which `status`, `stop` and notebooks reach it."""
        log = str(self.run.logs / "directory.log")
        place = Place("directory", "directory", Directory, (self.run.name,), ProcSpec(log_path=log))
        incarnation = self._directory.incarnation + 1 if self._directory else 0
        self._directory = await fill(place, self.supervisor.host, incarnation)
        await asyncio.wait_for(self._directory.handle.publish.call_one(self.supervisor.tables), 30.0)
        save_reference(self._directory.handle, self.run.mesh_ref)

    def _learn(self, table: RoleTable) -> None:
        self.bindings[table.role].update(table)

    # ---- the loops -----------------------------------------------------------------------------------------------

    async def _loops(self) -> None:
        """Until the trainer is done. The first loop that fails ends the others with it."""
        loops = [self.supervisor.watch(), self._beat(), self._follow()]
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        """Record every step; returns when the trainer has done the last one and saved."""
        progress = Progress(self.supervisor)
        while True:
            await self._record(progress, wait_s=1.0)
            trainer = self.supervisor.health.get("trainer-0", {})
            if trainer.get("done") and not trainer.get("failure") and self.step >= self.config.trainer.steps:
                return

    async def _record(self, progress: Progress, wait_s: float) -> None:
        """Write down the steps that were done since the last call."""
        life = self.bindings["trainer"].incarnations
        try:
            after = self.step - 1 if life == self._trainer_life else -1
            reports = await self.bindings["trainer"].call(roles.Trainer.reports, after, wait_s)
        except BindingError as error:
            self.say(f"no report: {error}")
            return
        if reports:
            self._trainer_life = life
            self._rewind(reports[0]["step"])
        for report in reports:
            row = progress.row(report)
            self.metrics.write(report["step"], row, report["histograms"])
            self.table.update({"step": report["step"], **row})
            self.step = report["step"] + 1
            if "reward/mean" in row:
                self.rewards.append(row["reward/mean"])

    def _rewind(self, step: int) -> None:
        """A trainer that was placed again does steps again, from its last checkpoint: their lines are replaced."""
        if step < self.step:
            self.say(f"steps {step} to {self.step - 1} are done again")
            self.metrics.close()
            self.metrics = MetricsWriter(self.run.path, resume_at=step)
            del self.rewards[step - self.step :]
            self.step = step

    async def _beat(self) -> None:
        """Once a second: show the run to whoever attached, do what they asked for, mend what is not an actor."""
        while True:
            assert self._directory is not None
            view = self._view()
            self._write_status()
            remember(self.run.path, [health["pid"] for health in self.supervisor.health.values()])
            try:
                await asyncio.wait_for(self._directory.handle.publish.call_one(self.supervisor.tables), 5.0)
                commands = await asyncio.wait_for(self._directory.handle.beat.call_one(view), 5.0)
                for command in commands:
                    answer = await self._obey(command.name)
                    await asyncio.wait_for(self._directory.handle.answer.call_one(command.id, answer), 5.0)
            except Exception as error:  # Monarch's many kinds; the directory owns nothing, so a new one loses nothing
                self.say(f"the directory is lost ({type(error).__name__}: {error}); placing it again")
                await self._place_directory()
            await self.servers.revive(self.say)
            await asyncio.sleep(1.0)

    async def _obey(self, command: str) -> str:
        if command == "stop":
            self.stop()
            return f"stopping after step {self.step}"
        if command == "checkpoint":
            try:
                return await self.bindings["trainer"].call(roles.Trainer.checkpoint)
            except BindingError as error:
                return f"no checkpoint: {error}"
        return f"unknown command {command!r}; known: stop, checkpoint"

    def _view(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "step": self.step,
            "steps": self.config.trainer.steps,
            "reward": fmean(self.rewards[-5:]) if self.rewards else None,
            "deaths": dict(self.supervisor.deaths),
            "members": {name: dict(health) for name, health in sorted(self.supervisor.health.items())},
            "driver_pid": os.getpid(),
            "beat": time.time(),
        }

    def _write_status(self, more: dict[str, Any] | None = None) -> None:
        self.run.write_status({**self._view(), **(more or {})})

    # ---- the end -------------------------------------------------------------------------------------------------

    async def _end(self, began: float) -> Summary:
        """Evaluate if asked to, let every role end in order, and sum up."""
        outcome = "stopped" if self.stopping.is_set() else "finished"
        self.state = "ending"
        self._write_status()
        held_out = None
        if outcome == "finished" and self.config.run.evaluate:
            held_out = await self._evaluate()
        await self.supervisor.finish("trainer")
        await self._record(Progress(self.supervisor), wait_s=0.0)
        await self.supervisor.finish(*[role for role in FINISH_ORDER if role not in ("trainer", "rollout_buffer")])
        accounts: dict[str, Any] = {}
        with contextlib.suppress(BindingError):  # a run that was stopped before its buffer was there has no accounts
            accounts = await self.bindings["rollout_buffer"].call_within(10.0, roles.RolloutBuffer.accounts)
        await self.supervisor.finish("rollout_buffer")
        latest = self.checkpoints.latest()
        summary = Summary(
            outcome,
            latest.step if latest else self.step,
            time.monotonic() - began,
            self.rewards,
            accounts,
            held_out,
            str(latest.path / "policy") if latest else None,
        )
        self.state = outcome
        self._write_status({"summary": asdict(summary)})
        return summary

    async def _evaluate(self) -> float | None:
        """Mean reward of the final policy on held-out tasks, played by the generators once they hold its weights."""
        until = time.monotonic() + 30.0
        generators = [name for name in self.supervisor.placed if name.startswith("generator")]
        while time.monotonic() < until:
            status = [await self.bindings["generator"].call(roles.Generator.status) for _ in generators]
            if all(s["version"] == self.config.trainer.steps for s in status):
                break
            await asyncio.sleep(0.2)
        seeds = held_out_seeds(self.config.run.evaluate, self.config.run.seed)
        share = -(-len(seeds) // len(generators))
        parts = [seeds[i : i + share] for i in range(0, len(seeds), share)]
        calls = [self.bindings["generator"].call(roles.Generator.evaluate, part, False) for part in parts]
        try:
            rollouts = [rollout for played in await asyncio.gather(*calls) for rollout in played]
        except BindingError as error:
            self.say(f"no evaluation: {error}")
            return None
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        self.say(f"evaluated {len(rewards)} of {len(seeds)} held-out tasks")
        return fmean(rewards) if rewards else None

    async def _release(self) -> None:
        """Leave nothing behind, whatever happened before."""
        await self.supervisor.stop()
        self.run.mesh_ref.unlink(missing_ok=True)
        self.say("stopping the directory and the servers")
        if self._directory is not None:
            with contextlib.suppress(Exception):  # it may be gone already, and only that matters
                await asyncio.wait_for(self._directory.procs.stop(), 20.0)
        await self.servers.stop()
        self.metrics.close()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(shutdown_context(), 30.0)
        self.say("all released")
        self._log.close()

    # ---- signals -------------------------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        """The first Ctrl-C (or SIGTERM) ends the run in order; the second at once."""
        loop, driving = asyncio.get_running_loop(), asyncio.current_task()

        def on_signal() -> None:
            if self.stopping.is_set() and driving is not None:
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
            for each in (task, stop):
                each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)


async def drive(config: Config, run: RunFolder, model_path: Path) -> Summary:
    """Drive a run on this machine. RunFailed tells in one sentence why it ended early."""
    configure_monarch()
    with ProgressTable() as table:
        driver = Driver(config, run, model_path, table)
        install_fault_hook(driver.say)
        return await driver.drive()
