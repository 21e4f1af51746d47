import json
from pathlib import Path

import numpy as np
import pytest

from services.telemetry.plot import ablation_curves, plot_ablation, plot_metrics

PNG = b"\x89PNG\r\n"


def rows(arm: str, seed: int, points: list[tuple[float, float | None]]) -> list[dict[str, object]]:
    return [{"arm": arm, "seed": seed, "rollouts": x, "reward": y} for x, y in points]


def test_a_curve_is_the_mean_over_seeds_with_a_band_of_one_deviation() -> None:
    table = rows("rl", 0, [(8, 0.0), (16, 0.5)]) + rows("rl", 1, [(8, 1.0), (16, 0.5)])
    curve = ablation_curves(table)["rl"]
    assert curve.seeds == 2
    np.testing.assert_allclose(curve.rollouts, [8, 16])
    np.testing.assert_allclose(curve.mean, [0.5, 0.5])
    np.testing.assert_allclose(curve.high - curve.mean, [np.sqrt(0.5), 0.0])  # sample deviation of 0 and 1
    np.testing.assert_allclose(curve.mean - curve.low, curve.high - curve.mean)


def test_seeds_with_different_counts_are_interpolated_within_their_common_range() -> None:
    table = rows("rl", 0, [(0, 0.0), (10, 1.0), (20, 1.0)]) + rows("rl", 1, [(5, 0.5), (15, 0.5)])
    curve = ablation_curves(table)["rl"]
    np.testing.assert_allclose(curve.rollouts, [5, 10, 15])
    np.testing.assert_allclose(curve.mean, [0.5, 0.75, 0.75])


def test_arms_keep_the_tables_order_and_one_seed_has_no_band() -> None:
    table = rows("rl+sdpo", 0, [(8, 0.1), (16, None), (24, 0.3)]) + rows("rl", 0, [(8, 0.0)])
    curves = ablation_curves(table)
    assert list(curves) == ["rl+sdpo", "rl"]
    np.testing.assert_allclose(curves["rl+sdpo"].rollouts, [8, 24])
    np.testing.assert_allclose(curves["rl+sdpo"].low, curves["rl+sdpo"].high)


def test_an_ablation_without_data_or_overlap_says_so() -> None:
    with pytest.raises(ValueError, match=r"no row with a reward"):
        ablation_curves(rows("rl", 0, [(8, None)]))
    with pytest.raises(ValueError, match=r"arm 'rl'.*in common"):
        ablation_curves(rows("rl", 0, [(0, 0.0), (5, 0.0)]) + rows("rl", 1, [(6, 0.0), (9, 0.0)]))


def test_the_ablation_is_drawn_into_a_picture(tmp_path: Path) -> None:
    table = rows("rl", 0, [(8, 0.0), (16, 0.5)]) + rows("rl", 1, [(8, 1.0), (16, 0.5)]) + rows("sdpo", 0, [(8, 1.0)])
    path = plot_ablation(table, tmp_path / "ablation.png")
    assert path.read_bytes().startswith(PNG)


def test_metrics_of_one_or_more_runs_are_drawn_with_gaps_for_null(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        lines = [
            {"step": s, "time": 0.0, "reward/mean": None if s == 1 else 0.5, "idle/trainer": 0.1} for s in range(3)
        ]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plot_metrics(tmp_path / "one") == tmp_path / "one" / "metrics.png"
    both = plot_metrics([tmp_path / "one", tmp_path / "two"], tmp_path / "both.png")
    assert both.read_bytes().startswith(PNG)


def test_a_run_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}: no step has been trained"):
        plot_metrics(tmp_path)
