"""The store's one promise: a file is whole or absent, and of many that put it at once exactly one wins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry as opened

from services.diloco.object_store_files import MalformedFileError, Store

ROOT = Path(__file__).parents[3]
LIMIT_S = 120


class Ballots(MemoryFileSystem):
    """A store without a conditional put."""

    protocol = "ballots"
    store: dict = {}  # noqa: RUF012  as its base class has it
    pseudo_dirs = [""]  # noqa: RUF012


fsspec.register_implementation("ballots", Ballots)


@pytest.fixture(params=["local", "memory", "ballots"])
def uri(request, tmp_path):
    return str(tmp_path / "store") if request.param == "local" else f"{request.param}://{uuid.uuid4().hex}/store"


def race(stores, path):
    with ThreadPoolExecutor(len(stores)) as threads:
        puts = [threads.submit(s.put_if_absent, path, json.dumps({"by": s.rank}).encode()) for s in stores]
        return [put.result(timeout=LIMIT_S) for put in puts]


def test_of_many_threads_that_put_at_once_one_wins(uri):
    stores = [Store(uri, rank, 8) for rank in range(8)]
    for number in range(20):
        held = race(stores, f"folder/file-{number}")
        assert len(set(held)) == 1
        assert json.loads(held[0])["by"] in range(8)
        assert stores[0].read(f"folder/file-{number}") == held[0]


def test_who_puts_second_gets_what_the_first_put(uri):
    first, second = Store(uri, 0, 2), Store(uri, 1, 2)
    assert first.put_if_absent("a/b", b'"first"') == b'"first"'
    assert second.put_if_absent("a/b", b'"second"') == b'"first"'


def test_of_many_processes_that_put_at_once_one_wins(tmp_path):
    code = (
        "import sys; from services.diloco.object_store_files import Store\n"
        "rank = int(sys.argv[1]); store = Store(sys.argv[2], rank, 4); sys.stdin.readline()\n"
        "print([store.put_if_absent(f'f{n}', str(rank).encode()).decode() for n in range(200)])"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(tmp_path)],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for rank in range(4)
    ]  # fmt: skip
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    outputs = {child.communicate(timeout=LIMIT_S)[0] for child in children}
    assert [child.returncode for child in children] == [0] * 4
    assert len(outputs) == 1
    assert len(os.listdir(tmp_path)) == 200


def test_a_voter_that_died_in_the_vote_does_not_stop_the_others():
    """Rank 1 promised, and rank 2 accepted a value that some replica may hold to be decided: it must be taken."""
    uri = f"ballots://{uuid.uuid4().hex}"
    store = Store(uri, 0, 3)
    store.write("M-ballot-0001", json.dumps({"promised": 31, "accepted": 0, "value": None}).encode())
    store.write("M-ballot-0002", json.dumps({"promised": 23, "accepted": 23, "value": '"theirs"'}).encode())
    assert store.put_if_absent("M", b'"mine"') == b'"theirs"'


def test_a_local_path_without_links_is_voted_on(tmp_path, monkeypatch):
    def no_links(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    stores = [Store(str(tmp_path), rank, 3) for rank in range(3)]
    assert len(set(race(stores, "M"))) == 1
    assert (tmp_path / "M-ballot-0000").exists()


def test_a_store_that_ignores_the_condition_is_found_out(monkeypatch):
    from services.diloco import object_store_files

    class Careless(Ballots):
        protocol = "careless"

        def pipe_file(self, path, value, mode="overwrite", **options):
            super().pipe_file(path, value)

    fsspec.register_implementation("careless", Careless, clobber=True)
    monkeypatch.setattr(object_store_files, "CONDITIONAL_PUT", {"careless"})
    first, second = (Store("careless://x/y", rank, 2) for rank in range(2))
    assert first.put_if_absent("M", b'"first"') == second.put_if_absent("M", b'"second"') == b'"first"'


def test_values_come_back_as_they_were_saved(uri):
    store = Store(uri, 0, 2)
    value = {"tensors": [torch.randn(3), torch.ones(2, dtype=torch.bfloat16)], "weight": 2.5, "names": ["a", None]}
    store.save("a/b/c.pt", value)
    back = store.load("a/b/c.pt")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(back["tensors"], value["tensors"], strict=True))
    assert (back["weight"], back["names"]) == (2.5, ["a", None])
    assert store.names("a/b") == ["c.pt"]
    assert store.names() == ["a"]


def test_what_is_not_there_is_absent(uri):
    store = Store(uri, 0, 2)
    assert store.read("nothing") is None
    assert store.read_json("nothing") is None
    assert store.names("nothing") == []
    with pytest.raises(FileNotFoundError):
        store.load("nothing.pt")
    store.remove("nothing")


def test_a_file_that_is_no_json_is_named(uri):
    store = Store(uri, 0, 2)
    store.write("M", b"{half")
    with pytest.raises(MalformedFileError, match=r"/M is no JSON"):
        store.read_json("M")


def test_opening_a_store_leaves_nothing_in_it(uri):
    assert Store(uri, 0, 2).names() == []


def test_a_failed_write_leaves_the_old_file_and_nothing_aside(tmp_path):
    store = Store(str(tmp_path), 0, 2)
    store.save("x.pt", {"a": 1})
    with pytest.raises(Exception, match="pickle"):
        store.save("x.pt", {"a": lambda: None})
    assert store.load("x.pt") == {"a": 1}
    assert os.listdir(tmp_path) == ["x.pt"]


def test_an_unknown_protocol_is_one_sentence():
    with pytest.raises(ValueError, match=r"^nope://x: fsspec knows no store nope://; use a path, s3://, .*$"):
        Store("nope://x", 0, 2)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(opened, "s3", raising=False)  # another test may have opened one
    with pytest.raises(ImportError, match=r"^s3://bucket/x needs a package that is missing .*s3fs"):
        Store("s3://bucket/x", 0, 2)


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be written .*diloco.uri"):
        Store(str(tmp_path / "file" / "below"), 0, 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused_at_once(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match=r"cannot be written .*Permission denied"):
        Store(str(tmp_path), 0, 2)


def test_an_operation_that_fails_is_tried_again(monkeypatch):
    store, failures = Store(f"memory://{uuid.uuid4().hex}", 0, 2), [ConnectionError("gone"), ConnectionError("gone")]
    pipe = MemoryFileSystem.pipe_file

    def flaky(self, *arguments, **options):
        if failures:
            raise failures.pop()
        return pipe(self, *arguments, **options)

    monkeypatch.setattr("services.diloco.object_store_files.time.sleep", lambda seconds: None)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", flaky)
    store.write("x", b"1")
    assert store.read("x") == b"1"
    failures += [ConnectionError("gone")] * 3
    with pytest.raises(OSError, match=r"/x: cannot write it, tried 3 times: gone"):
        store.write("x", b"2")
