import math

import pytest
from rollout_builders import Clock, balanced, fill, heard, opened, pair, rollout, train_step


def test_a_batch_holds_the_oldest_complete_groups(tmp_path):
    buffer = opened(tmp_path)
    leases = buffer.claim("g", 0, 8)
    fill(buffer, leases[2:])  # task 0 is still in work
    batch = buffer.take(0)
    assert [group.task.id for group in batch.groups] == ["t000001", "t000002"]
    assert batch.groups[0].advantages == [0.5, -0.5]
    assert batch.counts["groups_in_work"] == 1.0
    assert batch.counts["leases_open"] == 2.0


def test_take_is_none_until_the_batch_is_complete_and_then_always_the_same(tmp_path):
    buffer = opened(tmp_path)
    leases = buffer.claim("g", 0, 4)
    fill(buffer, leases[:3])
    assert buffer.take(0) is None
    fill(buffer, leases[3:])
    assert buffer.take(0) == buffer.take(0)


def test_one_batch_may_be_taken_ahead_and_no_other(tmp_path):
    buffer = opened(tmp_path, max_staleness=5)
    fill(buffer, buffer.claim("g", 0, 100))
    first, second = buffer.take(0), buffer.take(1)
    assert {g.task.id for g in first.groups}.isdisjoint(g.task.id for g in second.groups)
    with pytest.raises(ValueError, match=r"batch 2 cannot be taken.*allowed now: 0, 1"):
        buffer.take(2)
    buffer.trained(0)
    with pytest.raises(ValueError, match=r"batch 0 cannot be taken: batches below 1 are trained; allowed now: 1, 2"):
        buffer.take(0)


def test_trained_moves_the_frontier_once_and_in_order(tmp_path):
    buffer = opened(tmp_path)
    fill(buffer, buffer.claim("g", 0, 8))
    with pytest.raises(ValueError, match="the next one to train is 0"):
        buffer.trained(0)
    buffer.take(0)
    buffer.trained(0)
    buffer.trained(0)
    accounts = buffer.accounts()
    assert (accounts["frontier"], accounts["trained"]) == (1, 2)


def test_a_group_over_the_bound_is_dropped_whole_and_counted(tmp_path):
    buffer = opened(tmp_path, max_staleness=1, groups_per_batch=1)
    old, partner, *rest = buffer.claim("g", 0, 4)
    fill(buffer, [old, *rest])
    assert buffer.take(0).groups[0].task == rest[0].task
    buffer.trained(0)
    fill(buffer, [lease for lease in buffer.claim("g", 1, 100) if lease.task != old.task], version=1)
    assert buffer.take(1).groups[0].task != old.task
    buffer.take(2)  # at version 2 the first member is two steps old
    accounts = buffer.accounts()
    assert accounts["dropped"] == {"stale": 1}
    assert balanced(accounts)
    assert not buffer.put(rollout(partner, version=1))
    assert buffer.accounts()["counts"]["late"] == 1


def test_a_complete_group_that_grew_too_old_is_never_trained(tmp_path):
    buffer = opened(tmp_path, max_staleness=1, groups_per_batch=1)
    fill(buffer, buffer.claim("g", 0, 2))
    buffer.advance(2)
    assert buffer.take(2) is None
    assert buffer.accounts()["dropped"] == {"stale": 1}


def test_the_oldest_token_decides_although_the_episode_ended_with_new_weights(tmp_path):
    buffer = opened(tmp_path, max_staleness=1, groups_per_batch=1)
    leases = buffer.claim("g", 0, 4)
    fill(buffer, leases[:2])
    buffer.take(0)
    buffer.trained(0)
    buffer.put(rollout(leases[2], version=0, newest=1, reward=1.0))
    buffer.put(rollout(leases[3], version=1, reward=0.0))
    batch = buffer.take(1)
    assert batch.groups[0].staleness == 1
    assert batch.counts["staleness_max"] == 1.0


