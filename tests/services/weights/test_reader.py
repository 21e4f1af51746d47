import asyncio
import os

import pytest
import torch
from plane_builders import FAST, Trainer, is_version, model
from torch.distributed.tensor import DTensor, Shard

from services.weights import reader as reader_module
from services.weights import region as region_module
from services.weights.config import WeightsConfig
from services.weights.reader import SnapshotReader, VersionGone, pull_newest
from services.weights.region import RegionError
from services.weights.snapshots import SnapshotPublisher


def bf16(count: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.bfloat16)


# ---- whole versions --------------------------------------------------------------------------------------------------


def test_a_read_torn_by_a_publish_is_never_taken_for_a_version(monkeypatch):
    # The reader stops in the middle of its copy while its slot is overwritten: half of version 1, half of version 3.
    async def scenario():
        trainer = Trainer()
        await trainer.publish(1)
        slow = trainer.lease(0)
        half = slow.shards[0].region.nbytes // 2

        async def torn_read(ref, out, *_):
            region_module._copy_from_file(*opened(ref), out[:half], 0, ref)
            await trainer.publish(2)
            await trainer.publish(3)
            region_module._copy_from_file(*opened(ref), out[half:], half, ref)
            return "shm"

        def opened(ref):
            return (region_module._open_local(ref)[0],)

        monkeypatch.setattr(reader_module, "read_region", torn_read)
        reader = SnapshotReader()
        with pytest.raises(VersionGone):
            await reader.pull(slow)
        monkeypatch.undo()
        assert is_version(await reader.pull(trainer.lease(0)), 3)
        await trainer.close()

    asyncio.run(scenario())


def test_a_reader_reuses_its_buffer():
    async def scenario():
        trainer, reader = Trainer(), SnapshotReader(FAST)
        places = set()
        for version in (1, 2, 3):
            await trainer.publish(version)
            ref = trainer.lease(0)
            places.add((await reader.pull(ref))["weight"].data_ptr())
            trainer.release(ref.lease_id)
        assert len(places) == 1
        await trainer.close()

    asyncio.run(scenario())


def test_the_published_type_is_cast_in_the_copy():
    async def scenario():
        tensors = {"w": torch.randn(100), "step": torch.tensor(3)}
        for config, computed, published in (
            (WeightsConfig(), None, torch.float32),
            (WeightsConfig(), torch.bfloat16, torch.bfloat16),
            (WeightsConfig(dtype="float32"), torch.bfloat16, torch.float32),
            (WeightsConfig(dtype="bfloat16"), None, torch.bfloat16),
        ):
            trainer = Trainer(tensors, config, dtype=computed)
            await trainer.publisher.publish(1)
            pulled = await SnapshotReader().pull(trainer.lease(0))
            assert torch.equal(pulled["w"], tensors["w"].to(published))
            assert (pulled["w"].dtype, pulled["step"].dtype) == (published, torch.int64)
            await trainer.close()

    asyncio.run(scenario())


def test_only_what_the_trainer_publishes_is_pulled_and_of_that_only_what_is_asked_for():
    async def scenario():
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        model[0].requires_grad_(False)
        trainer = Trainer({name: p for name, p in model.named_parameters() if p.requires_grad})
        await trainer.publisher.publish(1)
        ref = trainer.lease(0)
        assert set(await SnapshotReader().pull(ref)) == {"1.weight", "1.bias"}
        assert set(await SnapshotReader().pull(ref, names=["1.bias"])) == {"1.bias"}
        with pytest.raises(KeyError, match=r"version 1 has no \['0.weight'\]"):
            await SnapshotReader().pull(ref, names=["0.weight", "1.bias"])
        await trainer.close()

    asyncio.run(scenario())


