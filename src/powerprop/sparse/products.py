"""Products of a sparse matrix with columns, activations as [features, batch]: by the kernel, else by torch.

    forward:   y = W x + b              backward:   dx = Wᵀ g,   dW = g xᵀ where W has weights

The twins are held to each other by the tests; `kernel/sparse.c` has the loops.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from powerprop import kernel
from powerprop.sparse.pattern import Pattern, numbers

__all__ = ["backward", "check_values", "forward", "transposed"]

_LEAST = 16
"""Columns that the kernel wants at least: a vector."""
_CHUNK = 1 << 22
"""Numbers at a time in the twin."""


def forward(pattern: Pattern, values: Tensor, x: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """y = W x + b, with relu max(0, y): (columns, n) -> (rows, n)."""
    rows, columns = pattern.shape
    n = _width(x, columns, "x")
    check_values(pattern, values, x)
    if bias is not None:
        _check(bias, (rows,), "bias", x)
    if not _suits(x, values, *(() if bias is None else (bias,))) or n == 0:
        y = torch.sparse.mm(_csr(pattern, values), x) if n else x.new_empty(rows, 0)
        y = y if bias is None else y + bias[:, None]
        return y.relu() if relu else y
    x = _wide(x)
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
    pattern: Pattern, values: Tensor, x: Tensor, g: Tensor, wants_x: bool = True
) -> tuple[Tensor | None, Tensor]:
    """From g = ∂L/∂y (rows, n) to ∂L/∂x (columns, n), if it is wanted, and ∂L/∂values, in one pass."""
    rows, columns = pattern.shape
    n = _width(x, columns, "x")
    _check(g, (rows, n), "g", x)
    check_values(pattern, values, x)
    if not _suits(x, values, g) or n == 0:
        return _backward_by_torch(pattern, values, x, g, wants_x)
    x, g = _wide(x), _wide(g)
    dx, dv = torch.empty_like(x) if wants_x else None, torch.empty_like(values)
    kernel.loaded().powerprop_sparse_backward(
        pattern.turned_pointers,
        pattern.turned_indices,
        pattern.at,
        values.data_ptr(),
        x.data_ptr(),
        g.data_ptr(),
        None if dx is None else dx.data_ptr(),
        dv.data_ptr(),
        columns,
        x.shape[1],
        torch.get_num_threads(),
    )
    return (dx if dx is None or n >= _LEAST else dx[:, :n]), dv


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


def _suits(*tensors: Tensor) -> bool:
    """True if the kernel is there and these are plain float32 without gaps."""
    return kernel.library() is not None and all(kernel.is_plain(t) and t.is_contiguous() for t in tensors)


def _wide(columns: Tensor) -> Tensor:
    """At least a vector of columns."""
    n = columns.shape[1]
    return columns if n >= _LEAST else F.pad(columns, (0, _LEAST - n))


def _width(x: Tensor, rows: int, name: str) -> int:
    if x.dim() != 2 or x.shape[0] != rows or not x.is_floating_point():
        raise ValueError(f"{name} must be floating-point columns ({rows}, n), got {x.dtype} of shape {tuple(x.shape)}")
    return x.shape[1]


def check_values(pattern: Pattern, values: Tensor, x: Tensor) -> None:
    """An error if these are not the pattern's, or not of the activations' kind."""
    _check(values, (pattern.count,), "values", x)


def _check(tensor: Tensor, shape: tuple[int, ...], name: str, x: Tensor) -> None:
    """An error for what does not fit x: nothing is broadcast or converted."""
    if tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device:
        raise ValueError(
            f"{name} must be {x.dtype} of shape {shape} on {x.device}, as the activations are, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        )
