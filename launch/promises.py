"""What a run promises whatever died in it, checked afterwards from its folder alone.

It ends by itself with all its steps, each in the metrics once; every task is trained once or dropped with a reason; the
driver's accounts say what the journal says; the last checkpoint is whole, and all replicas' are equal; no paid call is
repeated. What it must not leave behind is `launch.traces`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.rollouts.audit import Audit, audit
from services.rollouts.journal import JournalError
from services.runs.checkpoints import Checkpoints
from services.runs.folder import find_run, of_replica
from services.telemetry.metrics import read_metrics


def broken_promises(run_dir: Path, steps: int, replicas: int = 1) -> list[str]:
    """Each broken promise of a run that was to do `steps` steps, in one sentence; none when all were kept."""
    run = find_run(run_dir)
    status, books = run.read_status(), list[Audit]()
    broken = [] if status.get("state") == "finished" else [f"the run ended as {status.get('state', 'nothing')}"]
    for replica in range(replicas):
        of = f" of replica {replica}" if replicas > 1 else ""
        done = [row["step"] for row in read_metrics(of_replica(run.path, replica))]
        # A replica that healed from a peer, or began from its last checkpoint, does not do the steps that it missed.
        if done != (list(range(steps)) if replicas == 1 else sorted({*done})):
            broken.append(f"the metrics{of} have {_ranges(done)} instead of steps 0 to {steps - 1}, each once")
        try:
            books.append(audit(of_replica(run.buffer, replica)))
        except (FileNotFoundError, JournalError) as error:
            broken.append(str(error))
        else:
            broken += [f"the journal{of}: {fault}" for fault in _unfinished(books[-1], steps)]
        latest = Checkpoints(of_replica(run.checkpoints, replica)).latest()
        if latest is None or latest.step != steps:
            stands = f"the newest whole one is of step {latest.step}" if latest else "there is no whole one"
            broken.append(f"no checkpoint of step {steps}{of}: {stands}")
    policies = [of_replica(run.checkpoints, r) / f"step-{steps}/policy/model.safetensors" for r in range(replicas)]
    if len({policy.read_bytes() for policy in policies if policy.exists()}) > 1:
        broken.append(f"the replicas' policies of step {steps} are not equal")
    broken += _accounts(status.get("summary", {}).get("accounts", {}), books)
    return broken + [f"the ledger: {fault}" for fault in _ledger(run.teachers)]


def _unfinished(books: Audit, steps: int) -> Iterator[str]:
    yield from books.faults
    if books.batches != steps:
        yield f"{books.batches} batches were trained, not {steps}"
    if books.open:
        yield f"{books.open} tasks are neither trained nor dropped"


def _accounts(told: dict[str, Any], books: list[Audit]) -> Iterator[str]:
    """What the driver reports must be what the journals of all replicas say together."""
    dropped = sum((Counter(each.dropped) for each in books), Counter[str]())
    found = {"issued": sum(each.issued for each in books), "trained": sum(each.trained for each in books)}
    for name, value in {**found, "dropped": dict(dropped)}.items():
        if told.get(name) != value:
            yield f"the accounts say {name} {told.get(name)}, the journal {value}"


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
