from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.environments import ServerFailure, ServerProcess
from services.environments.process import ROOT

ANNOUNCE = "import json, os; print(json.dumps({'port': PORT}), flush=True)\n"
UNTIL_EOF = "while os.read(0, 100): pass\n"


def program(text: str, port: int = 4321) -> list[str]:
    return [sys.executable, "-S", "-c", text.replace("PORT", str(port))]


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # an orphan that nobody has waited for yet is gone all the same


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s} s in vain until {what}"
        time.sleep(0.05)


def test_a_server_is_ready_once_it_announces_its_port_and_ends_with_its_input(tmp_path: Path) -> None:
    noise = "print('loading {'); print('{\"progress\": 1}')\n"
    with ServerProcess(program(noise + ANNOUNCE + UNTIL_EOF), tmp_path / "logs" / "server.log") as server:
        assert server.port == 4321
        assert server.alive
        server.check()
    assert server.exit_code == 0
    assert "loading" in (tmp_path / "logs" / "server.log").read_text()
    with pytest.raises(ServerFailure, match="not running \\(exit code 0\\)"):
        server.check()


def test_a_server_that_ends_early_is_one_error_with_its_code_and_last_words(tmp_path: Path) -> None:
    text = "import sys\nfor i in range(100): print('line', i, file=sys.stderr)\nsys.exit(3)"
    server = ServerProcess(program(text), tmp_path / "log")
    server.start()
    with pytest.raises(ServerFailure, match="exit code 3") as failure:
        server.wait_ready()
    assert "line 99" in str(failure.value)
    assert "line 9\n" not in str(failure.value)
    assert server.stop() == 3


def test_a_silent_server_is_stopped_and_named(tmp_path: Path) -> None:
    server = ServerProcess(program("import os\nprint('thinking', flush=True)\n" + UNTIL_EOF), tmp_path / "log", 1.5)
    server.start()
    with pytest.raises(ServerFailure, match=r"not ready after 1\.5 s") as failure:
        server.wait_ready()
    assert "thinking" in str(failure.value)
    assert not server.alive


def test_the_announcement_of_an_earlier_start_is_not_taken_for_this_one(tmp_path: Path) -> None:
    with ServerProcess(program(ANNOUNCE + UNTIL_EOF, port=1111), tmp_path / "log") as first:
        assert first.port == 1111
    with ServerProcess(program(ANNOUNCE + UNTIL_EOF, port=2222), tmp_path / "log") as second:
        assert second.port == 2222


def test_a_server_that_ignores_its_input_and_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ANNOUNCE + "time.sleep(600)"
    server = ServerProcess(program(stubborn), tmp_path / "log")
    server.start()
    server.wait_ready()
    assert server.stop(grace_s=0.3) == -signal.SIGKILL
    assert server.stop() == -signal.SIGKILL


def test_a_program_that_does_not_exist_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ServerFailure, match="/no/such/program"):
        ServerProcess(["/no/such/program"], tmp_path / "log").start()


def test_a_second_start_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    with (
        ServerProcess(program(ANNOUNCE + UNTIL_EOF), tmp_path / "log") as server,
        pytest.raises(RuntimeError, match="runs already"),
    ):
        server.start()


def test_a_parent_that_is_killed_leaves_no_toolbox_server(tmp_path: Path) -> None:
    text = (
        "import sys, time\n"
        "from services.environments import EnvironmentConfig, ServerProcess\n"
        "server = ServerProcess(EnvironmentConfig().server_command(), sys.argv[1], 120)\n"
        "server.start(); server.wait_ready(); print(server.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    try:
        readable, _, _ = select.select([parent.stdout], [], [], 150)
        assert readable, "the server was not ready in time"
        pid = int(parent.stdout.readline())
        assert is_running(pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(30)
        parent.stdout.close()
    wait_until(lambda: not is_running(pid), f"server {pid} has ended")


def test_a_toolbox_server_with_impossible_settings_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.environments.toolbox.server", "--max-turns", "1", "--lifeline"]
    server = ServerProcess(command, tmp_path / "log", ready_timeout_s=120)
    server.start()
    with pytest.raises(ServerFailure, match="max_turns=1 is too few"):
        server.wait_ready()
