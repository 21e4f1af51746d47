from __future__ import annotations

import json
import os
import subprocess
import sys

import fsspec
import pytest

from services.environments.process import ROOT
from services.executors import Replica, ReplicaSpec
from services.executors.replica_entrypoint import main, run
from services.executors.results import read_record, write_record

TESTS = ROOT / "tests"


def arguments(store, target="replica_targets:describe", **changed):
    given = {"target": target, "rank": "0", "world-size": "2", "uri": str(store), "payload": "{}", **changed}
    return [part for name, value in given.items() for part in (f"--{name}", value)]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"rank": "2"}, "--rank 2 is none of the 2 ranks"),
        ({"rank": "-1"}, "--rank -1 is none of the 2 ranks"),
        ({"world-size": "0"}, "world_size 0 must be at least 1"),
        ({"payload": "{lr: 1}"}, "--payload is not JSON"),
        ({"payload": "[1]"}, "payload must be a dict"),
        ({"target": "replica_targets"}, 'write "package.module:function"'),
        ({"uri": "memory://runs"}, "no store that replicas share"),
        ({"uri": "nowhere://runs"}, "store 'nowhere://runs' cannot be used"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(tmp_path, capsys, changed, why):
    assert main(arguments(tmp_path, **changed)) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


def test_the_module_runs_as_a_command_and_leaves_its_record(tmp_path):
    command = [sys.executable, "-m", "services.executors.replica_entrypoint", *arguments(tmp_path, payload='{"a": 1}')]
    paths = os.pathsep.join([str(ROOT), str(TESTS)])
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, timeout=200, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.decode().splitlines() == ["I am 0 of 2", "this went to standard error"]
    record = json.loads((tmp_path / "results" / "rank-0.json").read_text())
    assert record["value"] == {"rank": 0, "payload": {"a": 1}, "env": None}
    assert [p.name for p in (tmp_path / "results").iterdir()] == ["rank-0.json"]


@pytest.mark.parametrize(
    ("source", "code", "error"),
    [
        ("import no_such_package\ndef go(replica): ...", 1, "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise ValueError('no licence')", 1, "ValueError: no licence"),
        ("go = 3", 2, "has no function 'go'"),
    ],
)
def test_a_module_that_fails_while_it_is_imported_is_no_missing_target(tmp_path, monkeypatch, source, code, error):
    name = f"replica_module_{code}_{len(source)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    record = run(f"{name}:go", Replica(0, 1, str(tmp_path)))
    assert record["exit_code"] == code
    assert error in record["error"]


def test_a_missing_module_says_where_it_must_lie(tmp_path):
    record = run("no_such_package.module:go", Replica(0, 1, str(tmp_path)))
    assert record["exit_code"] == 2
    assert "no module 'no_such_package'" in record["error"]
    assert "PYTHONPATH" in record["error"]


def test_records_are_kept_by_launch_in_any_file_system():
    fs = fsspec.filesystem("memory")
    write_record("memory://replica-records", 3, {"launch": "a", "rank": 3, "value": [1]})
    try:
        assert read_record("memory://replica-records", 3, "a") == {"launch": "a", "rank": 3, "value": [1]}
        assert read_record("memory://replica-records", 3, "b") is None
        assert read_record("memory://replica-records", 2, "a") is None
    finally:
        fs.rm("/replica-records", recursive=True)


def test_a_store_that_takes_nothing_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr("services.executors.results._BACKOFF_S", 0.0)
    (tmp_path / "results").write_text("a file where the folder should be")
    with pytest.raises(OSError, match=r"could not be written to .*rank-0\.json"):
        write_record(str(tmp_path), 0, {"launch": "a", "rank": 0, "value": 1})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"payload": {"x": {1, 2}}}, "payload is not JSON"),
        ({"payload": {"x": "y" * 100_000}}, "put more into the store"),
        ({"limit_s": 0}, "limit_s 0 must be positive"),
        ({"world_size": 0}, "world_size 0"),
    ],
)
def test_a_spec_that_cannot_be_launched_is_refused_when_it_is_made(tmp_path, changed, why):
    with pytest.raises(ValueError, match=why):
        ReplicaSpec(**{"target": "a.b:c", "world_size": 1, "uri": str(tmp_path), **changed})


def test_a_relative_store_is_the_same_folder_for_every_replica(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ReplicaSpec("a.b:c", 1, "store").uri == str(tmp_path / "store")
