"""Snapshots and logits between real procs: through shared memory, and through Monarch RDMA (TCP without hardware)."""

import os
import signal
import threading
import time

import pytest
from weights_actors import Owner, Reader

from services.weights.region import sweep_dead_regions

LIMIT = 60


@pytest.fixture(scope="module")
def spawn(host):
    """Spawns an actor on a proc of its own."""
    procs = []

    def one(name, cls, *args):
        proc = host.spawn_procs(per_host={"gpus": 1})
        procs.append(proc)
        return proc.spawn(name, cls, *args)

    yield one
    for stopping in [proc.stop() for proc in procs]:
        stopping.get(timeout=LIMIT)


@pytest.fixture(scope="module")
def reader(spawn):
    return spawn("reader", Reader)


@pytest.fixture(scope="module")
def owner(owner_by):
    return owner_by["rdma"]


@pytest.fixture(scope="module")
def owner_by(host):
    """By the way that readers go."""
    proc = host.spawn_procs(per_host={"gpus": 1})
    owner, store_owner = proc.spawn("owner", Owner), proc.spawn("store_owner", Owner, "torchstore")
    yield {"shm": owner, "rdma": owner, "torchstore": store_owner}
    for each in (owner, store_owner):
        each.close.call_one().get(timeout=LIMIT)
    proc.stop().get(timeout=LIMIT)


def ask(endpoint, *args):
    return endpoint.call_one(*args).get(timeout=LIMIT)


@pytest.mark.parametrize("via", ["shm", "rdma", "torchstore"])
def test_a_published_version_is_pulled_exactly(owner_by, reader, via):
    owner, version = owner_by[via], {"shm": 11, "rdma": 12, "torchstore": 11}[via]
    ask(owner.publish, version)
    ref = ask(owner.weights, 0)
    assert ref.version == version
    assert ask(reader.pull, ref, via) == (via, True)
    assert ask(owner.weights, version) is None
    ask(owner.release_weights, ref.lease_id)


def test_the_same_host_goes_through_shared_memory_by_itself(owner, reader):
    ask(owner.publish, 13)
    ref = ask(owner.weights, 0)
    assert ask(reader.pull, ref, "auto") == ("shm", True)
    ask(owner.release_weights, ref.lease_id)


@pytest.mark.parametrize("via", ["shm", "rdma"])
def test_a_reader_that_keeps_up_fetches_only_what_changed(owner, reader, via):
    since = {"shm": 20, "rdma": 30}[via]
    ask(owner.publish, since)
    for version in (since, since + 1, since + 2):
        if version > since:
            ask(owner.nudge, version)
        ref = ask(owner.weights, version - 1)
        exact, nbytes = ask(reader.pull_nudged, ref, via, since)
        assert exact
        assert (nbytes < 100) == (version > since)
        ask(owner.release_weights, ref.lease_id)


def test_any_part_of_a_region_can_be_read_over_rdma(owner, reader):
    ref = ask(owner.make_region, 100_000, 16_384)
    assert [block.size() for block in ref.rdma] == [16_384] * 6 + [1_696]
    parts = [(0, 100_000), (16_384, 16_384), (1, 1), (16_383, 2), (99_999, 1), (5_000, 90_000)]
    assert all(ask(reader.read_parts, ref, "rdma", parts))


def test_logits_arrive_in_chunks_and_are_gone_after_release(owner, reader):
    # A block holds 20 rows of this vocabulary: chunks of 8 are parts of one or two.
    ref = ask(owner.put_logits, 45, 50_000)
    chunks, right = ask(reader.logits, ref, 8, "rdma")
    assert right
    assert chunks == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 8), (40, 5)]
    assert ask(reader.logits, ref, 30, "shm")[1]
    ask(owner.release_logits, ref.id)
    for via in ("rdma", "shm"):
        assert ask(reader.try_logits, ref, via) == "LogitsGone"


@pytest.mark.parametrize("via", ["rdma", "torchstore"])
def test_an_overwritten_version_is_gone_on_every_transport(owner_by, reader, via):
    owner, base = owner_by[via], 100
    ask(owner.publish, base)
    ref = ask(owner.weights, 0)
    ask(owner.publish, base + 1)
    assert ask(reader.pull, ref, via) == (via, True)  # leased, and so still there
    ask(owner.release_weights, ref.lease_id)
    ask(owner.publish, base + 2)
    kind, text, _ = ask(reader.try_pull, ref, via, 5.0)
    assert kind == "VersionGone"
    assert "version 100" in text