def test_a_part_is_read_in_the_blocks_that_hold_it():
    async def scenario():
        tensors = {name: bf16(4096, i) for i, name in enumerate("abcdef")}  # 8 KB each
        trainer, reader = Trainer(tensors, block_bytes=4096), SnapshotReader()
        await trainer.publisher.publish(1)
        pulled = await reader.pull(trainer.lease(0), names={"b", "c", "f"})
        assert {name: float(t[0]) for name, t in pulled.items()} == {"b": 1.0, "c": 2.0, "f": 5.0}
        assert reader.last.nbytes == 3 * 8192
        everything = await reader.pull(trainer.lease(0))
        assert all(torch.equal(everything[name], tensors[name]) for name in tensors)
        assert reader.last.nbytes == 3 * 8192  # the rest
        await trainer.close()

    asyncio.run(scenario())


# ---- deltas ----------------------------------------------------------------------------------------------------------


async def followed(trainer, reader, version):
    """Publish what the trainer has, and pull it as who has the version before."""
    await trainer.publisher.publish(version)
    ref = trainer.lease(version - 1)
    pulled = await reader.pull(ref)
    trainer.release(ref.lease_id)
    return ref, pulled


def test_a_reader_that_keeps_up_fetches_only_what_changed():
    async def scenario():
        trainer, reader = Trainer({"w": bf16(100_000), "v": bf16(1000)}), SnapshotReader()
        await followed(trainer, reader, 1)
        assert reader.last.nbytes >= 202_000
        generator = torch.Generator().manual_seed(0)
        for version in range(2, 8):
            places = torch.randint(100_000, (500,), generator=generator)
            trainer.tensors["w"][places] = float(version)
            _, pulled = await followed(trainer, reader, version)
            assert all(torch.equal(pulled[name], trainer.tensors[name]) for name in ("w", "v"))
            assert reader.last.nbytes < 2500
        await trainer.close()

    asyncio.run(scenario())


def test_a_version_that_changed_much_goes_whole_and_one_that_did_not_change_not_at_all():
    async def scenario():
        trainer, reader = Trainer({"w": torch.zeros(10_000)}), SnapshotReader()
        await followed(trainer, reader, 1)
        trainer.tensors["w"] += 1.0
        ref, pulled = await followed(trainer, reader, 2)
        assert (ref.shards[0].delta, ref.shards[0].density, reader.last.nbytes) == (None, 1.0, 40_000)
        assert torch.equal(pulled["w"], trainer.tensors["w"])
        _, pulled = await followed(trainer, reader, 3)
        assert (reader.last.nbytes, reader.last.via) == (0, "")
        assert torch.equal(pulled["w"], trainer.tensors["w"])
        await trainer.close()

    asyncio.run(scenario())


def test_each_block_goes_as_is_shortest():
    async def scenario():
        trainer, reader = Trainer({"w": bf16(3 * 2048)}, block_bytes=4096), SnapshotReader()
        await followed(trainer, reader, 1)
        trainer.tensors["w"][:2048] = 1.0  # all of the first block, one word of the third
        trainer.tensors["w"][-1] = 1.0
        ref, pulled = await followed(trainer, reader, 2)
        assert [segment and segment.words for segment in ref.shards[0].delta.segments] == [None, 0, 1]
        assert torch.equal(pulled["w"], trainer.tensors["w"])
        assert reader.last.nbytes == 4096 + 2047 // 255 + 1 + 2
        await trainer.close()

    asyncio.run(scenario())


def test_late_joiners_and_readers_that_missed_a_version_get_the_whole():
    async def scenario():
        trainer, reader = Trainer({"w": bf16(10_000)}), SnapshotReader()
        await followed(trainer, reader, 1)
        for version in (2, 3):
            trainer.tensors["w"][version] = 1.0
            await trainer.publisher.publish(version)
        late = trainer.lease(1)
        assert late.shards[0].delta is None
        assert torch.equal((await reader.pull(late))["w"], trainer.tensors["w"])
        assert reader.last.nbytes == 20_000
        joining = SnapshotReader()
        assert torch.equal((await joining.pull(trainer.lease(2)))["w"], trainer.tensors["w"])
        assert joining.last.nbytes == 20_000
        await trainer.close()

    asyncio.run(scenario())


