"""The torchstore side of the plane with a store that is stood in for; the real one: test_weights_between_procs."""

import asyncio
import os
import subprocess
import sys

import pytest
import torch
from plane_builders import is_version, model

from mesh.messages import WeightsRef
from services.weights import plane, torchstore_adapter, torchstore_plane
from services.weights.config import WeightsConfig
from services.weights.reader import SnapshotReader, VersionGone
from services.weights.region import RegionError
from services.weights.snapshots import PublishError, SnapshotPublisher

CONFIG = WeightsConfig(transport="torchstore", max_lease_s=0.3)


class Store:
    """Keeps parts by key. `fail_at` makes the put of that key fail once."""

    def __init__(self):
        self.parts, self.most, self.fail_at, self.order = {}, 0, None, []

    async def connect(self, controller, rank=None, limit_s=60.0):
        return self

    async def put(self, key, box, limit_s):
        await asyncio.sleep(0)
        if key == self.fail_at:
            self.fail_at = None
            raise RegionError("the volume is full")
        self.parts[key] = box.tensor
        self.most = max(self.most, len(self.versions()))

    async def get(self, key, into, limit_s):
        await asyncio.sleep(0)
        if key not in self.parts:
            raise torchstore_adapter.KeyGone(key)
        return self.parts[key] if into is None else into.copy_(self.parts[key])

    async def delete(self, key, limit_s):
        if key not in self.parts:
            raise torchstore_adapter.KeyGone(key)
        del self.parts[key]

    def versions(self):
        return sorted({int(key.partition("/")[0]) for key in self.parts})


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(torchstore_plane, "StoreClient", store)
    return store


class Trainer:
    def __init__(self, store, config=CONFIG):
        self.tensors = model(0)
        self.writer = torchstore_plane.StoreWriter(lambda: self.tensors, config, store)
        self.publisher = SnapshotPublisher([self.writer], config, store)

    async def publish(self, version):
        for name, values in model(version).items():
            self.tensors[name].copy_(values)
        await self.publisher.publish(version)


def test_a_version_is_what_the_parameters_were_when_they_were_copied(store):
    async def scenario():
        trainer, reader = Trainer(store), torchstore_plane.StoreReader(CONFIG)
        await trainer.publish(1)
        trainer.tensors["weight"].fill_(9.0)
        assert is_version(await reader.pull(trainer.publisher.lease(0)), 1)
        assert reader.last.via == "torchstore"
        assert reader.last.nbytes == sum(t.numel() * t.element_size() for t in model(1).values())

    asyncio.run(scenario())


def test_at_most_so_many_versions_are_kept_and_one_with_a_reader_is(store):
    async def scenario():
        trainer, reader = Trainer(store), torchstore_plane.StoreReader(CONFIG)
        for version in (1, 2, 3, 4):
            await trainer.publish(version)
        assert (store.versions(), store.most) == ([3, 4], 2)
        leased = trainer.publisher.lease(0)
        await trainer.publish(5)
        assert store.versions() == [4, 5]
        sixth = asyncio.create_task(trainer.publish(6))  # waits for the reader of version 4
        await asyncio.sleep(0.05)
        assert is_version(await reader.pull(leased), 4)
        trainer.publisher.release(leased.lease_id)
        await asyncio.wait_for(sixth, 10)
        assert store.versions() == [5, 6]
        with pytest.raises(VersionGone, match="version 4 was deleted"):
            await reader.pull(leased)
        await trainer.publisher.close()
        assert store.parts == {}

    asyncio.run(scenario())


def test_a_put_that_fails_leaves_the_old_version_and_its_rest_is_cleared(store):
    async def scenario():
        trainer, reader = Trainer(store), torchstore_plane.StoreReader(CONFIG)
        await trainer.publish(1)
        store.fail_at = "2/scalar"
        with pytest.raises(PublishError, match="rank 0 did not seal its part of version 2: the volume is full"):
            await trainer.publish(2)
        assert trainer.publisher.version == 1
        assert is_version(await reader.pull(trainer.publisher.lease(0)), 1)
        await trainer.publish(3)
        assert store.versions() == [1, 3]
        assert is_version(await reader.pull(trainer.publisher.lease(1)), 3)

    asyncio.run(scenario())


def test_only_the_names_that_are_wanted_are_fetched_and_tensors_of_the_reader_are_filled(store):
    async def scenario():
        trainer, reader = Trainer(store), torchstore_plane.StoreReader(CONFIG)
        await trainer.publish(1)
        ref = trainer.publisher.lease(0)
        mine = torch.zeros(7)
        pulled = await reader.pull(ref, names={"half", "empty"}, into={"half": mine})
        assert pulled["half"] is mine
        assert mine.tolist() == [1.0] * 7  # in the reader's type
        assert pulled["empty"].shape == (0, 5)
        assert set(pulled) == {"half", "empty"}
        with pytest.raises(KeyError, match="version 1 has no"):
            await reader.pull(ref, names={"other"})

    asyncio.run(scenario())


def test_both_sides_must_name_the_same_transport(store):
    async def scenario():
        trainer = Trainer(store)
        await trainer.publish(1)
        with pytest.raises(RegionError, match='needs transport = "torchstore"'):
            await SnapshotReader().pull(trainer.publisher.lease(0))
        with pytest.raises(RegionError, match=r'weights\.transport = "rdma"'):
            await torchstore_plane.StoreReader(CONFIG).pull(WeightsRef(1, []))

    asyncio.run(scenario())


def test_without_the_package_or_an_actor_it_is_refused_with_what_to_do(monkeypatch):
    with pytest.raises(RegionError, match="trainer's actor"):
        torchstore_plane.spawn_store()
    monkeypatch.setattr(plane, "version", lambda package: "0.2.0")
    with pytest.raises(RuntimeError, match=r"installed: 0.2.0.*pip install --no-deps torchstore==0.1.2"):
        plane.new_reader(CONFIG)


def test_importing_it_leaves_logging_and_environment_alone():
    code = (
        "import logging, os; import services.weights.torchstore_adapter; import torchstore; "
        "print(logging.root.level, logging.root.handlers, 'HYPERACTOR_CODEC_MAX_FRAME_LENGTH' in os.environ)"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHSTORE", "HYPERACTOR"))}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, env=env)
    assert ran.stdout.strip() == "30 [] False"


def test_settings_that_contradict_each_other_are_refused_with_the_fix():
    assert CONFIG.delta == "off"
    assert WeightsConfig.model_validate(CONFIG.model_dump()) == CONFIG
    for others, fix in (({"delta": "auto"}, "remove weights.delta"), ({"via": "shm"}, "remove weights.via")):
        with pytest.raises(ValueError, match=fix):
            WeightsConfig(transport="torchstore", **others)
