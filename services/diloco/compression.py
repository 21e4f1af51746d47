"""What of a pseudo-gradient is sent: all of it, its upper half (bf16), or its largest elements (top-k).

The average is of what was sent. Top-k keeps the rest and adds it to the next pseudo-gradient (error feedback, arXiv
1901.09847): nothing is lost for good, it comes later.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Compression(ABC):
    """Of one fragment's flat pseudo-gradients. `pack` may be called again for the same sync, and packs the same."""

    residual: Tensor | None = None  # what is owed, shaped as the pseudo-gradient; None where nothing is

    @abstractmethod
    def fresh(self, like: Tensor) -> Compression:
        """One of this kind for a fragment whose pseudo-gradients are as `like`."""

    @abstractmethod
    def pack(self, gradient: Tensor) -> Tensor:
        """What is averaged in the place of `gradient`. May be the same tensor."""

    @abstractmethod
    def unpack(self, average: Tensor, out: Tensor) -> None:
        """Write the average of packed tensors into `out`."""

    @abstractmethod
    def nbytes(self, packed: Tensor) -> int:
        """Bytes of the message that holds no more than what is left."""

    def committed(self) -> None:  # noqa: B027
        """What was packed last is part of the average. Of interest to who owes something."""

    def reset(self) -> None:
        """Nothing is owed."""
        if self.residual is not None:
            self.residual.zero_()


class NoCompression(Compression):
    def fresh(self, like: Tensor) -> Compression:
        return NoCompression()

    def pack(self, gradient: Tensor) -> Tensor:
        return gradient

    def unpack(self, average: Tensor, out: Tensor) -> None:
        if average is not out:
            out.copy_(average)

    def nbytes(self, packed: Tensor) -> int:
        return packed.nbytes


class BF16(NoCompression):
    """Half the bytes: rounded to bfloat16 (8 bits of mantissa), weighted, added up and sent as such."""

    def fresh(self, like: Tensor) -> Compression:
        return BF16()

    def pack(self, gradient: Tensor) -> Tensor:
        return gradient.bfloat16()


class TopK(NoCompression):
    """The `ratio` of a fragment's elements that are largest in size; `feedback` False forgets the others.

    An all-reduce adds up dense tensors, so that over gloo the zeros between them travel too; `nbytes` counts values and
    int32 positions, which is what a transport that sends each contribution as a file needs.
    """

    def __init__(self, ratio: float, *, feedback: bool = True) -> None:
        self.ratio, self._feedback = ratio, feedback
        self._left: Tensor | None = None  # owed if the sync under way succeeds

    def fresh(self, like: Tensor) -> Compression:
        made = TopK(self.ratio, feedback=self._feedback)
        made.residual = torch.zeros_like(like) if self._feedback else None
        return made

    def pack(self, gradient: Tensor) -> Tensor:
        """The gradient and what is owed, zeroed but for its largest elements. `gradient` itself is overwritten."""
        if self.residual is not None:
            gradient.add_(self.residual)
        kept = max(1, math.ceil(self.ratio * gradient.numel()))
        largest = gradient.abs().topk(kept, sorted=False).indices
        packed = torch.zeros_like(gradient)
        packed[largest] = gradient[largest]
        gradient[largest] = 0
        self._left = gradient.clone()
        return packed

    def nbytes(self, packed: Tensor) -> int:
        kept = max(1, math.ceil(self.ratio * packed.numel()))
        return kept * (packed.element_size() + 4)

    def committed(self) -> None:
        if self.residual is not None and self._left is not None:
            self.residual.copy_(self._left)
        self._left = None
