"""A KV cache whose rows join and leave the running batch one by one.

Every slot holds one sequence, the token at position `p` in column `p + 1`; column 0 takes what padding writes and is
never read. Because a column says its position, rows of any length share a forward pass: the mask lets a query at
position `p` see the first `p + 1` tokens of its own slot, and whatever an earlier sequence left beyond them stays
unseen until it is overwritten. A sequence therefore can be continued for as long as nobody else takes its slot.

    slot 0   # a b c d e .      running, 5 tokens         #  scratch column
    slot 1   # a b x . . .      finished, kept for reuse  .  left over or never written
    slot 2   # k l m n . .      running, 4 tokens

New tokens are right-aligned in the batch, so the last column of the logits is each row's next-token prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(slots=True)
class Window:
    """Which part of the cache one forward pass writes and reads."""

    slots: slice | torch.Tensor  # the rows of the batch; a slice is read in place, a tensor `(batch,)` is gathered
    cells: torch.Tensor  # `(batch * width,)` int64, slot * columns + column, of every token in the batch
    length: int  # tokens visible to the longest row, its new ones included


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, `(slots, columns, heads, head_dim)`: a token's heads are contiguous."""

    is_sliding = False

    def __init__(self, owner: KVSlots) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._storage(key_states)
        self.values = self._storage(value_states)
        self.is_initialized = True

    def _storage(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros(self.owner.slots, self.owner.columns, states.shape[1], states.shape[3])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `(batch, heads, width, head_dim)` and return the window's `(batch, heads, length, head_dim)`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write_and_read(self.keys, key_states), self._write_and_read(self.values, value_states)

    def _write_and_read(self, storage: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
        assert storage is not None
        window = self.owner.window
        storage.flatten(0, 1).index_copy_(0, window.cells, states.transpose(1, 2).flatten(0, 1))
        rows = storage[:, 1 : window.length + 1]
        rows = rows[window.slots] if isinstance(window.slots, slice) else rows.index_select(0, window.slots)
        return rows.transpose(1, 2)

    def widen(self) -> None:
        """Move what is stored into storage with as many columns as the owner has now."""
        if self.keys is None or self.values is None:
            return
        for name, old in (("keys", self.keys), ("values", self.values)):
            new = old.new_zeros(self.owner.slots, self.owner.columns, *old.shape[2:])
            new[:, : old.shape[1]] = old
            setattr(self, name, new)

    def clear(self, slot: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys[slot].zero_()
            self.values[slot].zero_()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.window.length, 0

    def get_seq_length(self) -> int:
        return self.owner.window.length

    def get_max_length(self) -> int:
        return self.owner.max_length


class KVSlots(Cache):
    """`slots` sequences of up to `max_length` tokens for a decoder of `layers` attention layers.

    Columns are added as sequences get longer, so short ones cost no memory for `max_length`.
    """

    def __init__(self, layers: int, slots: int, max_length: int, device: torch.device) -> None:
        self.slot_layers = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=[*self.slot_layers])
        self.slots = slots
        self.max_length = max_length
        self.columns = min(128, max_length + 1)
        self.device = device
        self.window = Window(slice(0, 0), torch.empty(0, dtype=torch.long), 0)

    def open(self, slots: list[int], starts: list[int], counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Point the cache at the rows of the coming forward pass.

        Row `i` adds `counts[i]` tokens at position `starts[i]` of slot `slots[i]`; 0 tokens makes it a row of padding.
        Consecutive ascending slots are read in place, others are gathered. Returns `position_ids` and `visible`:
        `(batch, width)` int64 and `(batch, 1, width, length)` bool, new tokens right-aligned in the width.
        """
        width, length = max(counts), max(start + count for start, count in zip(starts, counts, strict=True))
        self._reserve(length)
        start, count, slot = torch.tensor([starts, counts, slots], device=self.device)[:, :, None]
        offset = torch.arange(width, device=self.device) - (width - count)
        positions = torch.where(offset >= 0, start + offset, 0)
        # Padding writes to column 0, where no read looks; its query sees the first token, so that no softmax is empty.
        cells = slot * self.columns + torch.where(offset >= 0, positions + 1, 0)
        in_place = all(after == before + 1 for before, after in pairwise(slots))
        rows = slice(slots[0], slots[-1] + 1) if in_place else slot.flatten()
        self.window = Window(rows, cells.flatten(), length)
        visible = torch.arange(length, device=self.device) <= positions[:, :, None]
        return positions, visible[:, None]

    def _reserve(self, length: int) -> None:
        if length < self.columns:
            return
        self.columns = min(max(2 * self.columns, length + 1), self.max_length + 1)
        for layer in self.slot_layers:
            layer.widen()

    def clear(self, slot: int) -> None:
        """Zero a slot. Needed only where it holds NaN or infinity: masked keys weigh 0, and 0 times NaN is NaN."""
        for layer in self.slot_layers:
            layer.clear(slot)
