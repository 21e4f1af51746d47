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
    """The files of the regions that the process with this pid made."""
    return lambda pid: list(Path("/dev/shm").glob(f"milkweed-region-{pid}-*"))
