import asyncio
import os
import threading
import time

import pytest
import torch
from plane_builders import FAST, Trainer, is_version, model

from services.weights import shards
from services.weights.checksum import checksum
from services.weights.config import WeightsConfig
from services.weights.reader import SnapshotReader, VersionGone
from services.weights.region import RegionError
from services.weights.snapshots import PublishError, SnapshotPublisher


def test_what_is_pulled_is_what_was_published(files_left):
    async def scenario():
        trainer, reader = Trainer(), SnapshotReader(FAST)
        assert trainer.lease(-1) is None
        assert trainer.publisher.version is None
        for version in (0, 1, 2, 7):
            await trainer.publish(version)
            ref = trainer.lease(-1)
            assert ref.version == trainer.publisher.version == version
            assert is_version(await reader.pull(ref), version)
            assert reader.last.via == "shm"
            assert trainer.lease(version) is None
            trainer.release(ref.lease_id)
        assert trainer.publisher.readers() == 0
        await trainer.close()

    asyncio.run(scenario())
    assert not files_left(os.getpid())


def test_the_optimizer_may_change_the_parameters_right_after_the_copy():
    async def scenario():
        trainer = Trainer(model(1))
        await trainer.publisher.copy(1)
        trainer.train(9)
        await trainer.publisher.seal()
        trainer.train(10)
        assert is_version(await SnapshotReader().pull(trainer.lease(0)), 1)
        await trainer.close()

    asyncio.run(scenario())


def test_a_version_is_not_current_before_its_checksums_are_there(monkeypatch):
    hashing, go_on = threading.Event(), threading.Event()

    def held_up(data):
        hashing.set()
        assert go_on.wait(20)
        return checksum(data)

    async def scenario():
        trainer = Trainer()
        await trainer.publish(1)
        trainer.train(2)
        await trainer.publisher.copy(2)
        assert (trainer.publisher.version, trainer.publisher.copied) == (1, 2)
        assert trainer.lease(1) is None
        monkeypatch.setattr(shards, "checksum", held_up)
        sealing = asyncio.create_task(trainer.publisher.seal())
        assert await asyncio.to_thread(hashing.wait, 20)
        assert (trainer.publisher.version, trainer.lease(1)) == (1, None)
        assert is_version(await SnapshotReader().pull(trainer.lease(0)), 1)
        go_on.set()
        await sealing
        assert (trainer.publisher.version, trainer.publisher.copied) == (2, None)
        assert is_version(await SnapshotReader().pull(trainer.lease(1)), 2)
        await trainer.close()

    asyncio.run(scenario())


def test_a_copy_that_was_never_sealed_gives_way_to_the_next():
    async def scenario():
        trainer = Trainer()
        await trainer.publish(1)
        for version in (2, 3):
            trainer.train(version)
            await trainer.publisher.copy(version)
        await trainer.publisher.seal()
        assert is_version(await SnapshotReader().pull(trainer.lease(1)), 3)
        with pytest.raises(PublishError, match="nothing to seal"):
            await trainer.publisher.seal()
        await trainer.close()

    asyncio.run(scenario())


def test_a_failed_publish_keeps_the_old_version(monkeypatch):
    def broken(data):
        raise RuntimeError("no memory for checksums")

    async def scenario():
        trainer = Trainer(model(1))
        await trainer.publish(1)
        right = trainer.tensors
        trainer.tensors = {k: v for k, v in model(2).items() if k != "last"}
        with pytest.raises(ValueError, match=r"missing \[\('last'"):
            await trainer.publisher.publish(2)
        # Half of this one is copied before it fails: a meta tensor has no values.
        trainer.tensors = model(2) | {"last": torch.empty(33, dtype=torch.float16, device="meta")}
        with pytest.raises(PublishError, match=r"rank 0 did not copy its part of version 2: .*meta tensor"):
            await trainer.publisher.publish(2)
        trainer.tensors = right
        monkeypatch.setattr(shards, "checksum", broken)
        with pytest.raises(PublishError, match="rank 0 did not seal its part of version 2: no memory"):
            await trainer.publisher.publish(2)
        monkeypatch.undo()
        for stale in (0, 1):
            with pytest.raises(ValueError, match="must increase"):
                await trainer.publish(stale)
        assert (trainer.publisher.version, trainer.publisher.copied) == (1, None)
        assert is_version(await SnapshotReader().pull(trainer.lease(0)), 1)
        await trainer.publish(2)
        assert is_version(await SnapshotReader().pull(trainer.lease(1)), 2)
        await trainer.close()

    asyncio.run(scenario())