def test_a_delta_on_another_trainers_version_of_that_number_is_not_applied():
    async def scenario():
        before, reader = Trainer({"w": bf16(10_000, 5.0)}), SnapshotReader()
        await followed(before, reader, 1)
        after = Trainer({"w": bf16(10_000)})
        await after.publisher.publish(1)
        after.tensors["w"][3] = 1.0
        await after.publisher.publish(2)
        ref = after.lease(1)
        assert ref.shards[0].delta is not None
        assert torch.equal((await reader.pull(ref))["w"], after.tensors["w"])
        await before.close()
        await after.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("harm", ["gaps", "values", "gone"])
def test_a_delta_that_is_damaged_or_gone_is_made_up_for_by_the_whole(harm):
    async def scenario():
        trainer, reader = Trainer({"w": bf16(10_000)}), SnapshotReader()
        await followed(trainer, reader, 1)
        trainer.tensors["w"][100:110] = 1.0
        await trainer.publisher.publish(2)
        ref = trainer.lease(1)
        delta, whole = trainer.writer._slots[1].delta, ref.shards[0].region.nbytes
        if harm == "gone":
            delta.path.unlink()
        else:
            delta.tensor[2 if harm == "gaps" else 15] ^= 255
        assert torch.equal((await reader.pull(ref))["w"], trainer.tensors["w"])
        assert reader.last.nbytes >= whole
        await trainer.close()

    asyncio.run(scenario())


def test_a_delta_of_a_failed_publish_is_never_handed_out(monkeypatch):
    async def scenario():
        trainer, reader = Trainer({"w": bf16(10_000)}), SnapshotReader()
        await followed(trainer, reader, 1)
        trainer.tensors["w"][5] = 1.0
        await trainer.publisher.copy(2)  # never sealed
        trainer.tensors["w"][6] = 2.0
        await trainer.publisher.publish(3)
        ref = trainer.lease(1)
        assert ref.shards[0].delta.segments[0].words == 2  # since version 1, which is what readers have
        assert torch.equal((await reader.pull(ref))["w"], trainer.tensors["w"])
        assert reader.last.nbytes < 100
        await trainer.close()

    asyncio.run(scenario())


def test_without_deltas_everything_is_read_every_time():
    async def scenario():
        config = WeightsConfig(delta="off")
        trainer, reader = Trainer({"w": bf16(10_000)}, config), SnapshotReader(config)
        for version in (1, 2):
            ref, _ = await followed(trainer, reader, version)
            assert (ref.shards[0].delta, ref.shards[0].density, reader.last.nbytes) == (None, None, 20_000)
        await trainer.close()

    asyncio.run(scenario())


# ---- several ranks ---------------------------------------------------------------------------------------------------


class ShardedTrainer:
    """`ranks` ranks that hold the rows of each tensor as FSDP2 lays them out, and an optimizer that changes all."""

    def __init__(self, as_rank, ranks, shapes, config=FAST):
        self.shapes, self.ranks, self.trainers = shapes, ranks, []
        for rank in range(ranks):
            mesh, named = as_rank(rank, ranks), {}
            for name, shape in shapes.items():
                like = torch.empty(shape)
                rows = like.chunk(ranks)
                local = torch.zeros_like(rows[rank]) if rank < len(rows) else torch.zeros(0, *shape[1:])
                named[name] = DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
                )
            self.trainers.append(Trainer(named, config, rank=rank))
        self.publisher = SnapshotPublisher([trainer.writer for trainer in self.trainers], config)

    def train(self, whole):
        for name, values in whole.items():
            for rank, rows in enumerate(values.chunk(self.ranks)):
                self.trainers[rank].tensors[name].to_local().copy_(rows)


