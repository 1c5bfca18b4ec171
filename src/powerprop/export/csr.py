"""Products with sparse matrices: the one place that knows torch's CSR tensors."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

__all__ = ["product", "to_csr"]


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


def product(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """W x + b for columns x: (in, n) -> (out, n). A single column is a matrix-vector product, which is faster.

    With the sparse matrix on the left the result comes as columns again, so that a chain of layers copies nothing;
    `F.linear(x, csr)` is several times slower.
    """
    if x.shape[1] == 1:
        return torch.addmv(bias, weight, x[:, 0]).unsqueeze(1)
    return torch.addmm(bias.unsqueeze(1), weight, x)
