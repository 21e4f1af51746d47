"""Makes `weights_actors` importable in the procs that these tests spawn."""

import os
from pathlib import Path

import pytest
import torch
from monarch._src.actor import actor_mesh
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

HERE = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def files_left():
    """The files of the regions that the process with this pid made."""
    return lambda pid: list(Path("/dev/shm").glob(f"milkweed-region-{pid}-*"))


@pytest.fixture(autouse=True)
def outside_of_monarch(request):
    """Tests without a mesh run outside of Monarch, also after tests of the same session that were inside."""
    if "host" in request.fixturenames:
        yield
        return
    token = actor_mesh._context.set(None)
    yield
    actor_mesh._context.reset(token)


@pytest.fixture
def as_rank():
    """Makes this process look like one rank of many, without the others."""

    def enter(rank, *shape):
        if torch.distributed.is_initialized():
            destroy_process_group()
        size = torch.Size(shape).numel()
        init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return init_device_mesh("cpu", shape)

    yield enter
    if torch.distributed.is_initialized():
        destroy_process_group()