def test_shards_of_all_ranks_are_put_together_also_uneven_and_empty_ones(as_rank, files_left):
    # 2 rows on 3 ranks leave the third without any; a vector of 1 is on the first rank alone.
    shapes = {"even": (6, 4), "uneven": (7, 5), "few": (2, 3), "one": (1,)}

    async def scenario():
        trainer, reader = ShardedTrainer(as_rank, 3, shapes), SnapshotReader()
        for version in (1, 2, 3):
            whole = {name: torch.randn(shape) for name, shape in shapes.items()}
            trainer.train(whole)
            await trainer.publisher.publish(version)
            ref = trainer.publisher.lease(version - 1)
            pulled = await reader.pull(ref)
            assert {name: torch.equal(pulled[name], whole[name]) for name in shapes} == dict.fromkeys(shapes, True)
            part = await reader.pull(ref, names={"uneven"})
            assert torch.equal(part.pop("uneven"), whole["uneven"])
            assert not part
            trainer.publisher.release(ref.lease_id)
        assert len(ref.shards) == 3
        await trainer.publisher.close()

    asyncio.run(scenario())
    assert not files_left(os.getpid())


def test_each_rank_sends_what_changed_in_its_own_rows(as_rank):
    async def scenario():
        trainer, reader = ShardedTrainer(as_rank, 2, {"w": (100, 100)}), SnapshotReader()
        whole = torch.randn(100, 100)
        for version, (row, column) in enumerate([(0, 0), (3, 7), (99, 50)], start=1):
            whole[row, column] = 9.0
            trainer.train({"w": whole})
            await trainer.publisher.publish(version)
            pulled = await reader.pull(trainer.publisher.lease(version - 1))
            assert torch.equal(pulled["w"], whole)
            assert reader.last.nbytes == 40_000 if version == 1 else reader.last.nbytes < 60
        await trainer.publisher.close()

    asyncio.run(scenario())


def test_a_publisher_without_all_ranks_is_refused(as_rank):
    async def scenario():
        trainer = ShardedTrainer(as_rank, 2, {"w": (4, 4)})
        alone = SnapshotPublisher([trainer.trainers[0].writer])
        with pytest.raises(ValueError, match=r"the parts of 1 ranks do not make whole tensors: w \(8 of 16 elements\)"):
            await alone.publish(1)
        assert alone.version is None
        await trainer.publisher.close()

    asyncio.run(scenario())


# ---- lease, pull, release --------------------------------------------------------------------------------------------


def test_pull_newest_takes_a_newer_lease_when_its_version_is_gone():
    async def scenario():
        trainer, reader = Trainer(model(1)), SnapshotReader(FAST)
        await trainer.publish(1)
        leased, released = [], []

        async def lease(newer_than):
            ref = trainer.lease(newer_than)
            leased.append(ref)
            if ref is not None and len(leased) == 1:  # this reader is slow once
                await trainer.publish(2)
                await trainer.publish(3)
            return ref

        async def release(lease_id):
            released.append(lease_id)
            trainer.release(lease_id)

        version, tensors = await pull_newest(reader, lease, release, newer_than=0)
        assert version == 3
        assert is_version(tensors, 3)
        assert released == [ref.lease_id for ref in leased]
        assert await pull_newest(reader, lease, release, newer_than=3) is None
        await trainer.close()

    asyncio.run(scenario())


def test_pull_newest_gives_up_after_its_attempts_and_survives_a_release_that_fails():
    async def scenario():
        trainer, reader = Trainer(), SnapshotReader(FAST)
        await trainer.publish(1)
        leases = []

        async def lease(newer_than):
            ref = trainer.lease(newer_than)
            ref.shards[0].region.shm_path = "/dev/shm/not-there"
            leases.append(ref)
            return ref

        async def release(lease_id):
            raise ConnectionError("the trainer is dead")

        with pytest.raises(RegionError, match="not-there"):
            await pull_newest(reader, lease, release, newer_than=0)
        assert len(leases) == FAST.attempts
        await trainer.close()

    asyncio.run(scenario())
