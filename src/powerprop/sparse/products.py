"""Products of a sparse matrix with columns, activations as [features, batch]: by the kernel, else by torch.

    forward:   y = W x + b              backward:   dx = Wᵀ g,   dW = g xᵀ where W has weights

The twins are held to each other by the tests; `kernel/sparse.c` has the loops.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from powerprop import kernel
from powerprop.sparse.pattern import Pattern, numbers

__all__ = ["backward", "check_values", "forward", "transposed"]

Given = tuple[Tensor, tuple[int, ...]]

_LEAST = 16
"""Columns that the kernel wants at least: a vector."""
_CHUNK = 1 << 22
"""Numbers at a time in the twin."""


def forward(pattern: Pattern, values: Tensor, x: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """y = W x + b, with relu max(0, y): (columns, n) -> (rows, n)."""
    (rows, columns), n = pattern.shape, _width(x)
    given = [(x, (columns, n)), (values, (pattern.count,))] + ([] if bias is None else [(bias, (rows,))])
    if not _suits(n, given):
        _check(given, "x", "values", "bias")
        y = torch.sparse.mm(_csr(pattern, values), x) if n else x.new_empty(rows, 0)
        y = y if bias is None else y + bias[:, None]
        return y.relu() if relu else y
    x = _wide(x, n)
    y = x.new_empty(rows, x.shape[1])
    kernel.loaded().powerprop_sparse_forward(
        pattern.pointers,
        pattern.indices,
        values.data_ptr(),
        x.data_ptr(),
        y.data_ptr(),
        None if bias is None else bias.data_ptr(),
        rows,
        x.shape[1],
        relu,
        torch.get_num_threads(),
    )
    return y if n >= _LEAST else y[:, :n]


def backward(
    pattern: Pattern, values: Tensor, x: Tensor, g: Tensor, wants_x: bool = True, wants_bias: bool = False
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """From g = ∂L/∂y (rows, n) to ∂L/∂x (columns, n), if it is wanted, ∂L/∂values and ∂L/∂b, in one pass."""
    (rows, columns), n = pattern.shape, _width(x)
    given = [(x, (columns, n)), (values, (pattern.count,)), (g, (rows, n))]
    if not _suits(n, given):
        _check(given, "x", "values", "g")
        return *_backward_by_torch(pattern, values, x, g, wants_x), g.sum(1) if wants_bias else None
    x, g = _wide(x, n), _wide(g, n)
    dx, dv, db = torch.empty_like(x) if wants_x else None, torch.empty_like(values), None
    if wants_bias:
        db = g.new_empty(rows)
    kernel.loaded().powerprop_sparse_backward(
        pattern.turned_pointers,
        pattern.turned_indices,
        pattern.at,
        values.data_ptr(),
        x.data_ptr(),
        g.data_ptr(),
        None if dx is None else dx.data_ptr(),
        dv.data_ptr(),
        None if db is None else db.data_ptr(),
        rows,
        columns,
        x.shape[1],
        torch.get_num_threads(),
    )
    return (dx if dx is None or n >= _LEAST else dx[:, :n]), dv, db


def transposed(x: Tensor) -> Tensor:
    """(n, m) -> (m, n) in memory, on a CPU three times as fast as `x.t().contiguous()`.

    Shuffling the n·m channels of a single pixel in n groups is a transposition, which torch has vectorised for images
    whose channels lie side by side, without a gradient.
    """
    n, m = x.shape
    if not (n and m and x.is_cpu and x.is_contiguous()) or (x.requires_grad and torch.is_grad_enabled()):
        return x.t().contiguous()
    pixel = x.as_strided((1, n * m, 1, 1), (n * m, 1, n * m, n * m))
    return torch.native_channel_shuffle(pixel, n).view(m, n)


def _backward_by_torch(
    pattern: Pattern, values: Tensor, x: Tensor, g: Tensor, wants_x: bool
) -> tuple[Tensor | None, Tensor]:
    n, dx = x.shape[1], None
    if wants_x:
        dx = torch.sparse.mm(_csr(pattern, values, turned=True), g) if n else torch.empty_like(x)
    flat, columns = pattern.places(), max(1, pattern.shape[1])
    pieces = torch.split(flat, max(1, _CHUNK // max(1, n)))
    dots = [(g[part // columns] * x[part % columns]).sum(1) for part in pieces]
    return dx, torch.cat(dots) if dots else torch.zeros_like(values)


def _csr(pattern: Pattern, values: Tensor, turned: bool = False) -> Tensor:
    """torch's own sparse matrix."""
    contents = (pattern.turned_pointers, pattern.turned_indices) if turned else (pattern.pointers, pattern.indices)
    pointers, indices = (torch.from_numpy(numbers(content).copy()) for content in contents)
    values = values[torch.from_numpy(numbers(pattern.at).astype("i8"))] if turned else values
    shape = pattern.shape[::-1] if turned else pattern.shape
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(pointers, indices, values, shape, check_invariants=False)


def _suits(n: int, given: Sequence[Given]) -> bool:
    """True if the kernel is there and these are plain float32 of these shapes, without gaps."""
    if n == 0 or kernel.library() is None:
        return False
    return all(t.shape == shape and t.is_contiguous() and kernel.is_plain(t) for t, shape in given)


def _wide(columns: Tensor, n: int) -> Tensor:
    """At least a vector of columns."""
    return columns if n >= _LEAST else F.pad(columns, (0, _LEAST - n))


def _width(x: Tensor) -> int:
    return x.shape[1] if x.dim() == 2 else -1


def check_values(pattern: Pattern, values: Tensor, x: Tensor) -> None:
    """An error if these are not the pattern's, or not of the activations' kind."""
    _check([(x, (pattern.shape[1], _width(x))), (values, (pattern.count,))], "x", "values")


def _check(given: Sequence[Given], *names: str) -> None:
    """An error for what is not columns of numbers, or does not fit them: nothing is broadcast or converted."""
    (x, shape), *others = given
    if x.shape != shape or not x.is_floating_point():
        raise ValueError(f"x must be floating-point columns ({shape[0]}, n), got {x.dtype} of shape {tuple(x.shape)}")
    for name, (tensor, shape) in zip(names[1:], others, strict=False):
        if tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device:
            raise ValueError(
                f"{name} must be {x.dtype} of shape {shape} on {x.device}, as the activations are, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            )
