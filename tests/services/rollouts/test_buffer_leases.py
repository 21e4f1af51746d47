import pytest
from pydantic import ValidationError
from rollout_builders import Clock, balanced, config, fill, opened, rollout


def test_a_group_is_leased_member_by_member_before_the_next_task(tmp_path):
    leases = opened(tmp_path).claim("g", 0, 3)
    assert [lease.rollout_id for lease in leases] == ["t000000/0", "t000000/1", "t000001/0"]
    assert leases[0].expires_in_s == 10.0


def test_max_staleness_zero_is_a_lock_step_run(tmp_path):
    buffer = opened(tmp_path, max_staleness=0)
    leases = buffer.claim("g", 0, 100)
    assert len(leases) == 4  # exactly one batch
    fill(buffer, leases)
    assert buffer.claim("g", 0, 100) == []
    assert buffer.take(0) is not None
    assert buffer.claim("g", 0, 100) == []  # the old weights may start nothing for batch 1
    buffer.trained(0)
    assert len(buffer.claim("g", 1, 100)) == 4


def test_over_production_is_bounded_by_max_staleness(tmp_path):
    buffer = opened(tmp_path, max_staleness=2)
    assert len(buffer.claim("g", 0, 1000)) == 3 * 4
    assert buffer.claim("g", 0, 1) == []


def test_a_new_buffer_lets_generators_run_ahead_of_the_first_batch(tmp_path):
    buffer = opened(tmp_path, max_staleness=1)
    fill(buffer, buffer.claim("g", 0, 4))
    assert len(buffer.claim("g", 0, 1000)) == 4


def test_a_run_claims_no_more_than_its_batches_need(tmp_path):
    buffer = opened(tmp_path, max_staleness=9, total_batches=1)
    assert len(buffer.claim("g", 0, 1000)) == 4


def test_weights_of_a_rewound_history_may_start_nothing(tmp_path):
    assert opened(tmp_path).claim("g", 3, 1) == []


def test_an_expired_lease_is_given_out_again_and_counted(tmp_path):
    clock = Clock()
    buffer = opened(tmp_path, clock)
    first = buffer.claim("g1", 0, 1)[0]
    clock.now += 10.0
    assert buffer.expire() == 1
    again = buffer.claim("g2", 0, 1)[0]
    assert again.rollout_id == first.rollout_id
    assert again.id != first.id
    accounts = buffer.accounts()
    assert accounts["counts"]["expired"] == 1
    assert accounts["reasons"] == {"expired: g1 did not deliver in 10 s": 1}
    assert accounts["leases"] == {"g2": 1}


def test_what_a_generator_was_given_and_does_not_hold_is_free_again(tmp_path):
    buffer = opened(tmp_path)
    before = buffer.claim("g1", 0, 2)
    other = buffer.claim("g2", 0, 1)
    placed_again = buffer.claim("g1", 0, 2, holding=[])
    assert [lease.rollout_id for lease in placed_again] == [lease.rollout_id for lease in before]
    assert buffer.claim("g1", 0, 0, holding=[lease.id for lease in placed_again]) == []
    assert buffer.accounts()["leases"] == {"g1": 2, "g2": 1}
    assert buffer.put(rollout(other[0]))
    assert buffer.accounts()["counts"]["abandoned"] == 2


def test_the_first_rollout_wins_although_its_lease_expired(tmp_path):
    clock = Clock()
    buffer = opened(tmp_path, clock)
    late = buffer.claim("g1", 0, 1)[0]
    clock.now += 10.0
    second = buffer.claim("g2", 0, 1)[0]
    assert buffer.put(rollout(late, reward=0.25))
    assert not buffer.put(rollout(second, reward=0.75))
    accounts = buffer.accounts()
    assert accounts["counts"]["duplicate"] == 1
    assert accounts["leases"] == {}


def test_a_rollout_put_twice_is_taken_once(tmp_path):
    buffer = opened(tmp_path)
    lease = buffer.claim("g", 0, 1)[0]
    assert buffer.put(rollout(lease))
    assert not buffer.put(rollout(lease))
    assert buffer.accounts()["counts"] == {"put": 1, "duplicate": 1}


def test_a_failed_episode_frees_its_member_and_is_counted_once(tmp_path):
    buffer = opened(tmp_path)
    lease = buffer.claim("g", 0, 1)[0]
    assert buffer.put(rollout(lease, status="failed"))
    assert not buffer.put(rollout(lease, status="failed"))
    assert buffer.claim("g", 0, 1)[0].rollout_id == lease.rollout_id
    accounts = buffer.accounts()
    assert accounts["counts"]["failed"] == 1
    assert accounts["reasons"] == {"failed: the environment broke": 1}


def test_an_episode_without_a_sampled_token_is_a_failed_one(tmp_path):
    buffer = opened(tmp_path)
    empty = rollout(buffer.claim("g", 0, 1)[0])
    empty.sequences, empty.turns = [], []
    assert buffer.put(empty)
    assert buffer.accounts()["counts"]["failed"] == 1


def test_abandoned_leases_can_be_claimed_at_once(tmp_path):
    buffer = opened(tmp_path)
    leases = buffer.claim("g", 0, 2)
    buffer.abandon([lease.id for lease in leases] + ["1.99", "nonsense"], "shutting down")
    buffer.abandon([leases[0].id], "shutting down")
    assert [lease.rollout_id for lease in buffer.claim("h", 0, 2)] == [lease.rollout_id for lease in leases]
    assert buffer.accounts()["counts"]["abandoned"] == 2


