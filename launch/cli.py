"""The `milkweed` command. What a user did wrong is one sentence on stderr and exit status 2; a run that failed, 1."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.summary import print_summary
from services.runs.checkpoints import Checkpoints
from services.runs.deaths import read_deaths
from services.runs.folder import RunFolder, find_run
from services.runs.lock import holder
from services.teachers.config import missing_api_keys

if TYPE_CHECKING:
    from launch.config import Config


ENDED = ("finished", "stopped", "failed")


class Refused(Exception):
    """The command cannot be done as it was given. The message is for the user."""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, do, and end the process with the command's exit status."""
    # Until the driver takes over: a KeyboardInterrupt in the middle of an import would leave a half-imported package.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    arguments = _parser().parse_args(argv)
    try:
        status = arguments.do(arguments)
    except (Refused, ValueError, OSError) as error:
        print(f"milkweed: {error}", file=sys.stderr)
        status = 2
    sys.stdout.flush()
    sys.stderr.flush()
    # Monarch's exit handlers wait for meshes that are stopped already.
    os._exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="milkweed", description="Train language-model agents by asynchronous reinforcement learning."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="train; without a config file, the bundled demo")
    run.add_argument(
        "config", nargs="?", type=Path, help="TOML file (`milkweed config` lists the settings), or a preset's name"
    )
    run.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one setting")
    run.set_defaults(do=_run)

    replica = commands.add_parser("replica", help="train as one of several runs that average over an object store")
    replica.add_argument("config", nargs="?", type=Path, help="as for run; the same for all replicas")
    replica.add_argument("--rank", type=int, required=True, help="which replica this is, from 0 on")
    replica.add_argument("--world-size", type=int, required=True, help="how many replicas there are")
    replica.add_argument("--uri", required=True, help="store in which they meet: a path, s3://, gs://, hf://")
    replica.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one setting")
    replica.set_defaults(do=_replica)

    resume = commands.add_parser("resume", help="go on with a run from its last checkpoint")
    resume.add_argument("run", help="name or folder of the run")
    resume.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one setting")
    resume.set_defaults(do=_resume)

    for name, do, text in [("status", _status, "show a run"), ("stop", _stop, "end a live run in order")]:
        command = commands.add_parser(name, help=text)
        command.add_argument("run", help="name or folder of the run")
        command.set_defaults(do=do)

    config = commands.add_parser("config", help="print every setting with its default and meaning")
    config.set_defaults(do=_config)

    doctor = commands.add_parser("doctor", help="show what works on this machine, and why the rest does not")
    doctor.set_defaults(do=_doctor)

    chaos = commands.add_parser("chaos", help="train while processes are killed at random; 0 if all promises were kept")
    chaos.add_argument("config", nargs="?", type=Path, help="as for run")
    chaos.add_argument("--kills", type=int, default=20, help="processes to kill or stop")
    chaos.add_argument("--seed", type=int, default=0, help="of the draws: when, who, and how")
    chaos.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one setting")
    chaos.set_defaults(do=_chaos)

    ablate = commands.add_parser("ablate", help="compare the four arms: policy, +sdpo, +replay, both")
    ablate.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    ablate.add_argument("--steps", type=int, default=80)
    ablate.add_argument("--out", type=Path, default=Path("ablation"), help="folder for table, plot and runs")
    ablate.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for every arm")
    ablate.set_defaults(do=_ablate)

    for command in (resume, commands.choices["status"], commands.choices["stop"]):
        command.add_argument("--root", default="runs", help="folder that holds the runs")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from launch.config import load_config
    from launch.models import initial_model

    config = load_config(arguments.config, arguments.set)
    _check_packages(config)
    model = initial_model(config)
    _check_teachers(config)
    run = RunFolder(config.run.root, config.run.name)
    return _drive(config, run, model)


def _replica(arguments: argparse.Namespace) -> int:
    from launch.replica import replica_config

    given = (arguments.config, arguments.rank, arguments.world_size, arguments.uri, arguments.set)
    return train_replica(replica_config(*given))[0]


