import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from rollout_builders import Clock, balanced, fill, heard, opened, rollout, train_step

from services.rollouts.buffer import RolloutBuffer
from services.rollouts.events import Counted, Delivered, decode, encode
from services.rollouts.journal import Journal, JournalError, read_events

CHILD = """
import sys
from rollout_builders import opened, rollout
buffer = opened(sys.argv[1], groups_per_batch=4, max_staleness=10**6)
for number in range(10**6):
    lease = buffer.claim("child", 0, 1)[0]
    buffer.put(rollout(lease, reward=float(number)))
    print(lease.rollout_id, flush=True)
"""


def without_leases(accounts):
    return {name: value for name, value in accounts.items() if name not in ("leases", "refusals", "journal_cut_bytes")}


def reopened(buffer, folder, **settings):
    buffer.close()
    return opened(folder, **settings)


def test_every_event_survives_its_json_exactly(tmp_path):
    lease = opened(tmp_path).claim("g", 0, 1)[0]
    original = rollout(lease, reward=0.1 + 0.2, error=True)
    original.rewards = {"exact": None, "length": -1e-300}
    original.flags = ["archives/unpack@0", "mine/«peek»@12"]
    event = Delivered(original, replay=True)
    assert decode(encode(event)) == event


def test_a_rollout_of_an_older_journal_has_no_flags(tmp_path):
    event = Delivered(rollout(opened(tmp_path).claim("g", 0, 1)[0]), replay=False)
    kind, fields = json.loads(encode(event))
    assert fields["rollout"].pop("flags") == []
    assert decode(json.dumps([kind, fields]).encode()) == event


def test_a_reopened_buffer_is_the_same_and_its_leases_are_free(tmp_path):
    buffer = opened(tmp_path)
    leases = buffer.claim("g", 0, 8)
    fill(buffer, leases[:5])
    buffer.abandon([leases[5].id], "tired")
    buffer.delayed(heard(leases[0].rollout_id))
    batch, before = buffer.take(0), buffer.accounts()
    again = reopened(buffer, tmp_path)
    assert without_leases(again.accounts()) == without_leases(before)
    assert again.accounts()["leases"] == {}
    assert again.take(0) == batch
    assert [lease.rollout_id for lease in again.claim("h", 0, 3)] == [lease.rollout_id for lease in leases[5:]]


def test_a_rollout_in_flight_over_a_restart_is_still_taken_once(tmp_path):
    buffer = opened(tmp_path)
    lease = buffer.claim("g", 0, 1)[0]
    again = reopened(buffer, tmp_path)
    given_again = again.claim("h", 0, 1)[0]
    assert given_again.rollout_id == lease.rollout_id
    assert given_again.id != lease.id
    assert again.put(rollout(lease))
    assert not again.put(rollout(given_again))


def test_kill_nine_loses_nothing_that_was_put(tmp_path):
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )
    acknowledged = [child.stdout.readline().decode().strip() for _ in range(50)]
    child.send_signal(signal.SIGKILL)
    acknowledged += child.stdout.read().decode().split()
    assert child.wait(timeout=30) == -signal.SIGKILL
    buffer = opened(tmp_path, groups_per_batch=4, max_staleness=10**6)
    accounts = buffer.accounts()
    assert 0 <= accounts["counts"]["put"] - len(acknowledged) <= 1  # the last one may be put and not yet printed
    assert balanced(accounts)
    trained = [r.id for batch in range(5) for r in _trained(buffer, batch)]
    assert trained == acknowledged[: len(trained)]


def _trained(buffer, batch):
    groups = buffer.take(batch).groups
    buffer.trained(batch)
    return [member for group in groups for member in group.rollouts]


@pytest.mark.parametrize("cut", [1, 9, 40])
def test_a_torn_tail_is_cut_and_the_rest_is_kept(tmp_path, cut):
    buffer = opened(tmp_path)
    leases = buffer.claim("g", 0, 2)
    fill(buffer, leases[:1])
    before = without_leases(buffer.accounts())
    buffer.put(rollout(leases[0]))  # a small record: the count of a duplicate
    buffer.close()
    segment = sorted(tmp_path.glob("segment-*"))[-1]
    os.truncate(segment, segment.stat().st_size - min(cut, len(encode(Counted("duplicate"))) + 9))
    again = opened(tmp_path)
    assert again.accounts()["journal_cut_bytes"] > 0 or cut == 40
    assert without_leases(again.accounts()) == before
    again.put(rollout(leases[1]))
    assert reopened(again, tmp_path).accounts()["ready"] == 1