def test_a_stale_task_can_be_generated_again(tmp_path):
    buffer = opened(tmp_path, max_staleness=1, groups_per_batch=1, stale_tasks="retry")
    slow, partner, *rest = buffer.claim("g", 0, 4)
    buffer.put(rollout(slow))
    fill(buffer, rest)
    buffer.take(0)
    buffer.trained(0)
    train_step(buffer, 1)
    again = buffer.claim("g", 2, 2)
    assert [lease.rollout_id for lease in again] == [slow.rollout_id, partner.rollout_id]
    assert not buffer.put(rollout(partner, version=0))  # a lease of the round that was discarded
    fill(buffer, again, version=2)
    assert buffer.take(2).groups[0].task == slow.task
    assert buffer.accounts()["counts"]["stale"] == 1
    assert buffer.accounts()["dropped"] == {}


def test_dead_groups_are_kept_and_counted_or_replaced(tmp_path):
    kept = opened(tmp_path / "kept")
    fill(kept, kept.claim("g", 0, 4), rewards=(1.0,))
    batch = kept.take(0)
    assert [group.dead for group in batch.groups] == [True, True]
    assert batch.groups[0].advantages == [0.0, 0.0]
    assert batch.counts["dead_fraction"] == 1.0

    replaced = opened(tmp_path / "replaced", dead_groups="drop")
    fill(replaced, replaced.claim("g", 0, 4), rewards=(1.0,))
    assert replaced.take(0) is None
    assert replaced.accounts()["dropped"] == {"dead": 2}
    assert replaced.claim("g", 0, 1)[0].task.id == "t000002"


def test_unscorable_rollouts_get_advantage_zero_and_are_counted(tmp_path):
    buffer = opened(tmp_path, group_size=4, groups_per_batch=1)
    for lease, reward in zip(buffer.claim("g", 0, 4), [1.0, None, math.nan, 0.0], strict=True):
        assert buffer.put(rollout(lease, reward=reward))
    batch = buffer.take(0)
    assert batch.groups[0].advantages == [0.5, 0.0, 0.0, -0.5]
    assert [r.reward for r in batch.groups[0].rollouts] == [1.0, None, None, 0.0]
    assert batch.counts["unscorable"] == 2.0


def test_flagged_rollouts_are_counted_in_their_batch_and_over_the_run(tmp_path):
    buffer = opened(tmp_path, group_size=4, groups_per_batch=1)
    for lease in buffer.claim("g", 0, 4):
        played = rollout(lease)
        played.flags = ["archives/unpack@0", "archives/unpack@1"] if lease.member % 2 else []
        assert buffer.put(played)
    assert buffer.take(0).counts["flagged"] == 2.0
    buffer.trained(0)
    assert buffer.accounts()["counts"]["flagged"] == 2
    fill(buffer, buffer.claim("g", 1, 4))
    later = buffer.take(1).counts
    assert (later["flagged"], later["total/flagged"]) == (0.0, 2.0)


def test_batch_std_spans_the_groups_of_the_batch(tmp_path):
    buffer = opened(tmp_path, advantage_scaling="batch_std", advantage_eps=0.0)
    leases = buffer.claim("g", 0, 4)
    fill(buffer, leases[:2], rewards=(1.0, 0.0))
    fill(buffer, leases[2:], rewards=(5.0, 0.0))
    first, second = buffer.take(0).groups
    assert second.advantages[0] / first.advantages[0] == pytest.approx(5.0)


def test_the_end_of_the_run_leaves_no_task_without_a_fate(tmp_path):
    buffer = opened(tmp_path, total_batches=2, max_attempts=9)
    train_step(buffer, 0)
    train_step(buffer, 1)
    accounts = buffer.accounts()
    assert accounts["issued"] == accounts["trained"] + sum(accounts["dropped"].values())
    assert buffer.claim("g", 2, 1) == []
    with pytest.raises(ValueError, match="none, the run is over"):
        buffer.take(2)


def test_late_results_enter_the_next_batch_once(tmp_path):
    buffer = opened(tmp_path)
    leases = buffer.claim("g", 0, 8)
    fill(buffer, leases)
    buffer.take(0)
    buffer.trained(0)
    rollout_id = leases[0].rollout_id  # its group is trained already
    assert buffer.delayed(heard(rollout_id))
    assert not buffer.delayed(heard(rollout_id))
    assert not buffer.delayed(heard("t000099/0"))
    batch = buffer.take(1)
    assert [p.state_id for p in batch.pairs] == [f"{rollout_id}#0"]
    assert batch.counts["pair_age_max"] == 1.0
    counts = buffer.accounts()["counts"]
    assert (counts["delayed"], counts["delayed_duplicate"], counts["delayed_unknown"]) == (1, 1, 1)


