import re
from pathlib import Path
from typing import Any

import pytest

from services.runs import RunFolder, find_run
from services.runs.folder import runs_in


def test_a_new_run_has_every_place_the_design_names(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs", "first")
    assert run.path == tmp_path / "runs" / "first"
    assert {p.name for p in run.path.iterdir()} == {"tb", "rollouts", "checkpoints", "logs", "buffer"}
    files = [run.config, run.mesh_ref, run.metrics, run.teachers, run.status, run.lock]
    names = ["config.toml", "mesh.ref", "metrics.jsonl", "teachers.jsonl", "status.json", "driver.lock"]
    assert [f.relative_to(run.path).name for f in files] == names


def test_the_default_name_is_time_and_a_word(tmp_path: Path) -> None:
    assert re.fullmatch(r"\d{8}-\d{6}-[a-z]+", RunFolder(tmp_path).name)


def test_a_used_name_is_refused_with_the_fix_and_nothing_changes(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "first")
    run.write_status({"step": 3})
    with pytest.raises(FileExistsError, match=r"choose another name.*milkweed resume first"):
        RunFolder(tmp_path, "first")
    assert run.read_status() == {"step": 3}


def test_an_empty_folder_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    assert RunFolder(tmp_path, "first").checkpoints.is_dir()


@pytest.mark.parametrize("name", ["../escape", "a/b", ".hidden", "with space", "a" * 101])
def test_names_that_are_no_plain_folder_name_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not usable: take"):
        RunFolder(tmp_path / "runs", name)
    assert list(tmp_path.iterdir()) == []


def test_a_config_comes_back_as_it_was_written(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "name": 'quotes " and \\ and\nlines, ä',
        "steps": 80,
        "lr": 1e-05,
        "inline": False,
        "empty": {},
        "trainer": {"objective": "grpo", "clip": [0.2, 0.28], "deep": {"er": ["a", "b"]}},
        "teachers": [{"name": "first", "urls": ["http://a", "http://b"]}, {"name": "second", "budget": {"usd": 1.5}}],
        "key with.dot": 1,
    }
    run = RunFolder(tmp_path, "first")
    run.write_config(config)
    assert run.read_config() == config


def test_none_is_left_out_of_a_config_and_refused_in_a_list(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "first")
    run.write_config({"a": None, "b": {"c": None, "d": 1}, "e": [{"f": None}]})
    assert run.read_config() == {"b": {"d": 1}, "e": [{}]}
    with pytest.raises(ValueError, match=r"'b\.c' is a list with None"):
        run.write_config({"b": {"c": [1, None]}})
    with pytest.raises(TypeError, match=r"'b\[0\]' is a set"):
        run.write_config({"b": [{1}]})


def test_a_missing_or_broken_config_is_explained(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "first")
    with pytest.raises(FileNotFoundError, match=r"'first' has no config\.toml"):
        run.read_config()
    run.config.write_text("steps = ")
    with pytest.raises(ValueError, match=r"config\.toml is not valid TOML"):
        run.read_config()


def test_the_status_is_empty_before_it_is_said(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "first")
    assert run.read_status() == {}
    run.write_status({"state": "running", "step": 4})
    assert run.read_status() == {"state": "running", "step": 4}


def test_a_run_is_found_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "runs", "first")
    monkeypatch.chdir(tmp_path)
    for given in ("first", run.path, "runs/first", "./runs/first/"):
        assert find_run(given).path == run.path, given


def test_an_unknown_run_is_answered_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no run 'third'.*there are no runs"):
        find_run("third", tmp_path)
    RunFolder(tmp_path, "first")
    RunFolder(tmp_path, "second")
    with pytest.raises(FileNotFoundError, match=r"no run 'third'.*newest first: .*first"):
        find_run("third", tmp_path)
    assert sorted(runs_in(tmp_path)) == ["first", "second"]


@pytest.mark.parametrize("given", ["", ".", "other"])
def test_a_folder_that_is_no_run_is_neither_taken_for_one_nor_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no run"):
        find_run(given)
    with pytest.raises(FileNotFoundError, match="is no run"):
        RunFolder(tmp_path, "other", resume=True)
    assert list((tmp_path / "other").iterdir()) == []