def test_a_leased_slot_is_not_overwritten_before_its_release():
    async def scenario():
        trainer = Trainer(config=WeightsConfig(max_lease_s=30.0))
        await trainer.publish(1)
        old = trainer.lease(0)
        await trainer.publish(2)  # the other slot
        third = asyncio.create_task(trainer.publish(3))
        await asyncio.sleep(0.1)
        assert not third.done()
        assert trainer.publisher.version == 2
        assert is_version(await SnapshotReader().pull(old), 1)
        trainer.release(old.lease_id)
        await asyncio.wait_for(third, 10)
        assert trainer.publisher.version == 3
        await trainer.close()

    asyncio.run(scenario())


def test_a_reader_that_outlives_its_lease_learns_that_its_version_is_gone():
    async def scenario():
        trainer = Trainer()
        await trainer.publish(1)
        slow = trainer.lease(0)
        await trainer.publish(2)
        start = time.monotonic()
        await asyncio.wait_for(trainer.publish(3), 10)
        assert time.monotonic() - start >= 0.2, "the lease was not waited for"
        with pytest.raises(VersionGone, match="version 1 was overwritten"):
            await SnapshotReader().pull(slow)
        await trainer.close()

    asyncio.run(scenario())


def test_an_unreleased_lease_on_the_current_version_does_not_stop_the_next_publish():
    async def scenario():
        trainer = Trainer(config=WeightsConfig(max_lease_s=30.0))
        await trainer.publish(1)
        trainer.lease(0)
        await asyncio.wait_for(trainer.publish(2), 10)
        assert trainer.publisher.readers() == 1
        await trainer.close()

    asyncio.run(scenario())


def test_more_slots_let_a_slow_reader_and_the_trainer_go_on_together():
    async def scenario():
        trainer = Trainer(config=WeightsConfig(slots=3, max_lease_s=30.0))
        await trainer.publish(1)
        slow = trainer.lease(0)
        for version in range(2, 7):
            await asyncio.wait_for(trainer.publish(version), 10)
        assert is_version(await SnapshotReader().pull(slow), 1)
        await trainer.close()

    asyncio.run(scenario())


def test_a_cancelled_publish_leaves_the_old_version_and_the_next_one_does_not_write_beside_it(monkeypatch):
    copying, go_on = threading.Event(), threading.Event()
    copy = shards.views

    def held_up(flat, specs):
        copying.set()
        assert go_on.wait(20)
        return copy(flat, specs)

    async def scenario():
        trainer = Trainer(model(1))
        await trainer.publish(1)
        monkeypatch.setattr(shards, "views", held_up)
        cancelled = asyncio.create_task(trainer.publish(2))
        assert await asyncio.to_thread(copying.wait, 20)
        cancelled.cancel()
        assert isinstance((await asyncio.gather(cancelled, return_exceptions=True))[0], asyncio.CancelledError)
        monkeypatch.undo()
        assert trainer.publisher.version == 1
        third = asyncio.create_task(trainer.publish(3))
        await asyncio.sleep(0.2)
        assert not third.done(), "two threads wrote to one slot"
        go_on.set()
        await asyncio.wait_for(third, 20)
        assert is_version(await SnapshotReader().pull(trainer.lease(1)), 3)
        await trainer.close()

    asyncio.run(scenario())


def test_lease_newer_waits_for_a_version_and_not_longer_than_told():
    async def scenario():
        trainer = Trainer()
        assert await trainer.publisher.lease_newer(0, 0.05) is None
        waiting = asyncio.create_task(trainer.publisher.lease_newer(1, 30.0))
        await trainer.publish(1)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await trainer.publish(2)
        assert (await asyncio.wait_for(waiting, 10)).version == 2
        await trainer.close()
        assert await trainer.publisher.lease_newer(0, 0.01) is None
        with pytest.raises(RuntimeError, match="closed"):
            await trainer.publish(3)

    asyncio.run(scenario())


# ---- several ranks ---------------------------------------------------------------------------------------------------


class Rank:
    """A peer's writer, as slow or broken as it is told."""

    def __init__(self, writer, ready=None, error=None):
        self.writer, self.ready, self.error, self.closed = writer, ready, error, False

    async def copy(self, slot, version):
        if self.ready is not None:
            await self.ready.wait()
        if self.error is not None:
            raise self.error
        await self.writer.copy(slot, version)

    async def seal(self, slot, base):
        return await self.writer.seal(slot, base)

    async def close(self):
        self.closed = True
        await self.writer.close()