def test_pairs_of_rollouts_that_were_dropped_as_stale_still_count(tmp_path):
    buffer = opened(tmp_path, max_staleness=0, groups_per_batch=1)
    slow = buffer.claim("g", 0, 2)[0]
    buffer.put(rollout(slow, error=True))
    assert buffer.delayed(heard(slow.rollout_id))
    buffer.advance(1)
    fill(buffer, buffer.claim("g", 1, 2), version=1)
    assert buffer.accounts()["dropped"] == {"stale": 1}
    assert len(buffer.take(1).pairs) == 1


def test_the_newest_pairs_are_kept_and_the_others_counted(tmp_path):
    buffer = opened(tmp_path, max_pairs=2, groups_per_batch=1, pair_max_age=0)
    leases = buffer.claim("g", 0, 4)
    fill(buffer, leases)
    buffer.delayed(heard(leases[0].rollout_id, pairs=3))
    batch = buffer.take(0)
    assert [p.state_id[-2:] for p in batch.pairs] == ["#1", "#2"]
    assert buffer.accounts()["counts"]["pair_overflow"] == 1
    buffer.delayed(heard(leases[1].rollout_id))
    assert buffer.take(1).pairs == []
    assert buffer.accounts()["counts"]["pair_too_old"] == 1


def test_pairs_without_exact_ids_are_left_out_and_counted(tmp_path):
    buffer = opened(tmp_path)
    leases = buffer.claim("g", 0, 4)
    fill(buffer, leases)
    result = heard(leases[0].rollout_id, pairs=2)
    result.pairs[0].prompt_ids = []
    result.pairs.append(pair("t000777/0"))
    assert buffer.delayed(result)
    assert len(buffer.take(0).pairs) == 1
    assert buffer.accounts()["counts"]["pair_unusable"] == 2


def test_replays_are_lent_again_a_limited_number_of_times(tmp_path):
    clock = Clock()
    buffer = opened(tmp_path, clock, replay_lease_s=5.0, replay_attempts=2)
    lease, plain = buffer.claim("g", 0, 2)
    buffer.put(rollout(lease, error=True))
    buffer.put(rollout(plain))
    assert [r.id for r in buffer.to_replay(10)] == [lease.rollout_id]
    assert buffer.to_replay(10) == []
    clock.now += 5.0
    assert len(buffer.to_replay(10)) == 1
    clock.now += 5.0
    assert buffer.to_replay(10) == []
    assert buffer.accounts()["counts"]["replay_given_up"] == 1
    assert buffer.delayed(heard(lease.rollout_id))  # late, and paid for: still welcome


def test_the_oldest_rollouts_leave_a_full_queue_for_teachers(tmp_path):
    buffer = opened(tmp_path, replay_queue=3)
    leases = buffer.claim("g", 0, 4)
    for lease in leases:
        buffer.put(rollout(lease, error=True))
    assert [r.id for r in buffer.to_replay(10)] == [lease.rollout_id for lease in leases[1:]]
    assert buffer.accounts()["counts"]["replay_overflow"] == 1


def test_nothing_is_replayed_when_teachers_are_off(tmp_path):
    buffer = opened(tmp_path, replay_which="none")
    buffer.put(rollout(buffer.claim("g", 0, 1)[0], error=True))
    assert buffer.to_replay(1) == []


def test_a_buffer_moved_to_the_end_of_the_run_drops_what_is_open_and_is_moved_there_once(tmp_path):
    buffer = opened(tmp_path, total_batches=6, groups_per_batch=1)
    fill(buffer, buffer.claim("g", 0, 4))
    train_step(buffer, 0)
    buffer.advance(6)
    accounts = buffer.accounts()
    assert balanced(accounts)
    assert (accounts["trained"], accounts["in_work"], accounts["ready"]) == (1, 0, 0)
    assert accounts["dropped"]["run_over"] >= 1
    assert buffer.claim("g", 6, 4) == []
    buffer.advance(6)
    assert buffer.accounts()["dropped"] == accounts["dropped"]
