"""Where the weights of a sparse matrix are: checked once, and immutable from then on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from powerprop import kernel
from powerprop.mask_entries import places

__all__ = ["Pattern"]

Indices = NDArray[np.int32]
_LIMIT = 2**31
_BLOCK = 1 << 20
"""Numbers of a matrix that are there at a time."""
_FAULTS = {
    1: "pointers that do not rise from 0 to the number of indices",
    2: "an index outside of its row, or out of order",
}


class Pattern:
    """The places of weights in a matrix, row by row, and the same transposed.

    shape: (rows, columns) of the matrix.
    pointers: where each row begins among the indices, and where the last one ends.
    indices: the columns of the weights, rising within each row.

    All of it is kept as bytes, which nobody can write to, so that a product need not check it again.
    """

    __slots__ = ("at", "count", "indices", "pointers", "shape", "turned_indices", "turned_pointers")

    def __init__(self, shape: tuple[int, int], pointers: Indices, indices: Indices) -> None:
        rows, columns = map(int, shape)
        if not (0 <= rows < _LIMIT and 0 <= columns < _LIMIT and indices.size < _LIMIT):
            raise ValueError(f"a pattern has fewer than 2³¹ rows, columns and weights, got {shape}, {indices.size}")
        if pointers.shape != (rows + 1,) or indices.ndim != 1 or {pointers.dtype, indices.dtype} != {np.dtype("i4")}:
            raise ValueError(
                f"a pattern of {rows} rows needs {rows + 1} pointers and a list of indices in int32, got "
                f"{pointers.dtype} of shape {pointers.shape} and {indices.dtype} of shape {indices.shape}"
            )
        self.shape, self.count = (rows, columns), int(indices.size)
        self.pointers, self.indices = pointers.tobytes(), indices.tobytes()
        turned = _turned(self)
        if isinstance(turned, int):
            raise ValueError(f"the pattern of a {rows} × {columns} matrix has {_FAULTS[turned]}")
        self.turned_pointers, self.turned_indices, self.at = turned

    @classmethod
    def of(cls, mask: Tensor) -> Pattern:
        """The entries of a matrix that are set."""
        if mask.dtype != torch.bool or mask.dim() != 2:
            raise ValueError(f"a pattern is made of a bool matrix, got {mask.dtype} of shape {tuple(mask.shape)}")
        return cls.at_places((len(mask), mask.shape[1]), places(mask).numpy())

    @classmethod
    def at_places(cls, shape: tuple[int, int], flat: NDArray[np.int64]) -> Pattern:
        """The entries with these flat indices, which rise."""
        if flat.size >= _LIMIT:
            raise ValueError(f"a pattern has fewer than 2³¹ weights, got {flat.size}")
        ends = np.searchsorted(flat, shape[1] * np.arange(shape[0] + 1, dtype=np.int64))
        rows = np.repeat(np.arange(shape[0], dtype=np.int64), np.diff(ends))
        return cls(shape, ends.astype("i4"), (flat - rows * shape[1]).astype("i4"))

    def __reduce__(self) -> tuple[object, ...]:
        return Pattern, (self.shape, numbers(self.pointers), numbers(self.indices))

    def __deepcopy__(self, memo: object) -> Pattern:
        return self

    def __repr__(self) -> str:
        return f"Pattern({self.shape[0]} × {self.shape[1]}, {self.count:,} weights)"

    def row_blocks(self) -> Iterator[tuple[int, int]]:
        """Rows from and to, for matrices of this shape that are made and looked at piece by piece."""
        height = max(1, _BLOCK // max(1, self.shape[1]))
        return ((start, min(start + height, self.shape[0])) for start in range(0, self.shape[0], height))

    def places(self) -> Tensor:
        """The flat indices of the weights, rising."""
        pointers = numbers(self.pointers)
        rows = np.repeat(np.arange(self.shape[0], dtype=np.int64), np.diff(pointers))
        return torch.from_numpy(rows * self.shape[1] + numbers(self.indices))

    def gather(self, matrix: Tensor) -> Tensor:
        """The entries of a matrix that are weights, in memory of their own."""
        return matrix.reshape(-1).index_select(0, self.places())

    def scatter(self, values: Tensor, onto: Tensor | None = None) -> Tensor:
        """A matrix of these weights, zero elsewhere, or what another one has there; differentiable."""
        flat = values.new_zeros(self.shape[0] * self.shape[1]) if onto is None else onto.reshape(-1)
        return flat.index_copy(0, self.places(), values).view(self.shape)

    def mask(self, chosen: Tensor | None = None) -> Tensor:
        """The mask of the weights, or of some of them."""
        return self.scatter(torch.ones(self.count, dtype=torch.bool) if chosen is None else chosen)


def numbers(content: bytes) -> Indices:
    """Indices to read."""
    return np.frombuffer(content, np.int32)


def _turned(pattern: Pattern) -> tuple[bytes, bytes, bytes] | int:
    """The transposed pattern, and where in the values its weights are; or what is wrong with this one."""
    rows, columns = pattern.shape
    library = kernel.library()
    if library is None:
        return _turned_by_numpy(pattern)
    made = [np.empty(size, np.int32) for size in (columns + 1, pattern.count, pattern.count)]
    fault = library.powerprop_sparse_transpose(
        pattern.pointers, pattern.indices, rows, columns, pattern.count, *(array.ctypes.data for array in made)
    )
    return int(fault) or (made[0].tobytes(), made[1].tobytes(), made[2].tobytes())


def _turned_by_numpy(pattern: Pattern) -> tuple[bytes, bytes, bytes] | int:
    pointers, indices = numbers(pattern.pointers), numbers(pattern.indices)
    counts = np.diff(pointers)
    if pointers[0] != 0 or pointers[-1] != indices.size or (counts < 0).any():
        return 1
    first = np.zeros(indices.size + 1, bool)
    first[pointers[:-1]] = True
    falls = (np.diff(indices, prepend=-1) <= 0) & ~first[:-1]
    if falls.any() or (indices < 0).any() or (indices >= pattern.shape[1]).any():
        return 2
    at = np.argsort(indices, kind="stable").astype(np.int32)
    turned = np.concatenate([[0], np.cumsum(np.bincount(indices, minlength=pattern.shape[1]))]).astype(np.int32)
    rows = np.repeat(np.arange(pattern.shape[0], dtype=np.int32), counts)
    return turned.tobytes(), rows[at].tobytes(), at.tobytes()
