import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.runs import Checkpoints

ROOT = Path(__file__).parents[3]

# A child that writes step 1 wholly, then stops for ever at the named moment of writing step 2.
CHILD = """
import sys, time
from pathlib import Path
from services.runs import Checkpoints

def stop_here(*args):
    print("reached", flush=True)
    time.sleep(600)

folder, moment = Path(sys.argv[1]), sys.argv[2]
checkpoints = Checkpoints(folder)
with checkpoints.writing(1) as path:
    (path / "model.bin").write_bytes(b"one" * 1000)
if moment == "before the rename":
    Checkpoints._publish = stop_here
with checkpoints.writing(2) as path:
    (path / "model.bin").write_bytes(b"two" * 500)
    if moment == "half written":
        stop_here()
"""


def save(checkpoints: Checkpoints, step: int, text: str = "state") -> Path:
    with checkpoints.writing(step) as path:
        (path / "model.bin").write_text(text * 100)
        (path / "buffer").mkdir()
        (path / "buffer" / "state.json").write_text("{}")
    return checkpoints.folder / f"step-{step}"


def steps(checkpoints: Checkpoints) -> list[int]:
    return [c.step for c in checkpoints.list()]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=3)


def test_a_checkpoint_appears_only_when_its_block_has_ended(checkpoints: Checkpoints) -> None:
    with checkpoints.writing(4) as path:
        (path / "model.bin").write_text("x")
        assert checkpoints.list() == []
        assert checkpoints.latest() is None
    found = checkpoints.latest()
    assert found is not None
    assert (found.step, found.path.name) == (4, "step-4")
    assert sorted(p.name for p in found.path.iterdir()) == ["manifest.json", "model.bin"]


def test_a_block_that_fails_leaves_nothing(checkpoints: Checkpoints) -> None:
    def fail_halfway() -> None:
        with checkpoints.writing(4) as path:
            (path / "model.bin").write_text("x")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail_halfway()
    assert os.listdir(checkpoints.folder) == []


def test_an_empty_checkpoint_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ValueError, match="step 4: nothing was written"), checkpoints.writing(4):
        pass
    assert os.listdir(checkpoints.folder) == []


@pytest.mark.parametrize("moment", ["half written", "before the rename"])
def test_kill_9_while_saving_leaves_the_checkpoint_before(checkpoints: Checkpoints, moment: str) -> None:
    command = [sys.executable, "-c", CHILD, str(checkpoints.folder), moment]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "reached\n"
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait(timeout=60)
    assert len(os.listdir(checkpoints.folder)) == 2  # step 1, and what the child left aside
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 1
    assert (found.path / "model.bin").read_bytes() == b"one" * 1000

    save(checkpoints, 2)
    save(checkpoints, 3)
    assert sorted(os.listdir(checkpoints.folder)) == ["step-1", "step-2", "step-3"]  # the leftover is gone


def _flip_a_byte(path: Path) -> None:
    data = bytearray((path / "model.bin").read_bytes())
    data[7] ^= 1
    (path / "model.bin").write_bytes(data)


def _truncate(path: Path) -> None:
    (path / "model.bin").write_bytes((path / "model.bin").read_bytes()[:-1])


def _remove_a_file(path: Path) -> None:
    (path / "buffer" / "state.json").unlink()


def _remove_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def _break_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"files": {"model.bin": ')


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_flip_a_byte, "model.bin is corrupt"),
        (_truncate, "model.bin has 499 bytes instead of 500"),
        (_remove_a_file, "buffer/state.json is missing"),
        (_remove_the_manifest, "it has no manifest.json"),
        (_break_the_manifest, "its manifest.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_taken(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture, spoil: object, reason: str
) -> None:
    save(checkpoints, 1)
    newest = save(checkpoints, 2)
    assert callable(spoil)
    spoil(newest)
    with caplog.at_level(logging.WARNING):
        found = checkpoints.latest()
    assert found is not None
    assert found.step == 1
    assert f"{newest} is refused: {reason}" in caplog.text
    with pytest.raises(ValueError, match=f"step-2 cannot be used: {reason}"):
        checkpoints.at(2)


def test_no_whole_checkpoint_is_none(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest() is None
    _truncate(save(checkpoints, 1))
    assert checkpoints.latest() is None


def test_one_step_can_be_asked_for_by_number(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    save(checkpoints, 2)
    assert checkpoints.at(1).path == checkpoints.folder / "step-1"
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7.*there are: 1, 2"):
        checkpoints.at(7)


def test_only_the_newest_are_kept_in_numeric_order(checkpoints: Checkpoints) -> None:
    for step in (8, 9, 10, 100):
        save(checkpoints, step)
    assert steps(checkpoints) == [9, 10, 100]


def test_damaged_checkpoints_never_push_out_a_whole_one(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3):
        save(checkpoints, step)
    for path in (checkpoints.folder / "step-2", checkpoints.folder / "step-3"):
        _truncate(path)
    save(checkpoints, 4)
    save(checkpoints, 5)
    assert steps(checkpoints) == [1, 2, 3, 4, 5]
    save(checkpoints, 6)
    assert steps(checkpoints) == [2, 3, 4, 5, 6]


def test_saving_a_step_again_replaces_it(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, "old")
    save(checkpoints, 1, "new")
    assert (checkpoints.at(1).path / "model.bin").read_text() == "new" * 100
    assert os.listdir(checkpoints.folder) == ["step-1"]


def test_rewinding_drops_the_abandoned_course(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3):
        save(checkpoints, step)
    checkpoints.rewind(1)
    assert steps(checkpoints) == [1]


def test_another_writer_at_a_later_step_is_left_alone(checkpoints: Checkpoints) -> None:
    with checkpoints.writing(5) as path:
        (path / "model.bin").write_text("slow")
        save(checkpoints, 4)
    assert steps(checkpoints) == [4, 5]


def test_what_killed_writers_left_is_swept_and_a_whole_checkpoint_gets_its_name_back(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    for name in (".step-9.0a1b.writing", ".step-1.0a1b.replaced"):
        (checkpoints.folder / name).mkdir()
    save(checkpoints, 2).rename(checkpoints.folder / ".step-2.0a1b.replaced")  # killed between the two renames
    checkpoints.sweep()
    assert sorted(os.listdir(checkpoints.folder)) == ["step-1", "step-2"]
    assert checkpoints.at(2).step == 2


def test_keeping_none_and_negative_steps_are_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ValueError, match="keep at least 1"):
        Checkpoints(checkpoints.folder, keep=0)
    with pytest.raises(ValueError, match="not -1"), checkpoints.writing(-1):
        pass
