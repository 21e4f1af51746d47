"""Teachers behind real servers are lost, and their pool with them: training goes on, and no money is lost."""

import json
import os
import signal
import sys

from launch_runs import LiveRun, metrics

from launch.promises import broken_promises
from services.environments.process import ServerProcess

STEPS = 40


def test_training_goes_on_with_fewer_teachers_and_with_none_and_no_paid_call_is_lost_or_repeated(tmp_path):
    servers = [serve(tmp_path, number) for number in range(3)]
    for server in servers:
        server.wait_ready()
    ports = [server.port for server in servers]
    try:
        with LiveRun(tmp_path, "taught", *settings(ports)) as run:
            run.wait_for(lambda status: answered(run.path) >= {"t0", "t1", "t2"}, "answers of all teachers")
            os.kill(servers[0].pid, signal.SIGKILL)
            pool = run.wait_for(
                lambda status: refused(run.path) == {"t0"} and "teachers-0" in status["members"],
                "a call that a dead teacher refused",
            )
            os.kill(pool["members"]["teachers-0"]["pid"], signal.SIGKILL)
            sent = len(ledger(run.path))
            run.wait_for(lambda status: len(ledger(run.path)) > sent + 6, "calls of a new pool")
            for server in servers[1:]:
                os.kill(server.pid, signal.SIGKILL)
            alone = run.wait_for(lambda status: refused(run.path) == {"t0", "t1", "t2"}, "no teacher")["step"]
            run.wait_step(min(alone + 3, STEPS - 5))
            os.killpg(run.process.pid, signal.SIGINT)
            code, output = run.end()
        assert code == 0, output
        steps, spent, charged = len(metrics(run.path)), book(run.path), sum(ended(run.path).values())
        assert steps < STEPS

        servers = [serve(tmp_path, number, port) for number, port in enumerate(ports)]
        for server in servers:
            server.wait_ready()
        with LiveRun(tmp_path, "taught", resume=True, traces=run.traces) as resumed:
            code, output = resumed.end()
    finally:
        for server in servers:
            server.stop()
    assert code == 0, output
    assert broken_promises(run.path, STEPS) == []  # no paid call was repeated
    assert book(run.path).items() >= spent.items()  # what was known to be paid still is, at the same price
    rows = metrics(run.path)
    assert rows[-1]["teachers/spent_usd"] >= charged - 1e-9
    assert max(row["replay/pairs"] for row in rows[:steps]) > 0
    assert max(row["replay/pairs"] for row in rows[steps:]) > 0  # they teach again
    assert run.traces.left() == []


def serve(folder, number, port=0):
    command = [sys.executable, "-P", "-m", "services.teachers.local_server", "--port", str(port), "--lifeline"]
    server = ServerProcess(command, folder / f"teacher-{number}.log")
    server.start()
    return server


def settings(ports):
    price = "usd_per_million_prompt = 1.0, usd_per_million_completion = 1.0"
    teachers = ", ".join(
        f'{{name = "t{i}", base_url = "http://127.0.0.1:{port}/v1", model = "oracle-{i}", {price}}}'
        for i, port in enumerate(ports)
    )
    return [
        f"trainer.steps={STEPS}", "trainer.keep_checkpoints=1000", "trainer.checkpoint_every=5",
        "teachers.backend=http",
        f"teachers.pool.teachers=[{teachers}]", "teachers.pool.max_retries=1", "teachers.pool.backoff_base_s=0.1",
    ]  # fmt: skip


def ledger(path):
    """The book's lines so far; the last one may be half written while the run goes on."""
    text = (path / "teachers.jsonl").read_text() if (path / "teachers.jsonl").exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def teachers_by(path, outcome):
    lines = ledger(path)
    teacher = {line["id"]: line["teacher"] for line in lines if line["event"] == "start"}
    return {teacher[line["id"]] for line in lines if line["event"] == "end" and line["outcome"] == outcome}


def answered(path):
    return teachers_by(path, "answered")


def refused(path):
    return teachers_by(path, "refused")


def book(path):
    """USD by call: as it ended, or, where that is not known, at its worst."""
    worst = {line["id"]: line["worst_usd"] for line in ledger(path) if line["event"] == "start"}
    return worst | ended(path)


def ended(path):
    """USD by call, of those whose end is known."""
    return {line["id"]: line["cost_usd"] for line in ledger(path) if line["event"] == "end"}
