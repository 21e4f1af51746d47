"""What a run promises whatever died in it, checked afterwards from its folder alone.

It ends by itself with all its steps, each in the metrics once; every task is trained once or dropped with a reason; the
driver's accounts say what the journal says; the last checkpoint is whole; no paid call is repeated. What it must not
leave behind is `launch.traces`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.rollouts.audit import audit
from services.rollouts.journal import JournalError
from services.runs.checkpoints import Checkpoints
from services.runs.folder import find_run, of_replica
from services.telemetry.metrics import read_metrics


def broken_promises(run_dir: Path, steps: int, replicas: int = 1) -> list[str]:
    """Each broken promise of a run that was to do `steps` steps, in one sentence; none when all were kept."""
    run = find_run(run_dir)
    status = run.read_status()
    broken = [] if status.get("state") == "finished" else [f"the run ended as {status.get('state', 'nothing')}"]
    done = [row["step"] for row in read_metrics(run.metrics)]
    if done != list(range(steps)):
        broken.append(f"metrics.jsonl has {_ranges(done)} instead of steps 0 to {steps - 1}, each once")
    accounts = status.get("summary", {}).get("accounts", {})
    for replica in range(replicas):
        name = f"the journal of replica {replica}" if replicas > 1 else "the journal"
        told = accounts if replicas == 1 else accounts.get(f"rollout-buffer-{replica}", {})
        broken += [f"{name}: {fault}" for fault in _journal(of_replica(run.buffer, replica), steps, told)]
        latest = Checkpoints(of_replica(run.checkpoints, replica)).latest()
        if latest is None or latest.step != steps:
            stands = f"the newest whole one is of step {latest.step}" if latest else "there is no whole one"
            broken.append(f"no checkpoint of step {steps} of replica {replica}: {stands}")
    return broken + [f"the ledger: {fault}" for fault in _ledger(run.teachers)]


def _journal(folder: Path, steps: int, accounts: dict[str, Any]) -> Iterator[str]:
    try:
        books = audit(folder)
    except (FileNotFoundError, JournalError) as error:
        yield str(error)
        return
    yield from books.faults
    if books.batches != steps:
        yield f"{books.batches} batches were trained, not {steps}"
    if books.open:
        yield f"{books.open} tasks are neither trained nor dropped"
    told = (accounts.get("issued"), accounts.get("trained"), accounts.get("dropped"))
    if told != (books.issued, books.trained, books.dropped):
        yield f"it has {books.issued} issued, {books.trained} trained, dropped {books.dropped}; the accounts say {told}"


def _ledger(path: Path) -> Iterator[str]:
    """A call that costs money is sent again only when the one before was refused, which costs nothing."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    outcome = {line["id"]: line["outcome"] for line in lines if line["event"] == "end"}
    last: dict[str, str] = {}  # the call by its key
    for start in (line for line in lines if line["event"] == "start" and line["worst_usd"] > 0):
        before = last.get(start["key"])
        if before is not None and outcome.get(before) != "refused":
            was = outcome.get(before, "not ended")
            yield f"{start['teacher']} was asked again about {start['state_id']} although the first call was {was}"
        last[start["key"]] = start["id"]


def _ranges(steps: list[int]) -> str:
    """`0-4, 3-6`: runs of consecutive numbers in their order."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1][-1] = step
        else:
            runs.append([step, step])
    return ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in runs) or "no steps"
