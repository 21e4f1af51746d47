"""When the guard fires, when it must not, and that it is nothing but a fold over its updates."""

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.safety import CollapseStopError, GuardConfig, HeldOutGuard, raise_if_fired


def guard(**settings):
    return HeldOutGuard(GuardConfig(**{"min_steps": 0, "smoothing": 0.0, "min_decline": 0.0, **settings}))


def fold(made, updates):
    for step, update in enumerate(updates):
        made.update(step, *update)
    return made


def diverging(count):
    """In-loop reward up, held-out score down, at every update."""
    return [(0.1 * step, 1.0 - 0.1 * step) for step in range(count)]


def test_it_fires_after_patience_evaluations_that_fall_while_the_reward_rises():
    made = fold(guard(patience=3), diverging(3))
    assert not made.fired  # the first is compared with nothing
    verdict = made.update(3, 0.3, 0.7)
    assert (verdict.reason, verdict.step) == ("divergence", 3)
    assert (verdict.in_loop, verdict.held_out, verdict.value) == pytest.approx((0.3, 0.7, 0.3))


@pytest.mark.parametrize("between", [(0.9, 0.95), (0.0, 0.1), (0.9, 0.8)])
def test_an_evaluation_that_does_not_diverge_begins_the_count_anew(between):
    """Both rise; both fall; the score stays as it was."""
    before = diverging(3)
    after = [(between[0] + 0.1 * n, between[1] - 0.1 * n) for n in (1, 2)]
    assert not fold(guard(patience=3), [*before, between, *after]).fired
    assert fold(guard(patience=2), [*before, between, *after]).fired


def test_a_fall_that_is_too_small_does_not_count():
    updates = [(0.1 * step, 0.5 - 0.001 * step) for step in range(20)]
    assert not fold(guard(patience=2, min_decline=0.05), updates).fired
    assert fold(guard(patience=2, min_decline=0.01), updates).verdict.value >= 0.01


def test_constant_figures_never_fall_by_rounding():
    updates = [(0.1 * step, 0.1 + 0.2) for step in range(200)]
    assert not fold(guard(patience=1, smoothing=0.7), updates).fired


def test_the_gap_is_measured_from_the_end_of_the_warm_up_as_the_worked_example_says():
    in_loop, held_out = [0.2, 0.3, 0.4, 0.6, 0.6, 0.8], {2: 0.3, 5: 0.2}
    made = guard(smoothing=0.5, min_steps=3, gap_limit=0.2)
    for step, reward in enumerate(in_loop):
        made.update(step, reward, held_out.get(step))
    assert made.in_loop == pytest.approx(0.4833, abs=1e-4)
    assert made.held_out == pytest.approx(0.25)
    assert (made.verdict.reason, made.verdict.step) == ("gap", 5)
    assert made.verdict.value == pytest.approx(0.2333, abs=1e-4)


def test_a_gap_that_was_there_in_the_warm_up_is_no_growth():
    assert not fold(guard(min_steps=1, gap_limit=0.2), [(0.9, 0.3)] * 30).fired
    assert not fold(guard(gap_limit=0.2), [(0.9, 0.3)] * 30).fired  # without a warm-up the first one counts


def test_between_evaluations_a_rising_reward_widens_no_gap():
    made = guard(gap_limit=0.2, patience=1)
    made.update(0, 0.2, 0.2)
    for step in range(1, 50):
        assert made.update(step, 0.02 * step) is None
    assert made.gap == 0.0


def test_one_step_at_the_kl_limit_is_enough_and_an_infinite_kl_is_over_any():
    made = guard(kl_hard_stop=0.5)
    assert made.update(0, kl=0.49) is None
    assert made.update(1, kl=0.5).reason == "kl"
    assert guard(kl_hard_stop=0.5).update(0, kl=math.inf).reason == "kl"
    assert not fold(guard(), [(None, None, 1e9)]).fired  # no limit, no stop


def test_a_kl_of_an_earlier_step_does_not_fire_later():
    made = guard(kl_hard_stop=0.5, min_steps=3)
    made.update(0, kl=0.9)
    assert made.update(5, kl=None) is None
    assert made.kl == 0.9


