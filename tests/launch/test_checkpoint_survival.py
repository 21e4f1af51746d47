"""Checkpoints of whole runs: damaged ones are refused by name, and a killed writer leaves none that looks whole."""

import os
import signal
import time

from launch_runs import LiveRun, metrics, milkweed, settings

from launch.promises import broken_promises
from services.runs.checkpoints import damage

KEPT = ["trainer.keep_checkpoints=1000", "trainer.checkpoint_every=2", "teachers.local.delay_s=0.0"]


def test_damaged_checkpoints_are_refused_on_stderr_and_the_last_whole_one_is_taken_with_all_that_belongs_to_it(
    tmp_path,
):
    done = milkweed("run", *settings(tmp_path, "damaged", "trainer.steps=8", *KEPT))
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "damaged"
    before, spent = metrics(path), (path / "teachers.jsonl").read_text()
    checkpoints = path / "checkpoints"
    flip(checkpoints / "step-8/policy/model.safetensors")
    truncate(checkpoints / "step-6/buffer/buffer.jsonl")
    (checkpoints / "step-4/manifest.json").unlink()

    resumed = milkweed("resume", path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    for step, reason in [
        (8, "policy/model.safetensors is corrupt: its sha256 is not the one in manifest.json"),
        (6, "buffer/buffer.jsonl has"),
        (4, "it has no manifest.json"),
    ]:
        assert f"checkpoint {checkpoints / f'step-{step}'} is refused: {reason}" in resumed.stderr
    assert "Traceback" not in resumed.stderr
    assert broken_promises(path, 8) == []
    rows = metrics(path)
    assert rows[:2] == before[:2]  # what the checkpoint holds was not done again
    assert [row["time"] for row in rows[2:]] != [row["time"] for row in before[2:]]
    assert (path / "teachers.jsonl").read_text().startswith(spent)  # nothing that was paid is forgotten
    assert all(damage(checkpoints / f"step-{step}") is None for step in (2, 4, 6, 8))  # written anew


def test_a_trainer_killed_while_it_writes_a_checkpoint_leaves_no_half_one(tmp_path):
    with LiveRun(tmp_path, "half", "trainer.steps=12", *KEPT, "trainer.checkpoint_every=1") as run:
        trainer = run.wait_step(1, "trainer-0")["members"]["trainer-0"]["pid"]
        while True:
            half = next((run.path / "checkpoints").glob(".*.writing"), None)
            if half is not None:
                os.kill(trainer, signal.SIGSTOP)  # first, so that it cannot finish what is looked at
                if half.exists() and not half.with_name(half.name.split(".")[1]).exists():
                    os.kill(trainer, signal.SIGKILL)
                    break
                os.kill(trainer, signal.SIGCONT)  # it was finished: the next one
            assert run.process.poll() is None, "no checkpoint was met half written"
            time.sleep(0.001)
        run.traces.processes()
        code, output = run.end()
    assert code == 0, output
    assert metrics(run.path)[-1]["supervision/deaths"] == 1
    assert not half.exists()
    assert broken_promises(run.path, 12) == []
    assert run.traces.left() == []


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)
