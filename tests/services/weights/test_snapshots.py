import asyncio
import itertools
import os
import threading
import time

import pytest
import torch

from services.weights import region as region_module
from services.weights.checksum import checksum
from services.weights.region import RegionError
from services.weights.snapshots import (
    SnapshotPublisher,
    SnapshotReader,
    VersionGone,
    WeightsConfig,
    flat_layout,
    pull_newest,
    views,
)

FAST = WeightsConfig(max_lease_s=0.3, retry_pause_s=0.01)


def model(version: int) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((100, 30), float(version)),
        "half": torch.full((7,), version, dtype=torch.bfloat16),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(version),
        "last": torch.full((33,), version, dtype=torch.float16),
    }


def is_version(tensors: dict[str, torch.Tensor], version: int) -> bool:
    expected = model(version)
    return tensors.keys() == expected.keys() and all(
        tensors[k].dtype == v.dtype and tensors[k].shape == v.shape and torch.equal(tensors[k], v)
        for k, v in expected.items()
    )


def test_the_layout_is_aligned_and_does_not_overlap():
    specs = flat_layout(model(0))
    assert [s.name for s in specs] == list(model(0))
    assert all(s.offset % 8 == 0 for s in specs)
    assert all(a.offset + a.nbytes <= b.offset for a, b in itertools.pairwise(specs))
    assert specs[1].dtype == "bfloat16"
    assert specs[0].nbytes == 100 * 30 * 4


def test_tied_tensors_are_stored_once_and_slices_of_one_storage_are_not_tied():
    embedding = torch.nn.Embedding(10, 4)
    head = torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    net = torch.nn.ModuleDict({"embedding": embedding, "head": head})
    assert [s.name for s in flat_layout(net.state_dict())] == ["embedding.weight"]
    flat = torch.zeros(20)
    assert [s.name for s in flat_layout({"a": flat[:10], "b": flat[10:]})] == ["a", "b"]


def test_views_share_the_flat_buffer():
    specs = flat_layout(model(0))
    flat = torch.zeros(specs[-1].offset + specs[-1].nbytes, dtype=torch.uint8)
    views(flat, specs)["weight"].fill_(1.0)
    assert flat.any()


def test_nothing_and_sparse_tensors_are_refused():
    with pytest.raises(ValueError, match="no tensor"):
        flat_layout({})
    with pytest.raises(ValueError, match="dense"):
        flat_layout({"a": torch.eye(3).to_sparse()})


def test_what_is_pulled_is_what_was_published(files_left):
    async def scenario():
        publisher, reader = SnapshotPublisher(model(0), FAST), SnapshotReader(FAST)
        assert publisher.lease(-1) is None
        assert publisher.version is None
        for version in (0, 1, 2, 7):
            await publisher.publish(version, model(version))
            ref = publisher.lease(-1)
            assert ref.version == publisher.version == version
            assert is_version(await reader.pull(ref), version)
            assert reader.last_via == "shm"
            assert publisher.lease(version) is None
            publisher.release(ref.lease_id)
        assert publisher.readers() == 0
        await publisher.close()

    asyncio.run(scenario())
    assert not files_left(os.getpid())


def test_a_version_does_not_change_when_the_parameters_do():
    async def scenario():
        named = model(1)
        publisher = SnapshotPublisher(named, FAST)
        await publisher.publish(1, named)
        named["weight"].fill_(9.0)
        assert is_version(await SnapshotReader().pull(publisher.lease(0)), 1)
        await publisher.close()

    asyncio.run(scenario())


