import pytest

from services.cache import cache_folder, fill_once


def test_the_cache_follows_xdg_cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "milkweed"


def test_a_folder_is_filled_once_and_stands_alone(tmp_path):
    folder = tmp_path / "cache" / "model"
    assert fill_once(folder, _fill) == folder
    assert fill_once(folder, lambda _: pytest.fail("filled again")) == folder
    assert list(folder.parent.iterdir()) == [folder]


def test_a_fill_that_fails_leaves_nothing(tmp_path):
    def die(aside):
        _fill(aside)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill_once(tmp_path / "model", die)
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_fill_at_once_the_first_to_finish_stays(tmp_path):
    folder = tmp_path / "model"

    def overtaken(aside):
        _fill(folder)
        (folder / "first").touch()
        _fill(aside)

    assert fill_once(folder, overtaken) == folder
    assert (folder / "first").exists()
    assert list(tmp_path.iterdir()) == [folder]


def _fill(folder):
    folder.mkdir()
    (folder / "weights").touch()
