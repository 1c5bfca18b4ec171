"""A mask update where the active weights alone are held: who stays, who is grown, without a mask of the layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from powerprop import kernel
from powerprop.sparse.pattern import Pattern

__all__ = ["Regrowth", "largest", "regrow"]

_SAMPLE = 4096


class Regrowth(NamedTuple):
    """What becomes of a layer's weights.

    pattern: the new one.
    stays: a mask of the old weights that are in it.
    source: for each weight of it, which one it was; of those that were not there, any.
    grown: which ones were not there.
    against: what each of these was grown by.
    """

    pattern: Pattern
    stays: Tensor
    source: Tensor
    grown: Tensor
    against: Tensor

    def carried(self, old: Tensor, new: Tensor | float = 0.0) -> Tensor:
        """Numbers of the old weights for the new pattern, and others for those that were not there."""
        made = old.index_select(0, self.source) if old.numel() else old.new_zeros(self.pattern.count)
        fresh = new if isinstance(new, Tensor) else torch.full(self.grown.shape, new)
        return made.index_copy_(0, self.grown, fresh.to(made.dtype))


def regrow(pattern: Pattern, survivors: Tensor, blocks: Iterable[Tensor], count: int) -> Regrowth:
    """Drop all but the survivors (a mask of the weights) and grow those that are largest in magnitude elsewhere.

    blocks: the matrix to grow by, some rows at a time. It is written to.
    """
    places = pattern.places().numpy()
    kept = survivors.numpy()
    chosen, against = largest(blocks, count, places[kept])
    lost = places[~kept]
    at = np.searchsorted(lost, chosen).clip(max=max(0, lost.size - 1))
    back = lost[at] == chosen if lost.size else np.zeros(chosen.size, bool)  # dropped and grown again: nothing happens
    stays = kept.copy()
    stays[np.flatnonzero(~kept)[at[back]]] = True
    staying, new = places[stays], chosen[~back]
    grown = np.searchsorted(staying, new) + np.arange(new.size)
    old = np.ones(staying.size + new.size, bool)
    old[grown] = False
    merged, source = np.empty(old.size, np.int64), np.zeros(old.size, np.int64)
    merged[grown], merged[old] = new, staying
    source[old] = np.flatnonzero(stays)
    made = Pattern.at_places(pattern.shape, merged)
    return Regrowth(made, *map(torch.from_numpy, (stays, source, grown, against[~back])))


def largest(
    blocks: Iterable[Tensor], count: int, without: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.floating]]:
    """The places, rising, and values of the largest magnitudes of a matrix; among equals the first in memory.

    Only what is at least as large as the smallest of the largest so far is looked at twice.

    without: places, rising, that take no part.
    """
    at, found = np.zeros(0, np.int64), np.zeros(0, np.float32)
    start, threshold = 0, 0.0
    for block in blocks:
        flat = block.detach().view(-1)
        inside = without[np.searchsorted(without, start) : np.searchsorted(without, start + flat.numel())] - start
        numbers = flat.numpy()
        numbers[inside] = np.nan
        size = _guess(numbers, count) if found.size < count else threshold
        here = _above(numbers, size)
        if np.count_nonzero(np.abs(found) >= size) + here.size < count:  # the guess was too high
            here = _above(numbers, threshold)
        at, found = np.concatenate([at, start + here]), np.concatenate([found, numbers[here]])
        if found.size > count:
            stays = _top(np.abs(found), count)
            at, found = at[stays], found[stays]
            threshold = float(np.abs(found).min()) if count else float("inf")
        start += numbers.size
    return at, found


def _guess(numbers: NDArray[np.floating], count: int) -> float:
    """A size that somewhat more numbers than so many reach, by a sample of them."""
    sample = np.abs(numbers[:: numbers.size // _SAMPLE | 1])
    sample = sample[sample == sample]
    more = int(1.3 * count * sample.size / max(1, numbers.size)) + 16
    return float(np.partition(sample, sample.size - more)[sample.size - more]) if more < sample.size else 0.0


def _top(sizes: NDArray[np.floating], count: int) -> NDArray[np.bool_]:
    """A mask of the largest; among equals the first."""
    if count == 0:
        return np.zeros(sizes.size, bool)
    last = np.partition(sizes, sizes.size - count)[sizes.size - count]
    mask: NDArray[np.bool_] = sizes > last
    mask[np.flatnonzero(sizes == last)[: count - np.count_nonzero(mask)]] = True
    return mask


def _above(piece: NDArray[np.floating], threshold: float) -> NDArray[np.integer]:
    """Where the magnitude reaches the threshold, which NaN never does."""
    library = kernel.library()
    if library is None or piece.dtype != np.float32:
        return np.flatnonzero(np.abs(piece) >= threshold)
    out = np.empty(piece.size, np.int32)
    count = library.powerprop_sparse_above(piece.ctypes.data, piece.size, threshold, out.ctypes.data)
    return out[:count]
