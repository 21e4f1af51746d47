"""What is done to the model inside vLLM: functions that its `collective_rpc` calls with its worker.

vLLM keeps weights in forms of its own: q, k and v of a layer fused, and on CPU a packed copy of every matrix beside or
instead of the plain one. Its layerwise reload makes those forms anew from Hugging Face tensors and copies them into the
tensors in use, whose addresses CUDA graphs hold. Of a fused layer it needs all parts: given some, it keeps the old.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


@torch.no_grad()
def load(worker: Any, tensors: Mapping[str, torch.Tensor], everything: bool) -> None:
    """Reload the layers that `tensors` name, all their parts given. RuntimeError when not `everything` was reloaded.

    After an error some layers have new weights and some old: load the old ones again.
    """
    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config), _kept_on_error(model):
        initialize_layerwise_reload(model)
        loaded = model.load_weights(tensors.items())
        finalize_layerwise_reload(model, worker.model_runner.model_config)
        _pack_tied_head(model)
    left = sorted({name for name, _ in model.named_parameters()} - set(loaded)) if everything else []
    if left:
        raise RuntimeError(f"vLLM took no weights for {len(left)} of its parameters: {', '.join(left[:3])}")


@contextmanager
def _kept_on_error(model: torch.nn.Module) -> Iterator[None]:
    """Put the tensors in use back into their modules if a reload breaks off: it leaves placeholders in their place."""
    names = ("_parameters", "_buffers", "_non_persistent_buffers_set")
    before = [(module, {name: vars(module)[name].copy() for name in names}) for module in model.modules()]
    try:
        yield
    except Exception:
        for module, registries in before:
            vars(module).update(registries)
            get_layerwise_info(module).reset()
        raise


def _pack_tied_head(model: torch.nn.Module) -> None:
    """Pack a head again that shares its weight with the embedding: the reload packs only who was loaded by name."""
    head: Any = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if weight is None or not any(m is not head and getattr(m, "weight", None) is weight for m in model.modules()):
        return
    head.quant_method.process_weights_after_loading(head)


def release(worker: Any) -> None:
    """Free the bytes of weights and KV cache; the tensors keep their shapes."""
    for module in worker.model_runner.get_model().modules():
        vars(module).pop("cpu_linear", None)  # holds the packed matrix; the reload makes it anew
    for storage in _storages(worker):
        storage.resize_(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def take_back(worker: Any, sizes: list[int]) -> None:
    """Give what `release` freed its bytes again; of the KV cache they are zeros."""
    for storage, size in zip(_storages(worker), sizes, strict=True):
        storage.resize_(size)
    zero_cache(worker)


def zero_cache(worker: Any) -> None:
    """Forget every key and value to the last bit: masked ones weigh 0, and 0 times NaN is NaN."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def storage_sizes(worker: Any) -> list[int]:
    """Bytes of each storage that `release` frees."""
    return [storage.nbytes() for storage in _storages(worker)]


def _storages(worker: Any) -> list[torch.UntypedStorage]:
    """Each once, parameters before caches."""
    tensors = [*worker.model_runner.get_model().parameters(), *worker.model_runner.kv_caches]
    unique: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        unique.setdefault(storage._cdata, storage)
    return list(unique.values())
