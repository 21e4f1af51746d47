"""Reaching a live run from another process, through the directory's reference in its folder."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from mesh.directory import load_reference
from mesh.supervision import install_fault_hook
from services.runs.folder import RunFolder


class NotLive(ValueError):
    """The run has no living driver."""


async def view(run: RunFolder) -> dict[str, Any] | None:
    """What the run's driver last told its directory; None when nobody answers within 5 s."""
    if not run.mesh_ref.exists():
        return None
    install_fault_hook(lambda text: None)  # a run that has just died is the answer None, not this process's end
    try:
        directory = load_reference(run.mesh_ref)
    except (ValueError, PermissionError) as error:
        print(f"milkweed: {error}", file=sys.stderr)  # what the run wrote into its folder can be shown all the same
        return None
    try:
        return await asyncio.wait_for(directory.view.call_one(), 5.0)
    except Exception:  # Monarch's many kinds of "nobody is there"
        return None


async def command(run: RunFolder, name: str) -> str:
    """Leave a command with the driver and return its answer. NotLive when there is no driver that answers."""
    if await view(run) is None:
        state = run.read_status().get("state", "never started")
        raise NotLive(f"run {run.name} is not live (last state: {state}); there is nothing to {name}")
    directory = load_reference(run.mesh_ref)
    try:
        return await asyncio.wait_for(directory.submit.call_one(name, {}, 20.0), 25.0)
    except Exception as error:
        raise NotLive(f"run {run.name} did not take {name!r}: {' '.join(str(error).split())[-200:]}") from None
