"""Images that are copies of others, or as good as copies."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from powerprop.data.locate import Bytes

NEAR = 10.0
"""Images are near-duplicates if their pixels differ by at most this many of 255 grey levels (root mean square)."""

BLOCK_ROWS = 512


def has_near_duplicate(x: Bytes, limit: float = NEAR) -> npt.NDArray[np.bool_]:
    """For each image, whether the set has another that is near it: sqrt(mean (a - b)²) ≤ limit over the pixels.

    It is exact and the same on every machine: candidates come from a product of matrices, and their distance is then
    computed in whole numbers. Images are compared only with those of nearly the same sum of pixels, as the difference
    of two sums is at most limit times the number of pixels.
    """
    pixels, inverse, copies = np.unique(x.reshape(len(x), -1), axis=0, return_inverse=True, return_counts=True)
    order = pixels.sum(1, dtype=np.int64).argsort(kind="stable")
    pixels, found = pixels[order], (copies > 1)[order]
    sums = pixels.sum(1, dtype=np.int64)
    ends = np.searchsorted(sums, sums + math.floor(limit * pixels.shape[1]), side="right")
    floats = pixels.astype(np.float32)
    squares = np.einsum("ij,ij->i", floats, floats)
    most = limit**2 * pixels.shape[1]
    for start in range(0, len(pixels), BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, len(pixels))
        block = slice(start, int(ends[stop - 1]))
        distance = squares[start:stop, None] + squares[None, block] - 2 * floats[start:stop] @ floats[block].T
        # float32 is off by less than a few hundred here; the margin lets no pair slip through
        left, right = np.nonzero(np.triu(distance <= 1.1 * most + 1000, 1))
        for i, j in zip(left + start, right + start, strict=True):
            if not (found[i] and found[j]) and _squared_distance(pixels[i], pixels[j]) <= most:
                found[i] = found[j] = True
    result: npt.NDArray[np.bool_] = found[order.argsort()[inverse.reshape(-1)]]
    return result


def _squared_distance(a: Bytes, b: Bytes) -> int:
    return int(np.square(a.astype(np.int64) - b).sum())