def test_a_failed_publish_keeps_the_old_version():
    async def scenario():
        publisher = SnapshotPublisher(model(1), FAST)
        await publisher.publish(1, model(1))
        with pytest.raises(ValueError, match=r"missing \[\('last'"):
            await publisher.publish(2, {k: v for k, v in model(2).items() if k != "last"})
        with pytest.raises(ValueError, match="unexpected"):
            await publisher.publish(2, model(2) | {"weight": torch.zeros(3)})
        with pytest.raises(ValueError, match="order"):
            await publisher.publish(2, dict(reversed(model(2).items())))
        # Half of this one is copied before it fails: a meta tensor has no values.
        with pytest.raises(NotImplementedError):
            await publisher.publish(2, model(2) | {"last": torch.empty(33, dtype=torch.float16, device="meta")})
        for stale in (0, 1):
            with pytest.raises(ValueError, match="must increase"):
                await publisher.publish(stale, model(stale))
        assert publisher.version == 1
        assert is_version(await SnapshotReader().pull(publisher.lease(0)), 1)
        await publisher.publish(2, model(2))
        assert is_version(await SnapshotReader().pull(publisher.lease(1)), 2)
        await publisher.close()

    asyncio.run(scenario())


def test_a_leased_slot_is_not_overwritten_before_its_release():
    async def scenario():
        publisher = SnapshotPublisher(model(1), WeightsConfig(max_lease_s=30.0))
        await publisher.publish(1, model(1))
        old = publisher.lease(0)
        await publisher.publish(2, model(2))  # the other slot
        third = asyncio.create_task(publisher.publish(3, model(3)))
        await asyncio.sleep(0.1)
        assert not third.done()
        assert publisher.version == 2
        assert is_version(await SnapshotReader().pull(old), 1)
        publisher.release(old.lease_id)
        await asyncio.wait_for(third, 10)
        assert publisher.version == 3
        await publisher.close()

    asyncio.run(scenario())


def test_a_reader_that_outlives_its_lease_learns_that_its_version_is_gone():
    async def scenario():
        publisher = SnapshotPublisher(model(1), FAST)
        await publisher.publish(1, model(1))
        slow = publisher.lease(0)
        await publisher.publish(2, model(2))
        start = time.monotonic()
        await asyncio.wait_for(publisher.publish(3, model(3)), 10)
        assert time.monotonic() - start >= 0.2, "the lease was not waited for"
        with pytest.raises(VersionGone, match="version 1 was overwritten"):
            await SnapshotReader().pull(slow)
        await publisher.close()

    asyncio.run(scenario())


def test_an_unreleased_lease_on_the_current_version_does_not_stop_the_next_publish():
    async def scenario():
        publisher = SnapshotPublisher(model(1), WeightsConfig(max_lease_s=30.0))
        await publisher.publish(1, model(1))
        publisher.lease(0)
        await asyncio.wait_for(publisher.publish(2, model(2)), 10)
        assert publisher.readers() == 1
        await publisher.close()

    asyncio.run(scenario())


def test_more_slots_let_a_slow_reader_and_the_trainer_go_on_together():
    async def scenario():
        publisher = SnapshotPublisher(model(1), WeightsConfig(slots=3, max_lease_s=30.0))
        await publisher.publish(1, model(1))
        slow = publisher.lease(0)
        for version in range(2, 7):
            await asyncio.wait_for(publisher.publish(version, model(version)), 10)
        assert is_version(await SnapshotReader().pull(slow), 1)
        await publisher.close()

    asyncio.run(scenario())


def test_a_read_torn_by_a_publish_is_never_taken_for_a_version(monkeypatch):
    # The reader stops in the middle of its copy while its slot is overwritten: half of version 1, half of version 3.
    async def scenario():
        publisher = SnapshotPublisher(model(1), FAST)
        await publisher.publish(1, model(1))
        slow = publisher.lease(0)
        half = slow.region.nbytes // 2

        async def torn_read(ref, out, **_):
            region_module._copy_from_file(*opened(ref), out[:half], 0, ref)
            await publisher.publish(2, model(2))
            await publisher.publish(3, model(3))
            region_module._copy_from_file(*opened(ref), out[half:], half, ref)
            return "shm"

        def opened(ref):
            return (region_module._open_local(ref)[0],)

        monkeypatch.setattr("services.weights.snapshots.read_region", torn_read)
        reader = SnapshotReader()
        with pytest.raises(VersionGone):
            await reader.pull(slow)
        monkeypatch.undo()
        assert is_version(await reader.pull(publisher.lease(0)), 3)
        await publisher.close()

    asyncio.run(scenario())


