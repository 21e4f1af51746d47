import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from faulty_teacher import ROOT, FaultyTeacher, local_server, ok, states, wait_until

from mesh.messages import TeacherCallResult, TraceState
from services.teachers import (
    Budget,
    ChatClient,
    Ledger,
    LedgerError,
    TeacherConfig,
    TeachersConfig,
    extract_preference_pairs,
    replay_trace,
)

CHILD = """
import asyncio, json, sys
from mesh.messages import TraceState
from services.teachers import Budget, ChatClient, Ledger, TeachersConfig, replay_trace

config = TeachersConfig(**json.loads(sys.argv[1]))
states = [TraceState(**fields) for fields in json.loads(sys.argv[2])]

async def main():
    async with ChatClient(config, Ledger(sys.argv[3], Budget(config.max_total_usd))) as client:
        await replay_trace(states, config.teachers, client=client)

asyncio.run(main())
"""


def replay(config: TeachersConfig, asked: list[TraceState], ledger: Ledger) -> list[TeacherCallResult]:
    async def scenario() -> list[TeacherCallResult]:
        async with ChatClient(config, ledger) as client:
            return await replay_trace(asked, config.teachers, client=client)

    return asyncio.run(scenario())


def test_a_replay_killed_in_the_middle_resumes_without_repeating_a_paid_call(
    faulty: FaultyTeacher, hang: Callable[[Any, dict[str, Any]], None], tmp_path: Path
) -> None:
    answered = threading.Semaphore(7)

    def seven_then_silence(handler: Any, request: dict[str, Any]) -> None:
        if answered.acquire(blocking=False) or faulty.release.is_set():
            ok("fine")(handler, request)
        else:
            hang(handler, request)

    faulty.script |= {"a": [seven_then_silence], "b": [seven_then_silence]}
    prices = {"usd_per_million_prompt": 1.0, "usd_per_million_completion": 1.0, "max_concurrency": 3}
    config = TeachersConfig(teachers=[faulty.config("a", **prices), faulty.config("b", **prices)], max_total_usd=1.0)
    asked = states(10)
    path = tmp_path / "teachers.jsonl"
    arguments = [config.model_dump_json(), json.dumps([asdict(state) for state in asked]), str(path)]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        wait_until(lambda: sum(faulty.by_model.values()) >= 13, "7 answers and 6 calls in flight")
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(20)
    sent_before = dict(faulty.asked)
    faulty.release.set()

    ledger = Ledger(path, Budget(1.0))
    held = ledger.budget.spent_usd + ledger.budget.reserved_usd
    results = replay(config, asked, ledger)
    assert set(faulty.asked.values()) == {1}
    assert len(faulty.asked) == len(asked) * 2
    unknown = [r for r in results if r.error]
    assert all(r.from_ledger and "outcome is unknown" in (r.error or "") for r in unknown)
    assert len(unknown) == 6
    assert sum(r.text == "fine" and r.from_ledger for r in results) == len(sent_before) - 6 == 7
    assert sum(r.text == "fine" and not r.from_ledger for r in results) == len(asked) * 2 - 13
    billed = 13 * 15 / 1e6  # what the server would charge for all that was sent before the kill
    assert held >= billed


def test_a_ledger_that_cannot_be_written_stops_the_replay_with_its_reason(
    faulty: FaultyTeacher, tmp_path: Path
) -> None:
    config = TeachersConfig(teachers=[faulty.config("a")], agreement_threshold=1)
    ledger = Ledger(tmp_path / "l", Budget(1.0))
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        replay(config, states(4), ledger)
    assert faulty.by_model["a"] == 0


def test_teachers_of_the_local_server_correct_a_student(tmp_path: Path) -> None:
    first = [{"role": "user", "content": "3+4*2"}]
    second = [*first, {"role": "assistant", "content": "add(3,4)"}, {"role": "tool", "content": "e:name"}]
    asked = [TraceState("t/0#0", first, "add(3,4)"), TraceState("t/0#1", second, "sum(3,4)")]
    with local_server("--teachers", "3", "--error-rate", "0") as (_, url):
        teachers = [TeacherConfig(name=f"oracle-{i}", base_url=url, model=f"oracle-{i}") for i in range(3)]
        config = TeachersConfig(teachers=teachers)
        results = replay(config, asked, Ledger(tmp_path / "l", Budget(0.0)))
    assert [r.error for r in results] == [None] * 6
    assert all(r.prompt_tokens > 0 and r.completion_tokens > 0 and r.cost_usd == 0 for r in results)
    [pair] = extract_preference_pairs(asked, results, config.agreement_threshold, config.weights)
    assert (pair.state_id, pair.rollout_id, pair.chosen, pair.rejected) == ("t/0#0", "t/0", "sum(3,4)", "add(3,4)")
    assert pair.teachers == ["oracle-0", "oracle-1", "oracle-2"]
