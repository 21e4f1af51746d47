"""The way into a live run: a real directory on its own proc, called from here and from another process."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from monarch.actor import ActorError

from mesh.binding import MemberRef, RoleTable
from mesh.directory import BadReference, Directory, load_reference, save_reference
from mesh.topology import Place, fill

LIMIT_S = 30.0
ROOT = Path(__file__).parents[2]
ATTACHER = """
import sys
from pathlib import Path
import monarch.actor
from mesh.directory import load_reference
monarch.actor.unhandled_fault_hook = lambda failure: None
directory = load_reference(Path(sys.argv[1]))
print(directory.view.call_one().get(timeout=30)["run"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def placed(host):
    place = Place("directory", "directory", Directory, ("lab-1",))
    placed = asyncio.run(fill(place, host, 0))
    # Never stopped here: when a mesh is stopped while a holder of its reference lies dead (kill -9), Monarch ends the
    # stopping process half a minute later, because its notice cannot be delivered. The session's end comes before that.
    return placed


@pytest.fixture
def directory(placed):
    ask(placed.handle.beat, {})  # takes whatever an earlier test left
    return placed.handle


def ask(endpoint, *args):
    return endpoint.call_one(*args).get(timeout=LIMIT_S)


async def asked(endpoint, *args):
    return await asyncio.wait_for(endpoint.call_one(*args), LIMIT_S)


def test_the_view_shows_run_and_bindings_and_what_the_driver_said_last(directory):
    table = RoleTable("rewarder", (MemberRef("rewarder-0", None),), generation=2, revision=7, implementation="R")
    ask(directory.publish, {"rewarder": table})
    ask(directory.beat, {"step": 4})
    ask(directory.beat, {"step": 5})
    view = ask(directory.view)
    assert (view["run"], view["step"]) == ("lab-1", 5)
    assert view["pid"] != os.getpid()
    assert view["bindings"] == {
        "rewarder": {"implementation": "R", "generation": 2, "revision": 7, "members": ["rewarder-0"]}
    }
    assert ask(directory.tables) == {"rewarder": table}


def test_a_command_reaches_the_driver_with_its_beat_and_the_answer_comes_back(directory):
    async def scenario():
        waiting = [asyncio.create_task(asked(directory.submit, "note", {"text": t}, LIMIT_S)) for t in ("a", "b")]
        commands = []
        while len(commands) < 2:
            commands += await asked(directory.beat, {})
        assert not any(task.done() for task in waiting)
        for command in reversed(commands):
            await asked(directory.answer, command.id, f"{command.name} {command.args['text']}")
        assert await asyncio.gather(*waiting) == ["note a", "note b"]
        assert await asked(directory.beat, {}) == []

    asyncio.run(scenario())


def test_a_command_without_a_driver_is_a_clear_timeout_and_no_later_driver_carries_it_out(directory):
    with pytest.raises(ActorError) as raised:
        ask(directory.submit, "stop", {}, 0.2)
    assert isinstance(raised.value.exception, TimeoutError)
    assert str(raised.value.exception) == (
        "no driver took 'stop' within 0.2 s, so it was withdrawn: is the driver of run lab-1 alive?"
    )
    assert ask(directory.beat, {}) == []


def test_a_driver_that_takes_a_command_and_is_silent_is_told_apart(directory):
    async def scenario():
        waiting = asyncio.create_task(asked(directory.submit, "checkpoint", {}, 3.0))
        commands = []
        while not commands:
            commands = await asked(directory.beat, {})
        with pytest.raises(ActorError) as raised:
            await waiting
        assert str(raised.value.exception).startswith("the driver took 'checkpoint' but did not answer within 3 s")
        await asked(directory.answer, commands[0].id, "too late")  # nobody waits: no harm

    asyncio.run(scenario())


def test_a_reference_is_its_owners_alone_even_over_a_left_over_file(directory, tmp_path):
    path = tmp_path / "mesh.ref"
    path.write_bytes(b"old")
    aside = tmp_path / "mesh.tmp"
    aside.write_bytes(b"half a reference")
    for left_over in (path, aside):
        left_over.chmod(0o644)
    save_reference(directory, path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert ask(load_reference(path).view)["run"] == "lab-1"
    assert [p.name for p in tmp_path.iterdir()] == ["mesh.ref"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_reference_that_others_can_read_or_write_is_refused_before_it_is_unpickled(tmp_path, mode):
    path = tmp_path / "mesh.ref"
    path.write_bytes(pickle.dumps(Tripwire()))
    path.chmod(mode)
    with pytest.raises(PermissionError, match=f"read or written by others \\(mode {mode:03o}\\).*chmod 600"):
        load_reference(path)
    assert Tripwire.unpickled == 0
    path.chmod(0o600)
    with pytest.raises(BadReference, match="it holds a str"):
        load_reference(path)
    assert Tripwire.unpickled == 1
    Tripwire.unpickled = 0


class Tripwire:
    unpickled = 0

    def __reduce__(self):
        return trip, ()


def trip():
    Tripwire.unpickled += 1
    return "tripped"


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04garbage", b"cno_such_module\nthing\n.", pickle.dumps({"a": 1}), pickle.dumps([1])[:-2]]
)
def test_a_damaged_reference_is_one_clear_sentence(tmp_path, data):
    path = tmp_path / "mesh.ref"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(BadReference) as raised:
        load_reference(path)
    message = str(raised.value)
    assert message.startswith(f"{path} is not the reference of a live run")
    assert "resume the run" in message
    assert "\n" not in message


def test_a_reference_cut_short_is_refused(directory, tmp_path):
    path = tmp_path / "mesh.ref"
    save_reference(directory, path)
    whole = path.read_bytes()
    for length in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(BadReference, match="not the reference of a live run"):
            load_reference(path)


def test_another_process_attaches_and_its_sudden_death_harms_nobody(directory, tmp_path):
    path = tmp_path / "mesh.ref"
    save_reference(directory, path)
    before = ask(directory.view)["pid"]
    attacher = subprocess.Popen(
        [sys.executable, "-c", ATTACHER, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert attacher.stdout.readline().strip() == "lab-1"
        attacher.send_signal(signal.SIGKILL)
        assert attacher.wait(LIMIT_S) == -signal.SIGKILL
        assert ask(directory.view)["pid"] == before
        ask(directory.beat, {"step": 6})
        assert ask(directory.view)["step"] == 6
    finally:
        attacher.kill()
        attacher.communicate()


def test_a_reference_of_another_user_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "mesh.ref"
    path.write_bytes(pickle.dumps(1))
    path.chmod(0o600)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        load_reference(path)
