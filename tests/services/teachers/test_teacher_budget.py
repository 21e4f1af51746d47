import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.teachers import Budget, BudgetExceeded, TeacherConfig, cost_usd, worst_case_usd

PRICED = TeacherConfig(
    name="t", base_url="https://host/v1", model="m", usd_per_million_prompt=2.0, usd_per_million_completion=10.0
)


def test_cost_is_price_per_million_tokens() -> None:
    assert cost_usd(PRICED, 1_000_000, 0) == 2.0
    assert cost_usd(PRICED, 500, 100) == pytest.approx(0.002)


def test_the_worst_case_counts_each_byte_as_a_token_and_the_whole_completion() -> None:
    assert worst_case_usd(PRICED, b"x" * 100, 2, 50) == pytest.approx((100 + 2 * 32 + 64) * 2e-6 + 50 * 10e-6)


def test_a_reservation_that_would_exceed_the_budget_is_refused_with_the_figures() -> None:
    budget = Budget(1.0)
    budget.hold("a", 0.7)
    budget.check(0.3)
    with pytest.raises(BudgetExceeded, match=r"may cost \$0.400000.*\$0.700000 are reserved.*raise max_total_usd"):
        budget.check(0.4)
    budget.settle("a", 0.1)
    budget.check(0.9)
    assert budget.spent_usd == pytest.approx(0.1)
    assert budget.reserved_usd == 0


def test_free_calls_pass_an_exhausted_budget() -> None:
    budget = Budget(0.0)
    budget.check(0.0)
    with pytest.raises(BudgetExceeded):
        budget.check(1e-9)


def test_a_call_dearer_than_its_worst_case_is_booked_in_full_and_counted() -> None:
    budget = Budget(1.0)
    budget.hold("a", 0.1)
    budget.settle("a", 0.2)
    assert (budget.spent_usd, budget.overruns) == (0.2, 1)


@given(
    limit=st.floats(0, 10),
    steps=st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1), st.integers(0, 5)), max_size=60),
)
def test_spent_and_reserved_never_exceed_the_limit_in_any_order(
    limit: float, steps: list[tuple[float, float, int]]
) -> None:
    budget, open_calls = Budget(limit), {}
    for i, (worst, share, slot) in enumerate(steps):
        if slot in open_calls:
            budget.settle(*open_calls.pop(slot))
        try:
            budget.check(worst)
        except BudgetExceeded:
            continue
        budget.hold(str(i), worst)
        open_calls[slot] = (str(i), worst * share)
        assert budget.spent_usd + budget.reserved_usd <= limit + 1e-9
        assert budget.remaining_usd >= -1e-9
