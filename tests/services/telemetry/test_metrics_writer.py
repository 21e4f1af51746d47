import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from services.telemetry.metrics import MetricsWriter, read_metrics


def steps(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run)]


def events(run: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(run / "tb"), size_guidance={"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def write_steps(run: Path, first: int, stop: int, resume_at: int | None = None) -> None:
    with MetricsWriter(run, resume_at) as writer:
        for step in range(first, stop):
            writer.write(step, {"reward/mean": step / 10})


def test_each_step_is_one_whole_line_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward/mean": 0.25, "trainer/forward": 1.5})
        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
        row = json.loads(line)
        assert line.endswith("\n")
        assert list(row) == ["step", "time", "reward/mean", "trainer/forward"]
        assert (row["step"], row["reward/mean"], row["trainer/forward"]) == (0, 0.25, 1.5)
        writer.write(1, {})
        assert steps(tmp_path) == [0, 1]


def test_numbers_that_json_lacks_become_null_and_are_counted(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a": math.nan, "b": -math.inf, "c": None, "d": 1.0})
        writer.write(1, {"a": 2.0})
        assert writer.nonfinite == 2
    first, second = read_metrics(tmp_path)
    assert (first["a"], first["b"], first["c"], first["d"]) == (None, None, None, 1.0)
    assert first["telemetry/nonfinite"] == 2.0
    assert "telemetry/nonfinite" not in second


def test_resuming_cuts_the_steps_that_will_be_done_again(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 6)
    write_steps(tmp_path, 4, 8, resume_at=4)
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(6):
            writer.write(step, {"reward/mean": 1.0, "gone_after_resume": 1.0})
    with MetricsWriter(tmp_path, resume_at=4) as writer:
        writer.write(4, {"reward/mean": 2.0})
    shown = events(tmp_path)
    assert [(e.step, e.value) for e in shown.Scalars("reward/mean")] == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2)]
    assert [e.step for e in shown.Scalars("gone_after_resume")] == [0, 1, 2, 3]


def test_a_torn_last_line_is_left_out_and_cut_at_resume(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 3)
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 3, "reward/me')
    assert steps(tmp_path) == [0, 1, 2]
    write_steps(tmp_path, 3, 4, resume_at=3)
    assert steps(tmp_path) == [0, 1, 2, 3]


def test_a_broken_line_inside_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON"):
        read_metrics(path)


def test_existing_metrics_are_not_appended_to_by_accident(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 2)
    with pytest.raises(ValueError, match="pass resume_at"):
        MetricsWriter(tmp_path)
    assert steps(tmp_path) == [0, 1]


def test_resuming_a_run_that_has_no_metrics_yet_starts_them(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 2, resume_at=0)
    assert steps(tmp_path) == [0, 1]
    assert read_metrics(tmp_path / "missing.jsonl") == []


def test_scalars_and_the_staleness_histogram_reach_tensorboard(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, {"reward/mean": 0.5, "bad": math.nan}, {"staleness": [0.0, 0.0, 1.0, 4.0, math.nan]})
        writer.write(4, {}, {"staleness": [2.0, 2.0], "empty": []})
    shown = events(tmp_path)
    assert [(e.step, e.value) for e in shown.Scalars("reward/mean")] == [(3, 0.5)]
    assert set(shown.Tags()["scalars"]) == {"reward/mean", "telemetry/nonfinite"}
    assert shown.Tags()["histograms"] == ["staleness"]
    first, second = (event.histogram_value for event in shown.Histograms("staleness"))
    assert (first.min, first.max, first.num, first.sum, first.sum_squares) == (0.0, 4.0, 4, 5.0, 17.0)
    assert sum(first.bucket) == 4
    assert first.bucket[0] == 2
    assert sum(second.bucket) == 2


@pytest.mark.parametrize("name", ["step", "time"])
def test_a_metric_cannot_take_the_lines_own_keys(tmp_path: Path, name: str) -> None:
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match=f"'{name}'.*rename"):
        writer.write(0, {name: 1.0})
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("value", ["0.5", [1.0, 2.0]])
def test_a_value_that_is_no_number_is_refused_by_name(tmp_path: Path, value: object) -> None:
    with MetricsWriter(tmp_path) as writer, pytest.raises(TypeError, match="'reward/mean'"):
        writer.write(0, {"reward/mean": value})  # type: ignore[dict-item]
    assert read_metrics(tmp_path) == []


def test_writing_metrics_loads_no_torch() -> None:
    code = "import sys, services.telemetry.metrics, services.telemetry.table; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=120, check=False).returncode == 0
