"""Loading a causal language model and its tokenizer by path: the one place that calls the model hub's loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


class ModelError(ValueError):
    """The model cannot be used; the message says why and what to do."""


def load_tokenizer(path: str) -> Any:
    """The model's own tokenizer. ModelError when it is missing or has no chat template or end-of-sequence token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=Path(path).exists())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no tokenizer at {path!r}: {_short(error)}; set model.path to a Hugging Face folder"
        ) from None
    if tokenizer.chat_template is None:
        raise ModelError(f"the tokenizer at {path!r} has no chat template; save one with it (tokenizer.chat_template)")
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer at {path!r} has no eos token; a turn could not end")
    return tokenizer


def generation_stop_ids(path: str) -> list[int]:
    """The ids at which generation ends by the model's own generation config; none where it has none or says nothing."""
    try:
        found = GenerationConfig.from_pretrained(path, local_files_only=Path(path).exists()).eos_token_id
    except OSError:
        return []
    return [found] if isinstance(found, int) else list(found or [])


def load_model(path: str, dtype: str = "float32", device: str = "cpu") -> Any:
    """The causal language model at `path`, in `dtype` on `device`, without dropout. ModelError when there is none."""
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), local_files_only=Path(path).exists()
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"no model at {path!r}: {_short(error)}; set model.path to a Hugging Face folder") from None
    return model.to(device).eval()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