@pytest.mark.parametrize("via", ["shm", "rdma", "torchstore"])
def test_readers_beside_a_publishing_trainer_get_whole_versions_or_none(owner_by, reader, via):
    # Leases are given back before the pull, so that the trainer may overwrite what is being read.
    owner, first = owner_by[via], {"shm": 1000, "rdma": 2000, "torchstore": 1000}[via]
    stop = threading.Event()

    def train():
        for version in range(first, first + 200):
            if stop.is_set():
                return
            ask(owner.publish, version)

    ask(owner.publish, first - 1)
    trainer = threading.Thread(target=train)
    trainer.start()
    pulls = []
    for _ in range(15):
        ref = ask(owner.weights, 0)
        ask(owner.release_weights, ref.lease_id)
        pulls.append(ask(reader.pull_or_gone, ref, via))
    stop.set()
    trainer.join(LIMIT)
    ref = ask(owner.weights, 0)
    pulls.append(ask(reader.pull_or_gone, ref, via))
    ask(owner.release_weights, ref.lease_id)
    assert set(pulls) <= {"whole", "gone"}
    assert pulls[-1] == "whole"


@pytest.mark.parametrize("via", ["shm", "rdma"])
def test_a_reader_that_is_stopped_in_the_middle_gets_its_version_or_an_error(spawn, reader, via):
    trainer = spawn(f"trainer_{via}", Owner)
    numel = 4 << 20
    ask(trainer.publish, 1, numel, 0.2)
    ref = ask(trainer.weights, 0)
    pid = ask(reader.pid)
    pulling = reader.try_pull.call_one(ref, via, 5.0)
    time.sleep(0.005)
    os.kill(pid, signal.SIGSTOP)
    try:
        ask(trainer.publish, 2, numel)
        ask(trainer.publish, 3, numel)  # waits for the lease of the stopped reader, then overwrites what it reads
    finally:
        os.kill(pid, signal.SIGCONT)
    assert pulling.get(timeout=LIMIT)[0] in ("", "VersionGone")
    assert ask(reader.pull, ask(trainer.weights, 0), via) == (via, True)
    ask(trainer.close)


@pytest.mark.parametrize("via", ["rdma", "torchstore"])
def test_an_owner_killed_during_a_read_is_an_error_within_seconds(spawn, reader, files_left, via):
    victim = spawn(f"victim_{via}", Owner, via)
    ask(victim.publish, 1, 4 << 20)
    ref = ask(victim.weights, 0)
    pid = ask(victim.pid)
    os.kill(pid, signal.SIGSTOP)  # the read begins and cannot end
    reading = reader.try_pull.call_one(ref, via, 3.0)
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    kind, text, seconds = reading.get(timeout=LIMIT)
    assert kind == "RegionError"
    assert {"rdma": "RDMA read from", "torchstore": "the controller of the store"}[via] in text
    assert seconds < 10
    sweep_dead_regions()
    assert not files_left(pid)
    assert ask(reader.try_pull, ref, {"rdma": "auto"}.get(via, via), 1.0)[0] == "RegionError"


def test_a_closed_owner_leaves_no_file(spawn, files_left):
    closing = spawn("closing", Owner)
    ask(closing.publish, 1)
    ask(closing.put_logits, 10, 100)
    pid = ask(closing.pid)
    assert len(files_left(pid)) == 3
    ask(closing.close)
    assert not files_left(pid)


@pytest.fixture(scope="module")
def two_procs(host):
    procs = host.spawn_procs(per_host={"gpus": 2})
    yield procs
    procs.stop().get(timeout=LIMIT)


@pytest.mark.parametrize("way", ["rdma", "torchstore"])
def test_ranks_publish_their_rows_and_readers_get_whole_tensors(two_procs, reader, way):
    ranks = two_procs.spawn(f"ranks_{way}", Owner, way)
    leader = ranks.slice(gpus=0)
    ask(leader.lead, ranks, 2)
    for version in (1, 2, 3):
        ranks.train.call(version).get(timeout=LIMIT)
        ask(leader.publish_replica, version)
        ref = ask(leader.weights, version - 1)
        assert (ref.version, len(ref.shards)) == (version, 2)
        assert ask(reader.pull_rows, ref, way) == []
        if way == "torchstore" and version == 3:  # another layout: columns over three ranks
            assert [ask(reader.pull_columns, ref, rank, 3) for rank in range(3)] == [[], [], []]
        ask(leader.release_weights, ref.lease_id)
    ask(leader.close)