def test_a_member_is_given_up_after_max_attempts_and_the_group_ships_without_it(tmp_path):
    buffer = opened(tmp_path, group_size=3, min_group_size=2, max_attempts=2)
    for _ in range(2):
        lease = buffer.claim("g", 0, 1)[0]
        assert lease.member == 0
        buffer.put(rollout(lease, status="failed"))
    fill(buffer, buffer.claim("g", 0, 2))
    accounts = buffer.accounts()
    assert accounts["ready"] == 1
    assert accounts["counts"]["given_up"] == 1


def test_a_group_with_too_few_members_left_is_dropped_with_its_reason(tmp_path):
    buffer = opened(tmp_path, max_attempts=1)
    lease, other = buffer.claim("g", 0, 2)
    buffer.put(rollout(lease, status="failed"))
    accounts = buffer.accounts()
    assert accounts["dropped"] == {"incomplete": 1}
    assert accounts["leases"] == {}
    assert balanced(accounts)
    assert not buffer.put(rollout(other))
    assert buffer.accounts()["counts"]["late"] == 1


def test_ship_gives_up_a_late_member_at_once(tmp_path):
    clock = Clock()
    buffer = opened(tmp_path, clock, group_size=3, min_group_size=2, incomplete="ship")
    slow, *others = buffer.claim("g", 0, 3)
    fill(buffer, others)
    clock.now += 10.0
    buffer.expire()
    assert buffer.accounts()["ready"] == 1
    assert not buffer.put(rollout(slow))
    assert buffer.accounts()["counts"]["late"] == 1


def test_a_malformed_rollout_is_refused_with_one_sentence(tmp_path):
    buffer = opened(tmp_path)
    bad = rollout(buffer.claim("g", 0, 1)[0])
    bad.sequences[0].logprobs.pop()
    assert not buffer.put(bad)
    accounts = buffer.accounts()
    assert accounts["refusals"] == ["rollout t000000/0, sequence 0 has 5 token ids but 4 logprobs"]
    assert accounts["counts"] == {"malformed": 1}
    assert accounts["leases"] == {}


def test_a_lease_that_this_buffer_never_gave_is_refused(tmp_path):
    buffer = opened(tmp_path)
    lease = buffer.claim("g", 0, 1)[0]
    stranger = rollout(lease)
    stranger.lease_id = "1.7"
    assert not buffer.put(stranger)
    assert buffer.accounts()["counts"] == {"unknown": 1}


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"group_size": 2, "min_group_size": 3}, "set min_group_size to 2 or less"),
        ({"incomplete": "ship", "min_group_size": 2}, "set min_group_size below 2"),
        ({"group_size": 1, "min_group_size": 1, "dead_groups": "drop"}, "set group_size to 2 or more"),
    ],
)
def test_contradictory_settings_are_refused_with_advice(settings, advice):
    with pytest.raises(ValidationError, match=advice):
        config(**settings)


def test_leases_of_a_group_that_is_given_up_end_with_it(tmp_path):
    clock = Clock()
    buffer = opened(tmp_path, clock, max_attempts=1)
    buffer.claim("g", 0, 2)
    clock.now += 10.0
    assert buffer.expire() == 1
    accounts = buffer.accounts()
    assert accounts["dropped"] == {"incomplete": 1}
    assert accounts["leases"] == {}


def fail_all(buffer, leases):
    for lease in leases:
        nothing = rollout(lease, status="truncated")
        nothing.sequences, nothing.turns, nothing.reason = [], [], "reached max_tokens 400"
        assert buffer.put(nothing)


def test_no_new_task_is_begun_after_many_without_any_rollout_and_the_reasons_are_named(tmp_path):
    buffer = opened(tmp_path, max_staleness=9, max_attempts=1)
    for _ in range(8):
        assert buffer.starved() is None
        fail_all(buffer, buffer.claim("g", 0, 1))
    assert buffer.claim("g", 0, 1) == []
    assert buffer.accounts()["dropped"] == {"incomplete": 8}
    why = "failed: truncated without a sampled token: reached max_tokens 400 (8 times)"
    assert why in buffer.starved()
    buffer.close()
    again = opened(tmp_path, max_staleness=9, max_attempts=1)  # a restart changes nothing: it would fail again
    assert again.claim("g", 0, 1) == []
    again.save(tmp_path / "saved", 0)
    again.close()
    again = opened(tmp_path, max_staleness=9, max_attempts=1)
    assert again.starved()
    again.rewind(0)  # the trainer of a resumed run does that
    assert again.starved() is None
    assert len(again.claim("g", 0, 1)) == 1


def test_work_begun_goes_on_and_one_rollout_brings_new_tasks(tmp_path):
    buffer = opened(tmp_path, max_staleness=9, max_attempts=2)
    begun, other = buffer.claim("g", 0, 2)
    for _ in range(16):
        fail_all(buffer, buffer.claim("g", 0, 1))
    assert buffer.starved()
    buffer.abandon([other.id], "changed my mind")
    assert [lease.rollout_id for lease in buffer.claim("g", 0, 2)] == [other.rollout_id]
    assert buffer.put(rollout(begun))
    assert buffer.starved() is None
    assert buffer.claim("g", 0, 1)


def test_more_groups_per_batch_are_given_more_tasks_to_fail(tmp_path):
    buffer = opened(tmp_path, max_staleness=99, max_attempts=1, groups_per_batch=3)
    for _ in range(11):
        fail_all(buffer, buffer.claim("g", 0, 1))
    assert buffer.starved() is None
    fail_all(buffer, buffer.claim("g", 0, 1))
    assert buffer.starved()
