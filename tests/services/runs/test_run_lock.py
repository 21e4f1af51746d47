import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from services.runs import RunLock

ROOT = Path(__file__).parents[3]
HOLDER = """
import sys, time
from services.runs import RunLock
RunLock(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "driver.lock"


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_second_driver_is_refused_and_told_who_drives(path: Path) -> None:
    with RunLock(path), pytest.raises(RuntimeError, match=f"driven already by process {os.getpid()} on .*stop that"):
        RunLock(path).acquire()


def test_the_lock_is_free_again_when_its_driver_has_left(path: Path) -> None:
    with pytest.raises(ValueError, match="boom"), RunLock(path):
        raise ValueError("boom")
    assert os.listdir(path.parent) == []
    with RunLock(path):
        assert os.listdir(path.parent) == ["driver.lock"]


def test_the_lock_of_a_killed_driver_is_taken_over_and_of_a_living_one_not(path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            with pytest.raises(RuntimeError, match=f"process {child.pid} "):
                RunLock(path).acquire()
        finally:
            child.send_signal(signal.SIGKILL)
            # the child is a zombie until it is waited for, and must count as dead already
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with RunLock(path):
            assert json.loads(path.read_text())["pid"] == os.getpid()
        child.wait(timeout=60)
    assert os.listdir(path.parent) == []


def test_a_pid_that_was_given_to_another_process_does_not_hold_the_run(path: Path) -> None:
    RunLock(path).acquire()
    edit(path, started="an earlier boot 17")
    with RunLock(path):
        assert json.loads(path.read_text())["started"] != "an earlier boot 17"


def test_a_driver_on_another_host_is_respected(path: Path) -> None:
    RunLock(path).acquire()
    edit(path, host="node-7", pid=1, started="unknown")
    with pytest.raises(RuntimeError, match=f"process 1 on node-7 .*delete {path}"):
        RunLock(path).acquire()


def test_a_file_that_no_driver_wrote_is_replaced(path: Path) -> None:
    path.write_text("{")
    with RunLock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_releasing_leaves_a_lock_that_somebody_else_holds_by_now(path: Path) -> None:
    lock = RunLock(path)
    lock.acquire()
    edit(path, host="node-7")
    lock.release()
    assert json.loads(path.read_text())["host"] == "node-7"


def test_of_many_drivers_that_find_a_stale_lock_one_gets_it(path: Path) -> None:
    RunLock(path).acquire()
    for _ in range(10):
        edit(path, started="dead")
        start = threading.Barrier(6)
        won: list[bool] = []

        def drive(start: threading.Barrier = start, won: list[bool] = won) -> None:
            start.wait(timeout=30)
            try:
                RunLock(path).acquire()
                won.append(True)
            except RuntimeError:
                won.append(False)

        threads = [threading.Thread(target=drive) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert sorted(won) == [False] * 5 + [True]
        assert os.listdir(path.parent) == ["driver.lock"]
