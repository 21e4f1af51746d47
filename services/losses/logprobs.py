"""Token log-probabilities from logits, with the label shift and the sampling temperature in one place.

`logits[:, t]` predicts `token_ids[:, t + 1]`, so a sequence of T tokens has T - 1 log-probabilities, and the mask of
token t moves to column t - 1 with them. Masks come from spans: a pad id may equal the end-of-sequence id, so comparing
ids with `pad_token_id` would leave the end of a turn untrained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.losses.chunked import chunked_rows
from services.losses.divergence import check_temperature, entropy, log_probs
from services.losses.reduction import at_least_float32


def token_logprobs(
    logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0, token_chunk: int | None = None
) -> Tensor:
    """log p(token_ids[:, t + 1] | token_ids[:, :t + 1]) at the sampling temperature.

    `logits` (B, T, V), `token_ids` (B, T) int64 -> (B, T - 1), float32 (float64 for float64 logits). The temperature
    divides the logits, as the sampler's did: otherwise the ratio to the behaviour logprobs is wrong on every token.
    With `token_chunk`, rows are worked off in chunks that backward computes again, so that no float32 copy of the
    logits is kept. Raises ValueError on shapes that do not fit or a temperature that is not positive.
    """
    if logits.dim() != 3 or logits.shape[:2] != token_ids.shape:
        raise ValueError(
            f"token_logprobs: logits {tuple(logits.shape)} and token_ids {tuple(token_ids.shape)} must be "
            "(B, T, V) and (B, T) of the same B and T"
        )
    check_temperature(temperature)
    batch, length, vocab = logits.shape
    # All T columns are computed and the last one, which predicts nothing, is dropped: slicing it off the logits first
    # would copy them.
    rows = logits.reshape(-1, vocab)
    labels = token_ids.roll(-1, dims=1).reshape(-1, 1)

    def picked(row_logits: Tensor, row_labels: Tensor) -> Tensor:
        log_p = torch.log_softmax(at_least_float32(row_logits) / temperature, dim=1)
        return log_p.gather(1, row_labels).squeeze(1)

    values = picked(rows, labels) if token_chunk is None else chunked_rows(picked, rows, labels, token_chunk)
    return values.reshape(batch, length)[:, :-1]


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of each predicted distribution: (..., V) -> (...), float32 or float64."""
    return entropy(log_probs(logits, temperature))


def span_mask(spans: Sequence[Sequence[tuple[int, int]]], length: int) -> Tensor:
    """(B, length) bool, True inside the half-open spans of each sequence.

    Raises ValueError for a span outside `[0, length]`.
    """
    mask = torch.zeros(len(spans), length, dtype=torch.bool)
    for row, row_spans in enumerate(spans):
        for start, stop in row_spans:
            if not 0 <= start <= stop <= length:
                raise ValueError(f"span_mask: span ({start}, {stop}) of sequence {row} is not inside [0, {length}]")
            mask[row, start:stop] = True
    return mask


def shift_mask(mask: Tensor) -> Tensor:
    """The mask (B, T) over tokens as a mask (B, T - 1) over `token_logprobs`. Token 0 is predicted by nothing."""
    return mask[:, 1:]
