import os
import stat
import threading
from pathlib import Path

import pytest

from services.runs.atomic import sweep_asides, write_atomic


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, "ä")
    assert path.read_bytes() == "ä".encode()
    write_atomic(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_secret_is_the_owners_alone_from_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    fsync = os.fsync

    def look(descriptor: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    old = os.umask(0)
    try:
        write_atomic(tmp_path / "mesh.ref", "secret", mode=0o600)
    finally:
        os.umask(old)
    assert modes[0] == 0o600
    assert stat.S_IMODE((tmp_path / "mesh.ref").stat().st_mode) == 0o600


def test_readers_never_see_a_mixture(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    versions = [letter * 50_000 for letter in "ab"]
    write_atomic(path, versions[0])
    done = threading.Event()

    def write() -> None:
        for i in range(40):
            write_atomic(path, versions[i % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = {path.read_text()}
    while not done.is_set():
        seen.add(path.read_text())
    writer.join(timeout=60)
    assert seen <= set(versions)


def test_what_a_killed_writer_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".kept.md.0badcafe.aside").write_text("half")
    write_atomic(tmp_path / "kept.md", "whole")
    sweep_asides(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.md"]
    sweep_asides(tmp_path / "not made yet")
