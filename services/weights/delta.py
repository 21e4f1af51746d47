"""The words of a block that changed, in few bytes: their positions as gaps of one byte, then the words themselves.

An optimizer step with a small learning rate leaves most bf16 weights as they are, because it is smaller than half the
distance to the next bf16 number. What is sent then is a few percent of the block, and nothing is lost: the words are
the new version's own.

A gap is the distance from one changed word to the next (the first: from the block's start). 255 means "255 further and
no word yet", so that any distance can be written; the others end at a changed word. Where 1 % of bf16 words changed,
that makes 3.1 bytes for each of them.
"""

from __future__ import annotations

import numpy as np

_ESCAPE = 255
_WORTH = 0.5  # of the block: beyond it, packing and applying cost more time than the bytes saved


def compare(old: np.ndarray, new: np.ndarray) -> tuple[int, tuple[np.ndarray, np.ndarray] | None]:
    """How many words differ, and their gaps (uint8) and new values; None instead when the block is better sent whole.

    `old` and `new` are equally long 1-D arrays of unsigned words.
    """
    differs = old != new
    count = int(np.count_nonzero(differs))
    if count * (1 + new.itemsize) + len(new) // _ESCAPE > _WORTH * new.nbytes:
        return count, None
    positions = np.flatnonzero(differs)
    return count, (_gaps(positions), new[positions])


def apply(words: np.ndarray, gaps: np.ndarray, values: np.ndarray) -> None:
    """Put the changed words into the block. ValueError when they do not fit it, which leaves it as it was."""
    positions = np.cumsum(gaps, dtype=np.int64)[gaps != _ESCAPE]
    if len(positions) != len(values) or (len(positions) and positions[-1] >= len(words)):
        raise ValueError(f"{len(values)} words at {len(positions)} positions are no delta of {len(words)} words")
    words[positions] = values


def _gaps(positions: np.ndarray) -> np.ndarray:
    gaps = np.diff(positions, prepend=0)
    written = gaps.astype(np.uint8)
    far = np.flatnonzero(gaps >= _ESCAPE)
    if not len(far):
        return written
    written[far] = gaps[far] % _ESCAPE
    return np.insert(written, np.repeat(far, gaps[far] // _ESCAPE), _ESCAPE)
