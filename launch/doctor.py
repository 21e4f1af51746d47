"""What works on this machine, found by trying it, and for the rest the reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import services.weights.region
from services.engines import vllm_package
from services.weights import plane


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    works: bool
    detail: str


def checks() -> Iterator[Check]:
    """Engines, devices, RDMA, transports, launchers; each tried, none assumed."""
    for name, package in [("monarch", "torchmonarch"), ("torch", "torch"), ("OpenEnv", "openenv-core")]:
        yield _try(name, partial(_version, package))
    yield _try("engine: transformers", _transformers)
    yield _try("engine: vllm", _vllm)
    yield _try("device: cuda", _cuda)
    yield _try("RDMA backend", _rdma)
    yield _try("transport: shared memory", _shared_memory)
    yield _try("transport: torchstore", _torchstore)
    yield Check("launcher: local", True, "milkweed run")
    yield Check("launcher: slurm", False, "this version of Milkweed launches on this machine only")


def _try(name: str, probe: Callable[[], str]) -> Check:
    try:
        return Check(name, True, probe())
    except (PackageNotFoundError, ImportError, RuntimeError, OSError) as error:
        detail = f"{error} is not installed" if isinstance(error, PackageNotFoundError) else str(error)
        return Check(name, False, detail)


def _version(package: str) -> str:
    return f"version {version(package)}"


def _transformers() -> str:
    if fault := vllm_package.broken_beside_torch():
        raise RuntimeError(fault)
    return _version("transformers")


def _vllm() -> str:
    package = vllm_package.import_vllm()
    from vllm.platforms import current_platform

    return f'{package}, for generator.engine.device = "{current_platform.device_type}"'


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        raise RuntimeError(
            f"this torch is built for CUDA {built}, but no GPU answers" if built else "a CPU build of torch"
        )
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def _rdma() -> str:
    from monarch.rdma import get_rdma_backend

    backend = get_rdma_backend()
    if backend == "none":
        raise RuntimeError("Monarch finds none, not even its fallback over TCP")
    return f"{backend} (no RDMA hardware here: bytes go over TCP)" if backend == "tcp" else backend


def _torchstore() -> str:
    plane.torchstore_plane()
    return f"version {plane.TORCHSTORE}"


def _shared_memory() -> str:
    region = services.weights.region.Region(4096)
    try:
        return f"{region.path.parent}, {shutil.disk_usage(region.path.parent).free / 2**30:.1f} GiB free"
    finally:
        region.path.unlink()
