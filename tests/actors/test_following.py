"""Who follows whom where there are several trainers, and whose checkpoint a trainer begins from."""

import json

import pytest

from actors.following import buffer_of, followed, number_in
from actors.replicas import checkpoints_of, newest_checkpoint


def test_each_follower_has_a_trainer_of_its_own_and_returns_to_it():
    everybody = ["trainer-0", "trainer-1", "trainer-2"]
    assert [followed(n, 3, everybody) for n in range(5)] == [
        "trainer-0", "trainer-1", "trainer-2", "trainer-0", "trainer-1",
    ]  # fmt: skip
    assert followed(1, 3, ["trainer-0", "trainer-2"]) in ("trainer-0", "trainer-2")
    assert followed(1, 3, everybody) == "trainer-1"


def test_the_followers_of_a_trainer_that_is_gone_are_dealt_out_among_the_others():
    left = ["trainer-0", "trainer-10", "trainer-2"]
    assert {followed(number, 4, left) for number in (1, 5, 9)} == set(left)


def test_nobody_to_follow_means_to_wait_for_ones_own():
    assert followed(4, 3, []) == "trainer-1"


def test_a_trainer_s_buffer_has_its_number():
    assert buffer_of("trainer-12") == "rollout-buffer-12"
    assert number_in("generator-3") == 3


def write_checkpoint(run, replica, step, rounds):
    with checkpoints_of(run, replica, keep=2).writing(step) as folder:
        (folder / "trainer.json").write_text(json.dumps({"step": step, "outer": {"rounds": rounds}}))


@pytest.mark.parametrize(
    ("found", "replica", "begins_from"),
    [
        ({}, 0, (None, True)),
        ({0: (8, 4), 1: (9, 4)}, 0, (8, True)),  # as many syncs: its own, with what it learned since
        ({0: (8, 4), 1: (9, 4)}, 1, (9, True)),
        ({0: (8, 4), 1: (6, 3)}, 1, (8, False)),  # the other synced once more
        ({1: (6, 3)}, 0, (6, False)),  # it has none
    ],
)
def test_a_replica_begins_from_its_own_checkpoint_unless_another_one_s_has_more_syncs(
    tmp_path, found, replica, begins_from
):
    for number, (step, rounds) in found.items():
        write_checkpoint(tmp_path, number, step, rounds)
    checkpoint, own = newest_checkpoint(tmp_path, replica, 2)
    assert (checkpoint.step if checkpoint else None, own) == begins_from


def test_a_damaged_checkpoint_of_another_replica_is_passed_over(tmp_path):
    write_checkpoint(tmp_path, 0, 4, 2)
    write_checkpoint(tmp_path, 1, 8, 4)
    (tmp_path / "checkpoints" / "replica-1" / "step-8" / "trainer.json").write_text("{}")
    checkpoint, own = newest_checkpoint(tmp_path, 0, 2)
    assert (checkpoint.step, own) == (4, True)


def test_a_trainer_alone_begins_from_a_checkpoint_that_knows_nothing_of_replicas(tmp_path):
    with checkpoints_of(tmp_path, 0, keep=2).writing(4) as folder:
        (folder / "trainer.pt").write_bytes(b"of a trainer that knew one proc only")
    checkpoint, own = newest_checkpoint(tmp_path, 0, 1)
    assert (checkpoint.step, own) == (4, True)
