"""The audit believes a buffer that keeps its promises, and names each promise that a journal breaks."""

import pytest
from rollout_builders import fill, opened, rollout, train_step

from mesh.messages import Task
from services.rollouts import events as ev
from services.rollouts.audit import audit
from services.rollouts.journal import Journal, JournalError


def test_a_buffer_that_trained_dropped_rewound_and_was_killed_has_no_fault(tmp_path):
    buffer = opened(tmp_path, groups_per_batch=2, group_size=2, keep_saves=100)
    for step in range(3):
        train_step(buffer, step)
        buffer.save(tmp_path / "saved", step + 1)
    train_step(buffer, 3)
    buffer.rewind(2)
    train_step(buffer, 2)
    buffer.close()  # as a kill leaves it: nothing more is written
    buffer = opened(tmp_path, groups_per_batch=2, group_size=2, keep_saves=100)
    train_step(buffer, 3)
    accounts = buffer.accounts()
    buffer.close()
    found = audit(tmp_path)
    assert found.faults == []
    assert (found.since, found.batches, found.moves) == (0, 4, 1)
    assert found.trained == accounts["trained"] == 8
    assert found.issued == accounts["issued"]
    assert found.dropped == accounts["dropped"]
    assert found.open == accounts["in_work"] + accounts["ready"] + accounts["taken"]


def test_a_journal_that_was_pruned_is_audited_from_its_first_snapshot_on(tmp_path):
    buffer = opened(tmp_path, groups_per_batch=2, group_size=2, keep_saves=1)
    for step in range(3):
        train_step(buffer, step)
        buffer.save(tmp_path / "saved", step + 1)
    fill(buffer, buffer.claim("g", 3, 2))
    buffer.close()
    found = audit(tmp_path)
    assert found.faults == []
    assert (found.since, found.batches, found.trained) == (3, 3, 6)


def group(task):
    return ev.TakenGroup(task, [0.0], False, 0)


def taken(batch, *tasks):
    return ev.Taken(batch, [group(task) for task in tasks], [], {}, {})


def issued(index):
    return ev.Issued(Task(f"t{index}", index, 7), 1)


A, B = issued(0), issued(1)
TRAINED_ONCE = [A, taken(0, "t0"), ev.Trained(0)]


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([A, A], "task t0 was issued twice"),
        ([B], "task t1 was issued where number 0 of the stream was next"),
        ([*TRAINED_ONCE, taken(1, "t0")], "task t0 was put into batch 1 although the task is trained"),
        ([taken(0, "t0")], "task t0 was put into batch 0 although the task is unknown"),
        ([*TRAINED_ONCE, ev.Trained(0)], "batch 0 was trained where 1 was next"),
        ([A, B, taken(0, "t0"), taken(1, "t1"), ev.Trained(1)], "batch 1 was trained where 0 was next"),
        ([A, taken(0, "t0"), taken(0, "t0")], "batch 0 was formed twice"),
        ([*TRAINED_ONCE, ev.Dropped("t0", "stale")], "task t0 was dropped although the task is trained"),
        ([A, ev.Dropped("t0", "")], "task t0 was dropped without a reason"),
    ],
)
def test_a_broken_promise_is_named(tmp_path, events, fault):
    write(tmp_path, events)
    assert any(fault in said for said in audit(tmp_path).faults)


def test_a_rollout_that_is_accepted_twice_is_named_unless_its_weights_were_lost(tmp_path):
    buffer = opened(tmp_path / "real")
    delivered = ev.Delivered(rollout(buffer.claim("g", 0, 1)[0]), False)
    first = ev.Issued(delivered.rollout.task, 1)
    write(tmp_path / "twice", [first, delivered, delivered])
    assert [fault for fault in audit(tmp_path / "twice").faults if "was accepted twice" in fault]
    write(tmp_path / "reopened", [first, delivered, ev.Reopened(delivered.rollout.task.id, (1, 5), "stale"), delivered])
    assert audit(tmp_path / "reopened").faults == []


def test_a_folder_without_a_journal_and_a_damaged_one_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no rollout buffer's journal"):
        audit(tmp_path)
    write(tmp_path, TRAINED_ONCE)
    (segment,) = tmp_path.glob("segment-*.jsonl")
    segment.write_bytes(segment.read_bytes().replace(b"Issued", b"Tissue"))
    with pytest.raises(JournalError, match="damaged at byte"):
        audit(tmp_path)


def write(folder, events):
    journal = Journal(folder)
    journal.start_segment([ev.Snapshot(0, 1, 0, 0, 0, 0, {}, {}, {}, [], [])], 0)
    for event in events:
        journal.append(event)
    journal.close()