def test_damage_in_the_middle_is_an_error_and_not_a_shorter_history(tmp_path):
    buffer = opened(tmp_path)
    fill(buffer, buffer.claim("g", 0, 4))
    buffer.close()
    segment = sorted(tmp_path.glob("segment-*"))[-1]
    data = bytearray(segment.read_bytes())
    data[data.index(b"Delivered") + 3] ^= 1
    segment.write_bytes(data)
    with pytest.raises(JournalError, match="is damaged at byte"):
        opened(tmp_path)


def test_records_are_checksummed_json_lines(tmp_path):
    buffer = opened(tmp_path)
    buffer.claim("g", 0, 1)
    for line in sorted(tmp_path.glob("segment-*"))[-1].read_bytes().splitlines():
        checksum, payload = line.split(b" ", 1)
        assert int(checksum, 16) == zlib.crc32(payload)
        assert len(json.loads(payload)) == 2


def test_two_buffers_never_share_a_folder(tmp_path):
    owner = opened(tmp_path)
    with pytest.raises(JournalError, match="another process keeps a buffer"):
        Journal(tmp_path, lock_wait_s=0.0)
    owner.close()
    with pytest.raises(JournalError, match="is closed"):
        owner.claim("g", 0, 1)


def test_a_folder_of_another_seed_is_refused_and_released(tmp_path):
    opened(tmp_path).close()
    with pytest.raises(ValueError, match="belongs to a run with seed 7, not 8"):
        RolloutBuffer.open(tmp_path, opened(tmp_path / "other").config, seed=8)
    opened(tmp_path)


def test_save_and_load_serve_the_first_batch_before_anything_is_generated(tmp_path):
    buffer = opened(tmp_path / "run")
    fill(buffer, buffer.claim("g", 0, 100))
    expected = [group.task.id for group in buffer.take(0).groups]  # taken, not trained: saved as ready
    saved = buffer.save(tmp_path / "step-0", 0)
    assert (saved["step"], saved["ready"]) == (0, 6)
    loaded = RolloutBuffer.load(tmp_path / "step-0", tmp_path / "new", buffer.config, Clock())
    assert loaded.claim("g", 0, 100) == []
    assert [group.task.id for group in loaded.take(0).groups] == expected
    assert balanced(loaded.accounts())
    loaded.trained(0)
    assert loaded.claim("g", 1, 1)[0].task.id == "t000006"


def test_a_save_is_whole_or_not_there(tmp_path):
    buffer = opened(tmp_path / "run")
    buffer.save(tmp_path / "step-0", 0)
    buffer.save(tmp_path / "step-0", 0)
    assert [path.name for path in (tmp_path / "step-0").iterdir()] == ["buffer.jsonl"]
    torn = tmp_path / "step-0" / "buffer.jsonl"
    os.truncate(torn, torn.stat().st_size - 3)
    with pytest.raises(JournalError, match="use an earlier checkpoint"):
        read_events(torn)


def test_a_save_ahead_of_training_is_refused(tmp_path):
    with pytest.raises(ValueError, match="batches from 0 on are not trained yet"):
        opened(tmp_path).save(tmp_path / "step-1", 1)


def test_a_late_save_holds_the_state_as_of_its_step(tmp_path):
    buffer = opened(tmp_path / "run", max_staleness=0)
    tasks = [train_step(buffer, batch) for batch in range(3)]
    buffer.save(tmp_path / "step-2", 2)
    loaded = RolloutBuffer.load(tmp_path / "step-2", tmp_path / "new", buffer.config, Clock())
    assert [group.task.id for group in loaded.take(2).groups] == tasks[2]
    assert buffer.accounts()["frontier"] == 3


def test_rewind_brings_back_what_was_trained_and_trains_every_task_once(tmp_path):
    buffer = opened(tmp_path / "run", max_staleness=3)
    fill(buffer, buffer.claim("g", 0, 100))
    trained = [train_step(buffer, 0)]
    buffer.save(tmp_path / "step-1", 1)
    trained += [train_step(buffer, batch) for batch in range(1, 4)]
    rewound = buffer.rewind(1)
    assert balanced(rewound)
    assert rewound["frontier"] == 1
    assert buffer.claim("g", 1, 100) == []  # the saved buffer can serve batch 1
    again = [train_step(buffer, batch) for batch in range(1, 4)]
    assert again[:3] == trained[1:]
    every = [task for tasks in [trained[0], *again] for task in tasks]
    assert len(every) == len(set(every))


