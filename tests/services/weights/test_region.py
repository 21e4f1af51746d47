import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mesh.messages import RegionRef
from services.weights import region as region_module
from services.weights.region import Region, RegionError, read_region, sweep_dead_regions


def test_a_reader_on_the_same_host_copies_any_part_from_the_file():
    async def scenario():
        region = Region(10_000)
        region.tensor.copy_(torch.arange(10_000) % 251)
        for offset, length in [(0, 10_000), (1, 1), (777, 4_000), (9_999, 1), (10_000, 0)]:
            out = torch.zeros(length, dtype=torch.uint8)
            assert await read_region(region.ref(), out, offset) == "shm"
            assert torch.equal(out, region.tensor[offset : offset + length])
        await region.close()

    asyncio.run(scenario())


def test_the_file_is_private_and_gone_after_close(files_left):
    async def scenario():
        region = Region(100)
        assert region.path.stat().st_mode & 0o777 == 0o600
        assert str(os.getpid()) in region.path.name
        await region.close()
        await region.close()
        assert not region.path.exists()
        with pytest.raises(RegionError, match="No such file"):
            await read_region(region.ref(), torch.zeros(100, dtype=torch.uint8))

    asyncio.run(scenario())
    assert not files_left(os.getpid())


def test_a_forgotten_region_leaves_no_file(files_left):
    region = Region(100)
    assert files_left(os.getpid())
    del region
    assert not files_left(os.getpid())


def test_a_region_of_another_host_is_not_looked_for_in_local_files():
    async def scenario():
        region = Region(100)
        elsewhere = RegionRef(100, f"not-{socket.gethostname()}", str(region.path), None)
        with pytest.raises(RegionError, match="this host is"):
            await read_region(elsewhere, torch.zeros(100, dtype=torch.uint8))
        await region.close()

    asyncio.run(scenario())


def test_an_rdma_read_outside_of_monarch_is_refused_at_once():
    ref = RegionRef(100, "elsewhere", None, rdma=("a block",))
    with pytest.raises(RegionError, match="Monarch context"):
        asyncio.run(read_region(ref, torch.zeros(100, dtype=torch.uint8)))


def test_a_file_that_is_too_short_is_an_error(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"x" * 50)
    ref = RegionRef(100, socket.gethostname(), str(path), None)
    with pytest.raises(RegionError, match="ends after 50 of 100"):
        asyncio.run(read_region(ref, torch.zeros(100, dtype=torch.uint8)))


@pytest.mark.parametrize(
    ("out", "offset"),
    [(torch.zeros(4), 0), (torch.zeros(11, dtype=torch.uint8), 0), (torch.zeros(4, dtype=torch.uint8), 7)],
)
def test_bad_ranges_and_tensors_are_refused(out, offset):
    with pytest.raises(ValueError, match=r"uint8|outside"):
        asyncio.run(read_region(RegionRef(10, socket.gethostname(), None, None), out, offset))


def test_without_room_in_shared_memory_the_next_folder_is_taken(monkeypatch, tmp_path):
    allocate = os.posix_fallocate
    refused = []

    def no_room_in_shm(descriptor, start, nbytes):
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/shm"):
            refused.append(descriptor)
            raise OSError(28, "No space left on device")
        allocate(descriptor, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", no_room_in_shm)
    monkeypatch.setattr(region_module.tempfile, "gettempdir", lambda: str(tmp_path))
    region = Region(1000)
    assert refused
    assert region.path.parent == tmp_path
    asyncio.run(region.close())
    assert list(tmp_path.iterdir()) == []


def test_no_room_anywhere_is_one_clear_error(files_left):
    with pytest.raises(RegionError, match=r"no room .* /dev/shm"):
        Region(1 << 60)
    assert not files_left(os.getpid())


OWNER = """
import sys, time
from services.weights.region import Region
region = Region(1000)
print(region.path, flush=True)
sys.stdin.read()
"""


def test_files_of_a_killed_owner_are_swept_and_those_of_a_live_one_are_not():
    mine = Region(1000)
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        path = Path(owner.stdout.readline().strip())
        sweep_dead_regions()
        assert path.exists()
        owner.send_signal(signal.SIGKILL)
    sweep_dead_regions()
    assert not path.exists()
    assert mine.path.exists()
    asyncio.run(mine.close())


def test_an_owner_that_ends_normally_leaves_nothing():
    owner = subprocess.run([sys.executable, "-c", OWNER], input="", capture_output=True, text=True, timeout=60)
    path = Path(owner.stdout.strip())
    assert path.name.startswith("milkweed-region-")
    assert not path.exists()


def test_files_that_are_not_regions_are_never_swept():
    path = Path("/dev/shm") / f"milkweed-region-notes-{os.getpid()}"
    path.write_text("mine")
    try:
        sweep_dead_regions()
        assert path.exists()
    finally:
        path.unlink()
