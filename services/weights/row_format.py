"""How rows of teacher logits lie in a byte region: whole, or cut to the likeliest tokens.

    whole   vocab values
    top-k   tail (float32) | k indices (int32) | k values

Rows are of equal length, so that any range of them is one range of bytes, and are read where they lie: a chunk of bytes
becomes tensors without a copy. Values are float32, or bfloat16 at half the bytes. Whole rows in bfloat16 are shifted so
that their largest logit is 0: no softmax sees the shift, and bfloat16, which resolves 1 part in 256, then errs least
where the probability is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mesh.messages import LogitsRef
from services.losses.reduction import at_least_float32
from services.losses.topk import TopKRows, top_k_rows

WireDtype = Literal["float32", "bfloat16"]
_WORD = 4  # bytes of a tail or an index


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Rows over `vocab` tokens; `top_k` 0 is whole rows. ValueError for sizes that make no sense."""

    vocab: int
    dtype: WireDtype = "float32"
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.vocab < 1 or not 0 <= self.top_k <= self.vocab or self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"rows need vocab >= 1, 0 <= top_k <= vocab, dtype float32 or bfloat16; got {self}")

    @classmethod
    def of(cls, ref: LogitsRef) -> RowFormat:
        return cls(ref.vocab, ref.dtype, ref.top_k)

    @property
    def row_bytes(self) -> int:
        if not self.top_k:
            return self.vocab * self._torch_dtype.itemsize
        words = _WORD * (1 + self.top_k) + self.top_k * self._torch_dtype.itemsize
        return -(-words // _WORD) * _WORD  # the next row's words are aligned, too

    def write(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        """Put logits (n, vocab), any float dtype and device, into `out`, n rows of bytes (uint8, CPU)."""
        target = self.read(out)
        if isinstance(target, TopKRows):
            cut = top_k_rows(logits, self.top_k)
            target.values.copy_(cut.values)
            target.indices.copy_(cut.indices)
            target.tail.copy_(cut.tail)
        elif self.dtype == "bfloat16":
            wide = at_least_float32(logits)
            target.copy_(wide - wide.amax(-1, keepdim=True))
        else:
            target.copy_(logits)

    def read(self, raw: torch.Tensor) -> torch.Tensor | TopKRows:
        """The rows that lie in `raw` (uint8, CPU), whole (n, vocab) or cut: views of it, in the format's dtype."""
        if not self.top_k:
            return raw.view(self._torch_dtype).view(len(raw) // self.row_bytes, self.vocab)
        rows = raw.view(len(raw) // self.row_bytes, self.row_bytes)
        indices_at, values_at = _WORD, _WORD * (1 + self.top_k)
        values_end = values_at + self.top_k * self._torch_dtype.itemsize
        return TopKRows(
            values=rows[:, values_at:values_end].view(self._torch_dtype),
            indices=rows[:, indices_at:values_at].view(torch.int32),
            tail=rows[:, :indices_at].view(torch.float32).squeeze(1),
        )

    @property
    def _torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16