def test_rewind_discards_what_lost_weights_sampled_and_generates_it_again(tmp_path):
    buffer = opened(tmp_path / "run", max_staleness=0)
    train_step(buffer, 0)
    in_flight = buffer.claim("g", 1, 4)
    fill(buffer, in_flight, version=1)
    buffer.take(1)
    buffer.trained(1)
    late = buffer.claim("g", 2, 1)[0]
    buffer.rewind(0)
    accounts = buffer.accounts()
    assert accounts["counts"]["rewound"] == 4
    assert (accounts["ready"], accounts["in_work"], accounts["trained"]) == (2, 3, 0)
    assert not buffer.put(rollout(late, version=2))
    assert not buffer.put(rollout(in_flight[0], version=1))
    assert buffer.accounts()["counts"]["rewound"] == 6
    assert train_step(buffer, 0) == ["t000000", "t000001"]
    assert [lease.rollout_id for lease in buffer.claim("g", 1, 4)] == [lease.rollout_id for lease in in_flight]


def test_a_rewind_survives_a_restart_and_a_second_rewind(tmp_path):
    buffer = opened(tmp_path / "run", max_staleness=2)
    buffer.save(tmp_path / "step-0", 0)
    first = [train_step(buffer, batch) for batch in range(4)]
    buffer.rewind(2)
    buffer = reopened(buffer, tmp_path / "run", max_staleness=2)
    assert buffer.accounts()["frontier"] == 2
    assert train_step(buffer, 2) == first[2]
    buffer.rewind(0)
    assert balanced(buffer.accounts())
    assert train_step(buffer, 0) == first[0]


def test_a_rewind_beyond_the_kept_saves_names_the_remedy(tmp_path):
    buffer = opened(tmp_path / "run", keep_saves=1)
    for batch in range(3):
        train_step(buffer, batch)
        buffer.save(tmp_path / f"step-{batch + 1}", batch + 1)
    with pytest.raises(ValueError, match=r"goes back to step 3, not to 1; load the buffer's file"):
        buffer.rewind(1)
    with pytest.raises(ValueError, match="cannot rewind to step 9"):
        buffer.rewind(9)
    assert len(list((tmp_path / "run").glob("segment-*"))) == 1
    assert RolloutBuffer.load(tmp_path / "step-1", tmp_path / "run-2", buffer.config).accounts()["frontier"] == 1


def test_pairs_of_a_batch_that_was_rewound_come_again(tmp_path):
    buffer = opened(tmp_path / "run")
    leases = buffer.claim("g", 0, 100)
    fill(buffer, leases)
    buffer.delayed(heard(leases[0].rollout_id))
    pairs = buffer.take(0).pairs
    buffer.trained(0)
    buffer.rewind(0)
    assert buffer.take(0).pairs == pairs
    assert not buffer.delayed(heard(leases[0].rollout_id))


def test_loading_into_a_used_folder_replaces_its_history(tmp_path):
    buffer = opened(tmp_path / "run")
    train_step(buffer, 0)
    buffer.save(tmp_path / "step-1", 1)
    train_step(buffer, 1)
    buffer.close()
    loaded = RolloutBuffer.load(tmp_path / "step-1", tmp_path / "run", buffer.config, Clock())
    train_step(loaded, 1)
    assert loaded.rewind(1)["frontier"] == 1


def test_a_replay_is_lent_again_after_a_restart_within_its_limit(tmp_path):
    buffer = opened(tmp_path, replay_attempts=2)
    buffer.put(rollout(buffer.claim("g", 0, 1)[0], error=True))
    lent = buffer.to_replay(1)
    buffer = reopened(buffer, tmp_path, replay_attempts=2)
    assert buffer.to_replay(1) == lent
    buffer = reopened(buffer, tmp_path, replay_attempts=2)
    assert buffer.to_replay(1) == []


def test_a_full_disk_leaves_no_half_record(tmp_path, monkeypatch):
    buffer = opened(tmp_path)
    lease = buffer.claim("g", 0, 1)[0]
    real_write, calls = os.write, []

    def full(file, data):
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real_write(file, data[:20])

    monkeypatch.setattr("services.rollouts.journal.os.write", full)
    with pytest.raises(JournalError, match=r"No space left.*make room"):
        buffer.put(rollout(lease))
    monkeypatch.undo()
    assert buffer.put(rollout(lease))
    assert reopened(buffer, tmp_path).accounts()["counts"] == {"put": 1}
