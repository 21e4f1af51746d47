"""On CPU, with one generator in lock-step, a run that was interrupted has the bits of one that was not.

Floating-point sums depend on what is computed together. So requests are generated one at a time and their prompts
anew; what a task samples depends on its own seed alone. Teachers answer when they can, and are left out.
"""

import os
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch_runs import LiveRun, metrics, milkweed

from launch.promises import broken_promises

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STEPS = 8
LOCK_STEP = [
    f"trainer.steps={STEPS}", "trainer.checkpoint_every=2", "trainer.keep_checkpoints=100", "trainer.prefetch=false",
    "rollouts.max_staleness=0", "generator.count=1", "generator.episodes=1", "generator.engine.max_batch=1",
    "generator.engine.reuse_prefixes=false", "replay.beta=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    with LiveRun(tmp_path_factory.mktemp("runs"), "uninterrupted", *LOCK_STEP) as run:
        code, output = run.end()
    assert code == 0, output
    return run.path


def test_a_stopped_and_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, uninterrupted):
    with LiveRun(tmp_path, "stopped", *LOCK_STEP) as run:
        run.wait_step(3)
        os.killpg(run.process.pid, signal.SIGINT)  # as Ctrl-C: at once, and a checkpoint is written where it stands
        code, output = run.end()
    assert code == 0, output
    assert len(metrics(run.path)) < STEPS
    resumed = milkweed("resume", run.path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert_same_bits(run.path, uninterrupted)


def test_a_run_whose_trainer_and_generator_are_killed_has_the_bits_of_an_uninterrupted_one(tmp_path, uninterrupted):
    with LiveRun(tmp_path, "killed", *LOCK_STEP) as run:
        members = run.wait_step(3, "trainer-0", "generator-0")[
            "members"
        ]  # a step after a checkpoint: the batch is trained again
        for victim in ("trainer-0", "generator-0"):
            os.kill(members[victim]["pid"], signal.SIGKILL)
        code, output = run.end()
    assert code == 0, output
    assert metrics(run.path)[-1]["supervision/deaths"] == 2
    assert_same_bits(run.path, uninterrupted)


def assert_same_bits(path, other):
    assert broken_promises(path, STEPS) == []
    one, two = (folder / "checkpoints" / f"step-{STEPS}" for folder in (path, other))
    assert (one / "policy/model.safetensors").read_bytes() == (two / "policy/model.safetensors").read_bytes()
    assert (one / "trainer.json").read_text() == (two / "trainer.json").read_text()
    ours, theirs = tensors(one / "trainer"), tensors(two / "trainer")
    assert ours.keys() == theirs.keys()
    assert any(name.endswith(" exp_avg_sq") for name in ours)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def tensors(folder):
    """Parameters, moments and random state of a checkpoint."""
    reader = dcp.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    found = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in saved.items()}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found
