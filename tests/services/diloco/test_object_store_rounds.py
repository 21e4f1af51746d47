"""Averaging over files: exact, bit-equal, with a membership that is fixed once, and with replicas that do not come."""

from __future__ import annotations

import json
import pickle
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from services.diloco.object_store import LeftBehindError, MalformedFileError, ObjectStoreAllReduce

LIMIT_S = 120.0  # of anything that a test waits for; nothing is judged by it


class Plain(MemoryFileSystem):
    """A store without a conditional put."""

    protocol = "plain"
    store: dict = {}  # noqa: RUF012  as its base class has it
    pseudo_dirs = [""]  # noqa: RUF012


fsspec.register_implementation("plain", Plain)


@pytest.fixture(params=["local", "memory", "plain"])
def uri(request, tmp_path):
    return str(tmp_path / "store") if request.param == "local" else f"{request.param}://{uuid.uuid4().hex}/store"


def make(uri, rank, world_size, **options) -> ObjectStoreAllReduce:
    return ObjectStoreAllReduce(
        uri, rank, world_size, **{"poll_s": 0.01, "timeout_s": LIMIT_S, "grace_s": 0.1, "first_grace_s": 60, **options}
    )


def together(*calls):
    """Results of calls that run at the same time."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
        return [future.result(timeout=LIMIT_S) for future in futures]


def values(rank: int, round_number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + round_number)
    return [torch.randn(50, generator=generator), torch.randn(3, 4, generator=generator)]


def folder(tmp_path, number: int):
    return tmp_path / "store" / f"round-{number:08d}"


@pytest.mark.parametrize("world_size", [2, 3])
def test_rounds_equal_the_weighted_average_and_are_equal_bit_by_bit(uri, world_size):
    def replica(rank):
        reduce, results = make(uri, rank, world_size), []
        for number in range(4):
            tensors = values(rank, number)
            members = reduce.average(tensors, weight=100.0 * rank + number)
            results.append((members, tensors))
        assert reduce.rounds == 4
        return results

    results = together(*(lambda rank=rank: replica(rank) for rank in range(world_size)))
    for number in range(4):
        weights = [100.0 * rank + number for rank in range(world_size)]
        for index in range(2):
            parts = [values(rank, number)[index].double().numpy() for rank in range(world_size)]
            expected = sum(w * part for w, part in zip(weights, parts, strict=True)) / sum(weights)
            for result in results:
                members, tensors = result[number]
                assert members == list(range(world_size))
                np.testing.assert_allclose(tensors[index].numpy(), expected, atol=1e-6)
                assert torch.equal(tensors[index], results[0][number][1][index])


def test_weights_that_are_all_zero_make_a_plain_mean(uri):
    tensors = [[torch.tensor([1.0])], [torch.tensor([4.0])]]
    together(*(lambda r=r: make(uri, r, 2).average(tensors[r], weight=0.0) for r in range(2)))
    assert tensors[0][0].item() == tensors[1][0].item() == 2.5


def test_a_view_of_a_large_tensor_sends_only_what_it_shows(tmp_path):
    flat = torch.arange(1_000_000, dtype=torch.float32)
    mine, other = [flat[10:20]], [torch.zeros(10)]
    together(
        lambda: make(str(tmp_path / "store"), 0, 2).average(mine),
        lambda: make(str(tmp_path / "store"), 1, 2).average(other),
    )
    assert flat[10:20].tolist() == [value / 2 for value in range(10, 20)]
    assert max(path.stat().st_size for path in folder(tmp_path, 1).iterdir()) < 10_000


def test_a_world_of_one_passes_values_through_and_writes_nothing(tmp_path):
    reduce = ObjectStoreAllReduce(str(tmp_path / "store"), 0, 1)
    tensors = [torch.tensor([1.0, 2.0])]
    assert reduce.average(tensors, weight=7.0) == [0]
    assert tensors[0].tolist() == [1.0, 2.0]
    assert reduce.rounds == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_out_of_range_is_refused(tmp_path, rank):
    with pytest.raises(ValueError, match=f"rank {rank} is not among 3 replicas"):
        make(str(tmp_path), rank, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_replicas": 4}, "min_replicas 4 of 3"),
        ({"keep_rounds": 1}, "keep at least 2"),
        ({"min_replicas": 1, "first_grace_s": 700.0, "timeout_s": 600.0}, "before the grace of 700 s is over"),
    ],
)
def test_contradictory_numbers_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make(str(tmp_path), 0, 3, **options)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused(tmp_path, weight):
    with pytest.raises(ValueError, match="weight"):
        make(str(tmp_path), 0, 2).average([torch.ones(1)], weight=weight)


def test_a_tensor_of_integers_is_refused(tmp_path):
    with pytest.raises(TypeError, match="floating-point"):
        make(str(tmp_path), 0, 2).average([torch.ones(1, dtype=torch.int64)])


def test_a_peer_that_never_comes_is_a_time_out_that_names_it(uri):
    with pytest.raises(TimeoutError, match=r"of 4 replicas 1, 3 did not come") as caught:
        together(*(lambda r=r: make(uri, r, 4, timeout_s=0.5).average([torch.ones(1)]) for r in (0, 2)))
    assert uri in str(caught.value)
    assert "min_replicas" in str(caught.value)


def test_a_round_goes_on_without_a_peer_once_the_grace_is_over(uri):
    def replica(rank):
        tensors = [torch.full((2,), float(rank))]
        return make(uri, rank, 3, min_replicas=2, first_grace_s=0.3).average(tensors), tensors[0].tolist()

    assert together(lambda: replica(0), lambda: replica(2)) == [([0, 2], [1.0, 1.0])] * 2


def test_a_peer_within_the_grace_is_waited_for(tmp_path):
    uri, entered = str(tmp_path / "store"), threading.Event()
    first = make(uri, 0, 2, min_replicas=1)
    pause = first.pause
    first.pause = lambda: (entered.set(), pause())[1]

    def late():
        assert entered.wait(LIMIT_S)
        return make(uri, 1, 2, min_replicas=1).average([torch.ones(1)])

    assert together(lambda: first.average([torch.ones(1)]), late) == [[0, 1], [0, 1]]


def test_fewer_than_min_replicas_do_not_go_on(uri):
    with pytest.raises(TimeoutError, match="it takes 2"):
        make(uri, 0, 3, min_replicas=2, grace_s=0.01, first_grace_s=0.01, timeout_s=0.5).average([torch.ones(1)])


def test_who_comes_after_the_grace_takes_the_average_without_being_in_it(uri):
    early, late = make(uri, 0, 2, min_replicas=1, first_grace_s=0.05), make(uri, 1, 2, min_replicas=1)
    first, second = [torch.tensor([3.0])], [torch.tensor([100.0])]
    assert early.average(first) == [0]
    result = late.collect(second)
    assert result.members == [0]
    assert not result.counted
    assert result.tensors[0].item() == first[0].item() == 3.0


def test_who_missed_a_round_is_not_waited_for_in_the_next(tmp_path):
    """A death costs one grace window: the second round would otherwise never end here."""
    uri = str(tmp_path / "store")
    pair = [make(uri, r, 3, min_replicas=1, first_grace_s=0.2, grace_s=100.0) for r in range(2)]

    def replica(reduce):
        return [reduce.average([torch.ones(1)]) for _ in range(5)]

    assert together(*(lambda r=r: replica(r) for r in pair)) == [[[0, 1]] * 5] * 2


def test_membership_raced_by_many_is_one_for_all(uri):
    """All propose at once, each having seen another part of the contributions."""
    world = 8

    def replica(rank):
        tensors = [torch.full((3,), float(2**rank))]
        reduce = make(uri, rank, world, min_replicas=1, first_grace_s=1e-9, poll_s=0.001)
        result = reduce.collect(tensors)
        return tuple(result.members), tuple(result.tensors[0].tolist())

    outcomes = set(together(*(lambda r=r: replica(r) for r in range(world))))
    assert len(outcomes) == 1
    members, averaged = outcomes.pop()
    assert averaged[0] == pytest.approx(sum(2**rank for rank in members) / len(members))


def test_a_truncated_contribution_counts_as_absent(tmp_path, caplog):
    uri = str(tmp_path / "store")
    folder(tmp_path, 1).mkdir(parents=True)
    broken = folder(tmp_path, 1) / f"contribution-0001-{1:020d}-00000000.pt"
    torch.save({"weight": 1.0, "tensors": [torch.ones(1000)]}, broken)
    broken.write_bytes(broken.read_bytes()[:1000])
    tensors = [torch.zeros(1000)]
    assert make(uri, 0, 2, min_replicas=1, first_grace_s=0.05).average(tensors) == [0]
    assert "replica 1" in caplog.text
    assert broken.name in caplog.text


def test_a_broken_contribution_gives_way_to_a_whole_one_of_the_same_replica(tmp_path):
    uri = str(tmp_path / "store")
    folder(tmp_path, 1).mkdir(parents=True)
    (folder(tmp_path, 1) / f"contribution-0001-{2**63:020d}-00000000.pt").write_bytes(b"half")
    first, second = [torch.tensor([1.0])], [torch.tensor([3.0])]
    together(lambda: make(uri, 0, 2).average(first), lambda: make(uri, 1, 2).average(second))
    assert first[0].item() == second[0].item() == 2.0


class Bomb:
    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, protocol=2))])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, caplog, write):
    folder(tmp_path, 1).mkdir(parents=True)
    evil, mark = folder(tmp_path, 1) / f"contribution-0001-{1:020d}-00000000.pt", tmp_path / "ran"
    write({"weight": 1.0, "tensors": [Bomb(mark)]}, evil)
    assert make(str(tmp_path / "store"), 0, 2, min_replicas=1, first_grace_s=0.05).average([torch.zeros(1)]) == [0]
    assert "replica 1" in caplog.text
    assert not mark.exists()
    torch.load(evil, weights_only=False) if write is torch.save else pickle.loads(evil.read_bytes())
    assert mark.exists()  # so it was armed


def test_a_member_whose_file_broke_afterwards_is_one_error_that_names_it(tmp_path):
    folder(tmp_path, 1).mkdir(parents=True)
    name = f"contribution-0001-{1:020d}-00000000.pt"
    (folder(tmp_path, 1) / name).write_bytes(b"half")
    (folder(tmp_path, 1) / "MEMBERS").write_text(json.dumps({"members": {"1": name}}))
    with pytest.raises(MalformedFileError, match=rf"replica 1: .*{name}"):
        make(str(tmp_path / "store"), 0, 2).average([torch.zeros(1)])


@pytest.mark.parametrize(
    "content",
    ['{"members": {"1": "../../secret.pt"}}', '{"members": {}}', "[1]", '{"members": {"0": 3}}', "no json"],
)
def test_members_that_no_replica_wrote_are_refused(tmp_path, content):
    folder(tmp_path, 1).mkdir(parents=True)
    (folder(tmp_path, 1) / "MEMBERS").write_text(content)
    with pytest.raises(MalformedFileError, match="another program wrote it"):
        make(str(tmp_path / "store"), 0, 2).average([torch.zeros(1)])


def test_replicas_of_different_models_are_told_so(tmp_path):
    uri = str(tmp_path / "store")
    with pytest.raises(RuntimeError, match="the same model"):
        together(lambda: make(uri, 0, 2).average([torch.zeros(1)]), lambda: make(uri, 1, 2).average([torch.zeros(2)]))


def test_old_rounds_are_deleted_and_the_last_ones_kept(uri):
    reduces = [make(uri, r, 2, keep_rounds=3) for r in range(2)]
    for _ in range(7):
        together(*(lambda r=r: r.average([torch.ones(1)]) for r in reduces))
    store = reduces[0].folders.store
    assert store.names() == [f"round-{number:08d}" for number in (5, 6, 7)]
    assert [name for number in (5, 6, 7) for name in store.names(f"round-{number:08d}") if name.endswith("aside")] == []


def test_who_sleeps_through_its_round_and_the_deletion_of_it_makes_no_round_of_its_own(uri):
    """It would find an empty folder and become the only member of a second round of that number."""
    fast, slow = make(uri, 0, 2, min_replicas=1, first_grace_s=0.02), make(uri, 1, 2, min_replicas=1, grace_s=0.02)
    for _ in range(6):
        fast.average([torch.ones(1)])
    slow.first_grace_s = 0.02
    with pytest.raises(LeftBehindError, match="round 1 "):
        slow.average([torch.zeros(1)])
    assert slow.rounds == 0


def test_who_sleeps_after_its_contribution_until_that_is_deleted_learns_it(uri):
    fast, slow = make(uri, 0, 2, min_replicas=1), make(uri, 1, 2, min_replicas=2, first_grace_s=60)
    fast.rounds, pause = 1, slow.pause

    def sleep():
        """It is alone in round 1 when it falls asleep, and the others are five rounds on when it wakes."""
        slow.folders.store.remove("round-00000001")
        fast.first_grace_s, slow.pause = 0.02, pause
        for _ in range(5):
            fast.average([torch.ones(1)])

    slow.pause = sleep
    with pytest.raises(LeftBehindError, match="round 1 "):
        slow.average([torch.zeros(1)])


def test_leaving_ends_the_wait(tmp_path):
    reduce = make(str(tmp_path), 0, 2)
    threading.Timer(0.2, reduce.close).start()
    with pytest.raises(RuntimeError, match="left"):
        reduce.average([torch.ones(1)])