def test_what_brought_no_score_is_counted_and_is_not_zero():
    made = guard(patience=1, gap_limit=0.1)
    made.update(0, 0.5, 0.5)
    for step, nothing in enumerate([math.nan, math.inf, None], 1):
        made.update(step, 0.6, nothing, math.nan)
    assert (made.held_out, made.skipped, made.fired) == (0.5, 2, False)
    made.update(4, math.nan, 0.5)
    assert made.in_loop == pytest.approx(0.6)  # the mean of those that were numbers
    assert made.state_dict()["unusable"] == 4


def test_a_score_without_any_reward_to_compare_with_fires_nothing():
    made = guard(patience=1, gap_limit=0.1)
    made.update(0, None, 0.9)
    assert made.update(1, None, 0.1) is None
    assert made.gap is None


def test_the_message_says_what_happened_and_what_to_do():
    made = fold(guard(kl_hard_stop=0.5), [(0.9, 0.3, 0.75)])
    with pytest.raises(CollapseStopError) as error:
        raise_if_fired(made)
    assert "fired at step 0: the KL to the initial policy reached 0.75" in str(error.value)
    assert "a higher safety.kl_hard_stop, or with safety.on_fire = warn" in str(error.value)
    assert error.value.verdict == made.verdict
    assert pickle.loads(pickle.dumps(error.value)).verdict == made.verdict  # it may cross processes
    raise_if_fired(guard())


@pytest.mark.parametrize("reason", ["kl", "divergence", "gap"])
def test_every_reason_has_a_sentence_with_its_figures(reason):
    limits = {"kl": {"kl_hard_stop": 1.0}, "divergence": {"patience": 1}, "gap": {"gap_limit": 0.1, "patience": 9}}
    made = fold(guard(**limits[reason]), [(0.1, 0.9), (0.2, 0.8), (0.3, 0.7, 2.0)])
    assert made.verdict.reason == reason
    assert f"{made.verdict.value:.4g}" in str(made.verdict)


# ---- properties --------------------------------------------------------------------------------------------------

figures = st.one_of(st.none(), st.sampled_from([math.nan, math.inf, -math.inf]), st.floats(-2, 2), st.floats(-1e9, 1e9))
updates = st.lists(st.tuples(st.integers(0, 30), figures, figures, figures), max_size=40)
configs = st.builds(
    GuardConfig,
    min_steps=st.integers(0, 15),
    smoothing=st.floats(0, 0.9),
    patience=st.integers(1, 3),
    min_decline=st.floats(0, 0.2),
    gap_limit=st.one_of(st.none(), st.floats(0.01, 1)),
    kl_hard_stop=st.one_of(st.none(), st.floats(0.01, 1)),
)


@given(configs, updates)
def test_it_cannot_fire_in_the_warm_up(config, many):
    made = HeldOutGuard(config)
    for update in many:
        if (verdict := made.update(*update)) is not None:
            assert verdict.step >= config.min_steps
            return


@given(configs, updates)
def test_once_fired_it_stays_fired_with_the_same_verdict(config, many):
    made, first = HeldOutGuard(config), None
    for update in many:
        verdict = made.update(*update)
        first = first or verdict
        assert verdict is first
    assert made.fired == (first is not None)


@given(configs, updates, st.integers(0, 40))
def test_a_replay_of_its_updates_and_a_restored_state_end_in_the_same_state(config, many, cut):
    whole, replayed, restored = (HeldOutGuard(config) for _ in range(3))
    for update in many:
        whole.update(*update)
    for update in many[:cut]:
        replayed.update(*update)
    restored.load_state_dict(replayed.state_dict())
    for made in (replayed, restored):
        for update in many[cut:]:
            made.update(*update)
        assert made.state_dict() == whole.state_dict()


@given(configs, updates, st.data())
def test_a_step_that_is_told_again_and_any_question_change_nothing(config, many, data):
    made = HeldOutGuard(config)
    for update in many:
        made.update(*update)
        before = made.state_dict()
        made.update(data.draw(st.integers(-1, update[0])), 5.0, -5.0, 1e9)
        for _ in range(2):
            assert (made.fired, made.verdict, made.gap, made.kl) == (made.fired, made.verdict, made.gap, made.kl)
        assert made.state_dict() == before
