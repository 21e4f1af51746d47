import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.teachers import Budget, BudgetExceeded, Entry, Ledger, LedgerError


def begin(ledger: Ledger, key: str, worst_usd: float = 0.5, **options: bool) -> Entry:
    return ledger.begin(key, teacher="t", model="m", state_id="r#0", worst_usd=worst_usd, **options)


def reopen(path: Path, max_total_usd: float = 2.0) -> Ledger:
    return Ledger(path, Budget(max_total_usd))


def test_an_answer_survives_the_process_and_is_not_asked_for_again(tmp_path: Path) -> None:
    first = reopen(tmp_path / "run" / "teachers.jsonl")
    entry = begin(first, "k")
    assert entry.new
    first.end(entry, "answered", cost_usd=0.1, text="yes", prompt_tokens=7, completion_tokens=2)
    first.close()
    second = reopen(tmp_path / "run" / "teachers.jsonl")
    known = second.find("k")
    assert known is not None
    assert (known.outcome, known.text, known.cost_usd, known.prompt_tokens) == ("answered", "yes", 0.1, 7)
    assert second.budget.spent_usd == pytest.approx(0.1)
    assert not begin(second, "k").new


def test_a_start_without_an_end_counts_at_its_worst_case_and_is_not_repeated(tmp_path: Path) -> None:
    first = reopen(tmp_path / "l")
    begin(first, "k", 1.5)
    second = reopen(tmp_path / "l")
    assert second.budget.reserved_usd == 1.5
    assert begin(second, "k").outcome == "started"
    assert not begin(second, "k").new
    with pytest.raises(BudgetExceeded):
        begin(second, "k", 1.0, repeat_unknown=True)
    assert begin(second, "k", 0.25, repeat_unknown=True).new


def test_a_refused_call_costs_nothing_and_may_be_asked_again(tmp_path: Path) -> None:
    ledger = reopen(tmp_path / "l")
    ledger.end(begin(ledger, "k"), "refused", cost_usd=0.0, error="HTTP 429")
    assert ledger.budget.remaining_usd == 2.0
    assert ledger.find("k") is None
    assert begin(ledger, "k").new


def test_a_torn_last_line_is_removed_reported_and_counts_as_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "l"
    first = reopen(path)
    first.end(begin(first, "a"), "answered", cost_usd=0.1, text="A")
    first.end(begin(first, "b"), "answered", cost_usd=0.1, text="B")
    first.close()
    path.write_bytes(path.read_bytes()[:-20])
    with caplog.at_level(logging.WARNING):
        second = reopen(path)
    assert "cut short" in caplog.text
    assert second.torn_lines == 1
    known = second.find("b")
    assert known is not None
    assert known.outcome == "started"
    assert second.budget.spent_usd + second.budget.reserved_usd == pytest.approx(0.1 + 0.5)
    second.end(begin(second, "c"), "answered", cost_usd=0.2, text="C")
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == [
        "start",
        "end",
        "start",
        "start",
        "end",
    ]


def test_every_possible_cut_leaves_a_readable_ledger_that_never_forgets_money(tmp_path: Path) -> None:
    path = tmp_path / "l"
    first = reopen(path)
    first.end(begin(first, "a"), "answered", cost_usd=0.1, text="é\n\ud800")
    whole = path.read_bytes()
    start_ends = whole.index(b"\n") + 1
    for cut in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:cut])
        ledger = reopen(path)
        committed = ledger.budget.spent_usd + ledger.budget.reserved_usd
        assert committed == (0.5 if start_ends <= cut < len(whole) else 0.1 if cut == len(whole) else 0)
        ledger.close()


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger = reopen(path)
    begin(ledger, "a")
    path.write_bytes(b"garbage\n" + path.read_bytes())
    with pytest.raises(LedgerError, match=r"line 1 of .* is damaged.*repair the line"):
        reopen(path)


def test_two_owners_of_one_file_share_the_budget_and_the_answers(tmp_path: Path) -> None:
    old, new = reopen(tmp_path / "l", 1.0), reopen(tmp_path / "l", 1.0)
    first = begin(old, "a", 0.6)
    with pytest.raises(BudgetExceeded):
        begin(new, "b", 0.6)
    assert not begin(new, "a", 0.1).new
    old.end(first, "answered", cost_usd=0.2, text="A")
    assert begin(new, "a").text == "A"
    assert begin(new, "b", 0.6).new


def test_concurrent_threads_and_owners_never_reserve_more_than_the_limit(tmp_path: Path) -> None:
    owners = [reopen(tmp_path / "l", 1.0) for _ in range(3)]

    def spend(i: int) -> bool:
        ledger = owners[i % 3]
        try:
            entry = begin(ledger, f"k{i}", 0.15)
        except BudgetExceeded:
            return False
        ledger.end(entry, "answered", cost_usd=0.1 if i % 2 else 0.15, text="x")
        return True

    with ThreadPoolExecutor(8) as pool:
        sent = list(pool.map(spend, range(40)))
    auditor = reopen(tmp_path / "l", 1.0).budget
    assert 6 <= sum(sent) <= 9
    assert auditor.spent_usd <= 1.0
    assert auditor.reserved_usd == 0


def test_a_ledger_locked_by_someone_else_is_a_timely_error(tmp_path: Path) -> None:
    holder = reopen(tmp_path / "l")
    with holder._exclusive(), pytest.raises(LedgerError, match="locked by another process"):
        Ledger(tmp_path / "l", Budget(1.0), lock_wait_s=0.05)


def test_a_closed_ledger_says_so(tmp_path: Path) -> None:
    ledger = reopen(tmp_path / "l")
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        begin(ledger, "k")