def test_a_cancelled_publish_leaves_the_old_version_and_the_next_one_does_not_write_beside_it(monkeypatch):
    copying, go_on = threading.Event(), threading.Event()

    def held_up(flat):
        copying.set()
        assert go_on.wait(20)
        return checksum(flat)

    async def scenario():
        publisher = SnapshotPublisher(model(1), FAST)
        await publisher.publish(1, model(1))
        monkeypatch.setattr("services.weights.snapshots.checksum", held_up)
        cancelled = asyncio.create_task(publisher.publish(2, model(2)))
        assert await asyncio.to_thread(copying.wait, 20)
        cancelled.cancel()
        assert isinstance((await asyncio.gather(cancelled, return_exceptions=True))[0], asyncio.CancelledError)
        monkeypatch.undo()
        assert publisher.version == 1
        third = asyncio.create_task(publisher.publish(3, model(3)))
        await asyncio.sleep(0.2)
        assert not third.done(), "two threads wrote to one slot"
        go_on.set()
        await asyncio.wait_for(third, 20)
        assert is_version(await SnapshotReader().pull(publisher.lease(1)), 3)
        await publisher.close()

    asyncio.run(scenario())


def test_lease_newer_waits_for_a_version_and_not_longer_than_told():
    async def scenario():
        publisher = SnapshotPublisher(model(1), FAST)
        assert await publisher.lease_newer(0, 0.05) is None
        waiting = asyncio.create_task(publisher.lease_newer(1, 30.0))
        await publisher.publish(1, model(1))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await publisher.publish(2, model(2))
        assert (await asyncio.wait_for(waiting, 10)).version == 2
        await publisher.close()
        assert await publisher.lease_newer(0, 0.01) is None
        with pytest.raises(RuntimeError, match="closed"):
            await publisher.publish(3, model(3))

    asyncio.run(scenario())


def test_pull_newest_takes_a_newer_lease_when_its_version_is_gone():
    async def scenario():
        publisher, reader = SnapshotPublisher(model(1), FAST), SnapshotReader(FAST)
        await publisher.publish(1, model(1))
        leased, released = [], []

        async def lease(newer_than):
            ref = publisher.lease(newer_than)
            leased.append(ref)
            if ref is not None and len(leased) == 1:  # this reader is slow once
                await publisher.publish(2, model(2))
                await publisher.publish(3, model(3))
            return ref

        async def release(lease_id):
            released.append(lease_id)
            publisher.release(lease_id)

        version, tensors = await pull_newest(reader, lease, release, newer_than=0)
        assert version == 3
        assert is_version(tensors, 3)
        assert released == [ref.lease_id for ref in leased]
        assert await pull_newest(reader, lease, release, newer_than=3) is None
        await publisher.close()

    asyncio.run(scenario())


def test_pull_newest_gives_up_after_its_attempts_and_survives_a_release_that_fails():
    async def scenario():
        publisher, reader = SnapshotPublisher(model(1), FAST), SnapshotReader(FAST)
        await publisher.publish(1, model(1))
        leases = []

        async def lease(newer_than):
            ref = publisher.lease(newer_than)
            ref.region.shm_path = "/dev/shm/not-there"
            leases.append(ref)
            return ref

        async def release(lease_id):
            raise ConnectionError("the trainer is dead")

        with pytest.raises(RegionError, match="not-there"):
            await pull_newest(reader, lease, release, newer_than=0)
        assert len(leases) == FAST.attempts
        await publisher.close()

    asyncio.run(scenario())


def test_a_reader_reuses_its_buffer():
    async def scenario():
        publisher, reader = SnapshotPublisher(model(1), FAST), SnapshotReader(FAST)
        places = set()
        for version in (1, 2, 3):
            await publisher.publish(version, model(version))
            ref = publisher.lease(0)
            places.add((await reader.pull(ref))["weight"].data_ptr())
            publisher.release(ref.lease_id)
        assert len(places) == 1
        await publisher.close()

    asyncio.run(scenario())