def train_replica(config: Config) -> tuple[int, RunFolder]:
    """Train as one replica, from its last checkpoint if it has one, and put its policy into the store.

    The command's exit status, and the run.
    """
    from launch.models import initial_model
    from launch.replica import keep_policy, open_run

    _check_packages(config)
    model = initial_model(config)
    _check_teachers(config)
    run = open_run(config)
    _refuse_if_done(run, config)
    status = _drive(config, run, model)
    summary = run.read_status().get("summary")
    if status == 0 and summary and summary["policy"]:
        print(f"trained model in the store: {keep_policy(config, summary['policy'])}")
    return status, run


def _resume(arguments: argparse.Namespace) -> int:
    from launch.config import validated
    from launch.models import initial_model

    run = find_run(arguments.run, arguments.root)
    before = run.read_config()
    replicas = before.get("trainer", {}).get("replicas", 1)
    config = validated(before, str(run.config), arguments.set)
    if config.trainer.replicas != replicas:
        raise Refused(
            f"run {run.name} began with trainer.replicas = {replicas}, and each replica has a buffer and a share of "
            "the tasks of its own: resume it with as many, or start a new run from its policy (model.path)"
        )
    _check_packages(config)
    _check_teachers(config)
    _refuse_if_done(run, config)
    return _drive(config, run, initial_model(config))


def _refuse_if_done(run: RunFolder, config: Config) -> None:
    latest = Checkpoints(run.checkpoints).latest()
    if latest is not None and latest.step >= config.trainer.steps:
        raise Refused(
            f"run {run.name} is done: it stands at step {latest.step} of {config.trainer.steps}; to go on, "
            f"set more steps, e.g. --set trainer.steps={2 * latest.step}"
        )


def _check_packages(config: Config) -> None:
    """Refuse an engine or an adapter whose package is not there, or does not load here."""
    from services.engines.vllm_package import require_vllm
    from services.tuning import check_installed

    check_installed(config.tune)
    local = config.replay.beta and config.teachers.backend == "vllm"
    if config.generator.engine.engine == "vllm" or local:
        try:
            require_vllm()
        except RuntimeError as error:
            raise Refused(str(error)) from None


def _check_teachers(config: Config) -> None:
    """Refuse teachers whose keys or model are not there: every call would fail, and the run would train without."""
    if config.replay.beta and config.teachers.backend == "vllm":
        path = Path(config.teachers.vllm.path or "").expanduser()
        if not (path / "config.json").is_file():
            raise Refused(f"teachers.vllm.path {str(path)!r} holds no Hugging Face model (no config.json there)")
    if config.replay.beta and config.teachers.backend == "http":
        missing = missing_api_keys(config.teachers.pool.teachers)
        if missing:
            raise Refused(f"teachers need keys that are not set: export {', '.join(missing)}, or set replay.beta = 0")


