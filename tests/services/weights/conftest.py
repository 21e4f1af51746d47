"""Makes `weights_actors` importable in the procs that these tests spawn."""

import os
from pathlib import Path

import pytest
import torch

HERE = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def files_left():
    """How many regions' files exist beyond those that were there before the test."""
    shm = Path("/dev/shm")
    before = set(shm.glob("milkweed-region-*"))
    return lambda: set(shm.glob("milkweed-region-*")) - before