def two_ranks(config=FAST, **second):
    """Two trainers with a tensor each, under one publisher."""
    first = Trainer({"a": torch.zeros(50)}, config)
    other = Trainer({"b": torch.zeros(70)}, config)
    peer = Rank(other.writer, **second)
    return first, other, peer, SnapshotPublisher([first.writer, peer], config)


def test_a_version_is_current_only_when_the_copies_of_all_ranks_landed():
    async def scenario():
        ready = asyncio.Event()
        _, _, _, publisher = two_ranks(ready=ready)
        publishing = asyncio.create_task(publisher.publish(1))
        await asyncio.sleep(0.1)
        assert publisher.lease(-1) is None
        ready.set()
        await asyncio.wait_for(publishing, 10)
        assert set(await SnapshotReader().pull(publisher.lease(-1))) == {"a", "b"}
        await publisher.close()

    asyncio.run(scenario())


def test_a_rank_that_fails_keeps_the_old_version_of_all_ranks(files_left):
    async def scenario():
        first, other, peer, publisher = two_ranks()
        await publisher.publish(1)
        for tensors in (first.tensors, other.tensors):
            next(iter(tensors.values())).fill_(2.0)
        peer.error = ConnectionError("rank 1 died")
        with pytest.raises(PublishError, match="rank 1 did not copy its part of version 2: rank 1 died"):
            await publisher.publish(2)
        assert publisher.version == 1
        tensors = await SnapshotReader().pull(publisher.lease(0))
        assert float(tensors["a"].sum()) == float(tensors["b"].sum()) == 0.0
        peer.error = None
        await publisher.publish(2)
        tensors = await SnapshotReader().pull(publisher.lease(1))
        assert float(tensors["a"].mean()) == float(tensors["b"].mean()) == 2.0
        await publisher.close()
        assert peer.closed

    asyncio.run(scenario())
    assert not files_left(os.getpid())


def test_a_rank_that_does_not_answer_is_an_error_after_its_limit():
    async def scenario():
        *_, publisher = two_ranks(WeightsConfig(part_limit_s=0.1), ready=asyncio.Event())
        with pytest.raises(PublishError, match=r"rank 1 did not copy its part of version 1: no answer within 0.1 s"):
            await publisher.publish(1)
        await publisher.close()

    asyncio.run(scenario())


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_metrics_tell_size_density_and_what_was_published_and_pulled():
    async def scenario():
        trainer = Trainer({"w": torch.zeros(10_000, dtype=torch.bfloat16)})
        assert trainer.publisher.metrics() == {
            "weights/bytes": 0.0, "weights/bytes_published": 0.0, "weights/bytes_pulled": 0.0
        }  # fmt: skip
        await trainer.publisher.publish(1)
        first = trainer.publisher.metrics()
        assert first["weights/bytes"] == first["weights/bytes_published"] == 20_000.0
        assert "weights/delta_density" not in first
        trainer.tensors["w"][::100] = 1.0
        await trainer.publisher.publish(2)
        trainer.release("unknown", pulled_bytes=300)
        second = trainer.publisher.metrics()
        assert second["weights/bytes"] == 20_000.0
        assert second["weights/delta_density"] == pytest.approx(0.01)
        assert second["weights/bytes_published"] == 3 * 100  # a byte of gap and a word for each
        assert second["weights/bytes_pulled"] == 300.0
        assert trainer.publisher.metrics()["weights/bytes_pulled"] == 0.0
        await trainer.close()

    asyncio.run(scenario())


# ---- no room ---------------------------------------------------------------------------------------------------------


def test_without_room_for_a_delta_the_version_goes_whole(monkeypatch):
    class NoRoom:
        def __init__(self, *args, **kwargs):
            raise RegionError("no room")

    async def scenario():
        trainer, reader = Trainer({"w": torch.zeros(10_000, dtype=torch.bfloat16)}), SnapshotReader()
        await trainer.publisher.publish(1)
        await reader.pull(trainer.lease(0))
        monkeypatch.setattr(shards, "Region", NoRoom)
        trainer.tensors["w"][7] = 1.0
        await trainer.publisher.publish(2)
        ref = trainer.lease(1)
        assert ref.shards[0].delta is None
        assert torch.equal((await reader.pull(ref))["w"], trainer.tensors["w"])
        assert reader.last.nbytes == 20_000
        await trainer.close()

    asyncio.run(scenario())
