"""Attention over packed sequences, as one more implementation that transformers' attention interface knows.

A model that looks its attention up there (`config._attn_implementation`) runs packed without a change to its code. It
is given `sequences=Boundaries` as a keyword argument, which its layers hand down, and a mask of four dimensions, which
they hand down as it is: nobody builds a (T, T) mask. A call without `sequences` is an ordinary one and goes to SDPA, so
that generation and padded forward passes of the same model go on working.

On CUDA in half precision all sequences go into one variable-length flash attention call. Elsewhere each run of
sequences of equal length is one SDPA call. Dropout is never applied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from services.models import ModelError
from services.training.packing import Boundaries

PACKED_ATTENTION = "milkweed_packed"
VARLEN_HEAD_DIM = 256  # flash attention's largest

# Keyword arguments that change nothing for a causal forward pass without a cache. What is not named here may.
_HARMLESS = {"position_ids", "use_cache", "cache_position", "is_causal", "dropout", "return_dict", "output_attentions"}


class PackingError(ModelError):
    """The model cannot run packed; the message says why and what to do."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequences: Boundaries | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row.

    `query` (1, heads, T, D), `key` and `value` (1, key-value heads, T, D) -> (1, T, heads, D), None. Raises
    PackingError for an argument whose meaning is not known here.
    """
    if sequences is None:
        if attention_mask is not None and attention_mask.numel() == 1 < query.shape[2]:
            raise PackingError("it does not hand keyword arguments down to its attention")
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    unknown = [
        name for name, given in others.items() if name not in _HARMLESS and given is not None and given is not False
    ]
    if unknown:
        raise PackingError(f"its attention takes {', '.join(unknown)}")
    if sliding_window is not None:
        sequences.windows.add(sliding_window)
        if sliding_window >= sequences.longest:
            sliding_window = None
    if _varlen_serves(query, value):
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (T, heads, D)
        offsets, longest = sequences.offsets, sequences.longest
        attended = varlen_attn(
            q, k, v, offsets, offsets, longest, longest,
            scale=scaling, window_size=window, enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        assert isinstance(attended, Tensor)  # and not a pair, which is for those who ask for more
        return attended[None], None
    runs = sequences.runs()
    # Split, not sliced one by one: each slice's backward would fill a tensor as large as the whole row with zeros.
    sizes = [count * length for count, length in runs]
    split = (tensor[0].split(sizes, dim=1) for tensor in (query, key, value))
    parts = [_one_run(q, k, v, run, scaling, sliding_window) for q, k, v, run in zip(*split, runs, strict=True)]
    return torch.cat(parts)[None], None


def _varlen_serves(query: Tensor, value: Tensor) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and query.shape[-1] == value.shape[-1] <= VARLEN_HEAD_DIM


def _one_run(
    query: Tensor, key: Tensor, value: Tensor, run: tuple[int, int], scaling: float | None, window: int | None
) -> Tensor:
    """Attention of a run of sequences of equal length: (heads, count * length, D) -> (count * length, heads, D)."""
    count, length = run
    q, k, v = (tensor.unflatten(1, (count, length)).transpose(0, 1) for tensor in (query, key, value))
    mask = None
    if window is not None and window < length:
        behind = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
        mask = (behind >= 0) & (behind < window)
    attended = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=len(query) != len(key)
    )
    return attended.transpose(1, 2).flatten(0, 1)


def handed_down_mask(device: torch.device) -> Tensor:
    """The mask of four dimensions that stands for none: models pass such a mask on instead of building one."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
