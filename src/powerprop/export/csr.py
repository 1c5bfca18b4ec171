"""Products with sparse matrices: the one place that knows torch's CSR tensors."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

__all__ = ["columns", "copied_columns", "product", "rows", "to_csr"]

WIDE = 8
"""From this many rows on the vectorised transposition is faster than the plain one."""


def to_csr(matrix: Tensor) -> Tensor:
    """A matrix as CSR with 32-bit indices, which halve what a product reads besides the values."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        csr = matrix.detach().to_sparse_csr()
        if matrix.numel() >= 2**31:
            return csr
        return torch.sparse_csr_tensor(
            csr.crow_indices().int(), csr.col_indices().int(), csr.values(), csr.shape, check_invariants=True
        )


def columns(x: Tensor, used: Tensor | None = None) -> Tensor:
    """(n, in) as the columns that `product` takes: (in, n), or a vector if there is but one; a view of x.

    used: the inputs that have weights at all, if the others were left out of the matrix.
    """
    x = x if used is None else x.index_select(1, used)
    return x.ravel() if x.shape[0] == 1 else x.t()


def copied_columns(x: Tensor, used: Tensor | None = None) -> Tensor:
    """`columns` as a sparse product wants them in memory; a dense one reads a view just as fast."""
    x = x if used is None else x.index_select(1, used)
    return transposed(x) if x.shape[0] >= WIDE else columns(x)


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


def rows(y: Tensor) -> Tensor:
    """The way back from `columns`: (n, out), as a view."""
    return y.unsqueeze(0) if y.dim() == 1 else y.t()


def product(weight: Tensor, bias: Tensor, stacked: Tensor, x: Tensor) -> Tensor:
    """W x + b for columns x: (in, n) -> (out, n), or for one vector, which is faster. The second bias is (out, 1).

    With the matrix, sparse or dense, on the left the result comes as columns again, so that a chain of layers copies
    nothing; `F.linear(x, csr)` is several times slower.
    """
    return torch.addmv(bias, weight, x) if x.dim() == 1 else torch.addmm(stacked, weight, x)
