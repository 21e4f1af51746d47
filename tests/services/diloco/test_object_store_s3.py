"""The same over S3's protocol: s3fs against a server on this machine (moto), which keeps the condition of a put.

    pip install -e '.[object-store-test]'

moto checks and writes in two steps, so what is raced here is only what all put alike.
"""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from object_store_replica import Replica

from services.diloco.config import DilocoConfig
from services.diloco.object_store import ObjectStoreAllReduce, ObjectStoreManager
from services.diloco.object_store_files import Store

REASON = "needs s3fs and moto: pip install -e '.[object-store-test]'"
s3fs = pytest.importorskip("s3fs", reason=REASON)
moto_server = pytest.importorskip("moto.server", reason=REASON)

LIMIT_S = 300.0


@pytest.fixture(scope="module")
def bucket():
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("replicas")
        yield "s3://replicas"
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def uri(bucket):
    return f"{bucket}/{uuid.uuid4().hex}"


def together(*calls):
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
        return [future.result(timeout=LIMIT_S) for future in futures]


def test_the_stores_own_condition_decides_who_was_first(uri):
    first, second = Store(uri, 0, 2), Store(uri, 1, 2)
    assert first.put_if_absent("a/M", b'"first"') == b'"first"'
    assert second.put_if_absent("a/M", b'"second"') == b'"first"'
    assert first.names("a") == ["M"]  # no ballots
    assert first.names() == ["a"]


def test_values_come_back_and_what_is_deleted_is_absent(uri):
    store = Store(uri, 0, 2)
    store.save("a/b.pt", {"tensor": torch.arange(5.0)})
    assert store.load("a/b.pt")["tensor"].tolist() == [0, 1, 2, 3, 4]
    store.remove("a")
    assert store.read("a/b.pt") is None
    assert store.names("a") == []


def test_averages_are_equal_and_old_rounds_deleted(uri):
    def replica(rank):
        reduce = ObjectStoreAllReduce(uri, rank, 2, poll_s=0.02, timeout_s=LIMIT_S, keep_rounds=2)
        tensors = [torch.full((1000,), 1.0 + 2 * rank)]
        members = [reduce.average(tensors, weight=1.0) for _ in range(4)]
        return members, tensors[0].tolist()

    assert together(lambda: replica(0), lambda: replica(1)) == [([[0, 1]] * 4, [2.0] * 1000)] * 2
    assert Store(uri, 0, 2).names() == ["round-00000003", "round-00000004"]


def test_a_late_replica_heals_and_equals_its_peer(uri):
    config = DilocoConfig(uri=uri, poll_s=0.02, grace_s=1.0, first_grace_s=1.0, give_up_s=LIMIT_S)

    def run(replica, steps):
        end = replica.step + steps
        for _ in replica.train(lambda: replica.step >= end):
            pass

    first = Replica(ObjectStoreManager(config, 0, 2), 0)
    run(first, 8)
    second = Replica(ObjectStoreManager(config, 1, 2), 1)
    for replica in (first, second):
        replica.manager._rounds.grace_s = LIMIT_S / 2  # from now on they wait for each other
    mark, looks = second.manager._rounds.pause, []

    def wait():
        looks.append(1)
        if len(looks) == 1:
            peer.submit(run, first, 4)
        mark()

    second.manager._rounds.pause = wait
    with ThreadPoolExecutor(1) as peer:
        run(second, 4)
    assert second.digest() == first.digest()
    assert second.manager.current_step() == first.manager.current_step() == 3
    together(lambda: run(first, 4), lambda: run(second, 4))
    assert second.digest() == first.digest()
    assert first.manager.num_participants() == 2


def test_a_bucket_that_is_not_there_is_one_sentence(bucket):
    with pytest.raises(OSError, match=r"s3://no-such-bucket/x cannot be written .*diloco.uri"):
        Store("s3://no-such-bucket/x", 0, 2)
