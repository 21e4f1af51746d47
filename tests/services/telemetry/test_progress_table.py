from io import StringIO

from rich.console import Console

from services.telemetry.table import ProgressTable

ROW = {
    "step": 12,
    "reward/mean": 0.3125,
    "policy/loss": -0.01234,
    "sdpo/loss": 0.5,
    "replay/loss": None,
    "staleness/mean": 1.25,
    "staleness/max": 3,
    "tokens_per_s": 12345.6,
    "idle/trainer": 0.4,
    "idle/generator": 0.05,
    "not/shown": 99.0,
}


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    out = StringIO()
    with ProgressTable(Console(file=out, width=20)) as table:
        table.update(ROW)
        table.update({**ROW, "step": 13})
    first, second = out.getvalue().splitlines()
    assert first == (
        "step 12  reward 0.312  policy loss -0.0123  sdpo loss 0.5000  replay loss -  stale mean 1.25  stale max 3  "
        "tokens/s 12,346  idle: trainer 40%, generator 5%"
    )
    assert second.startswith("step 13  ")
    assert "\x1b" not in out.getvalue()


def test_a_line_is_out_before_the_table_is_left() -> None:
    out = StringIO()
    with ProgressTable(Console(file=out)) as table:
        table.update(ROW)
        assert out.getvalue().count("\n") == 1


def test_a_step_without_any_metric_still_has_its_line() -> None:
    out = StringIO()
    with ProgressTable(Console(file=out)) as table:
        table.update({"step": 0})
    assert out.getvalue().startswith("step 0  reward -  ")
    assert "idle" not in out.getvalue()


def test_a_role_that_reports_later_shows_a_gap_not_a_wrong_number() -> None:
    out = StringIO()
    with ProgressTable(Console(file=out)) as table:
        table.update({"step": 0, "idle/trainer": 0.5})
        table.update({"step": 1, "idle/rewarder": 1.0})
    first, second = out.getvalue().splitlines()
    assert first.endswith("idle: trainer 50%")
    assert second.endswith("idle: trainer -, rewarder 100%")


def test_a_terminal_shows_the_newest_rows_with_a_column_per_role() -> None:
    out = StringIO()
    with ProgressTable(Console(file=out, force_terminal=True, width=200), rows=2) as table:
        for step in (701, 702, 703):
            table.update({**ROW, "step": step})
        last = out.getvalue()[out.getvalue().rindex("703") - 2000 :]
    shown = last[last.rindex("policy loss") :]
    assert "idle trainer" in shown
    assert "idle generator" in shown
    assert "702" in shown
    assert "703" in shown
    assert "701" not in shown
    assert "40%" in shown


def test_the_terminal_is_given_back_when_the_run_fails() -> None:
    out = StringIO()
    try:
        with ProgressTable(Console(file=out, force_terminal=True, width=200)) as table:
            table.update(ROW)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")  # cursor shown after hidden
    else:
        raise AssertionError("the table swallowed the interrupt")