def _drive(config: Config, run: RunFolder, model: Path) -> int:
    from launch.driver import RunFailed, drive

    held = holder(run.lock)
    if held is not None:
        raise Refused(f"run {run.name} is live (pid {held['pid']} on {held['host']}): stop it first, or let it go on")
    print(f"run {run.name} in {run.path}", flush=True)
    began = time.monotonic()
    try:
        summary = asyncio.run(drive(config, run, model))
    except (RunFailed, RuntimeError) as error:
        print(f"milkweed: run {run.name} failed: {error}", file=sys.stderr)
        print(f"milkweed: logs are in {run.logs}; go on with `milkweed resume {run.path}`", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print(f"milkweed: run {run.name} was ended at once; go on with `milkweed resume {run.path}`", file=sys.stderr)
        return 130
    print_summary(run, summary, time.monotonic() - began)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from launch.remote import view

    run = find_run(arguments.run, arguments.root)
    live, driven = asyncio.run(view(run)), holder(run.lock) is not None
    shown = live or run.read_status()
    if not shown:
        raise Refused(f"run {run.name} {'is about to start' if driven else 'has never started'}")
    state = shown["state"] if driven or shown["state"] in ENDED else "dead"
    print(f"run {run.name}: {state}, step {shown['step']} of {shown['steps']}")
    if shown.get("reward") is not None:
        print(f"mean reward of the last 5 steps: {shown['reward']:.3f}")
    if state == "dead":
        print(f"its driver (pid {shown['driver_pid']}) is gone: go on with `milkweed resume {run.path}`")
    if shown.get("warning") and not shown.get("reason"):
        print(f"warning: {shown['warning']}")
    if shown.get("reason"):
        print(f"reason: {shown['reason']}")
    for death in read_deaths(run.path)[-3:]:
        print(f"{time.strftime('%H:%M:%S', time.localtime(death.noticed_at))} {death}")
    if live:
        _print_members(live)
    return 0


def _print_members(live: dict[str, Any]) -> None:
    for name, health in live["members"].items():
        since = time.time() - health["heard"]
        shown = {
            k: health[k]
            for k in ("version", "step", "rounds", "trainer", "episodes", "scored", "contexts", "pairs")
            if k in health
        }
        figures = " ".join(f"{key}={value}" for key, value in shown.items())
        print(f"  {name:18} pid {health['pid']:<8} heard {since:4.1f} s ago  {figures}")
        if health.get("trouble"):
            print(f"  {'':18} last trouble: {health['trouble']}")


def _stop(arguments: argparse.Namespace) -> int:
    from launch.remote import command

    run = find_run(arguments.run, arguments.root)
    held = holder(run.lock)
    if held is not None and not run.mesh_ref.exists() and held["host"] == socket.gethostname():
        os.kill(held["pid"], signal.SIGTERM)  # it starts and cannot be reached yet
        print("stopping it while it starts", flush=True)
    else:
        print(asyncio.run(command(run, "stop")), flush=True)
    until = time.monotonic() + 180.0
    while time.monotonic() < until:
        if run.read_status().get("state") in ENDED and holder(run.lock) is None:
            print(f"run {run.name} has ended; go on with `milkweed resume {run.path}`")
            return 0
        time.sleep(0.2)
    raise Refused(f"run {run.name} did not end within 180 s: see {run.logs / 'driver.log'}")


def _config(arguments: argparse.Namespace) -> int:
    from launch.config import settings_of

    section = ""
    for name, field in settings_of():
        head, _, key = name.rpartition(".")
        if head != section:
            section = head
            print(f"\n[{section}]")
        default = field.get_default(call_default_factory=True)
        shown = json.dumps(default, default=str) if default is not None else "unset"
        print(f"{key} = {shown if len(shown) < 60 else '(see the documentation)'}\n    {field.description}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from launch.doctor import checks

    for check in checks():
        print(f"{'ok ' if check.works else 'no '} {check.name:28} {check.detail}")
    return 0


def _chaos(arguments: argparse.Namespace) -> int:
    from launch.chaos import chaos, defaults
    from launch.config import load_config

    if arguments.kills < 1:
        raise Refused(f"--kills {arguments.kills} is no soak: give 1 or more")
    name = f"chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = [f"run.name={name}", *defaults(arguments.kills), *arguments.set]
    config = load_config(arguments.config, settings)
    run_dir = Path(config.run.root).expanduser().absolute() / str(config.run.name)
    if run_dir.exists():
        raise Refused(f"run {config.run.name!r} exists already in {run_dir.parent}: choose another run.name")
    given = [str(arguments.config)] if arguments.config else []
    command = [*given, *(part for setting in settings for part in ("--set", setting))]
    return 0 if chaos(config, command, run_dir, arguments.kills, arguments.seed) else 1


def _ablate(arguments: argparse.Namespace) -> int:
    from launch.ablate import ablate

    print(ablate(arguments.out, arguments.seeds, arguments.steps, arguments.set))
    return 0


if __name__ == "__main__":
    main()
