"""Layers with their matrix on the left: linear ones, sparse or dense, and convolutions, most of them unfolded."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from powerprop.export.csr import columns, copied_columns, product, rows, to_csr

__all__ = ["ColumnsLinear", "MatrixLayer", "RowsLinear", "SparseConv", "in_form", "matrix", "sparse_layer"]

FEW = 0.5
"""With less than this part of its inputs in use, a linear layer on many rows first picks those: turning rows into
columns takes longer than a very sparse product."""

BLOCK = 2**18
"""Unfolded numbers at a time: one megabyte of float32 stays in the cache between unfolding and the product."""


def matrix(layer: nn.Module) -> Tensor | None:
    """The weight of a layer as a matrix (outputs, inputs), or None if the layer has no sparse form."""
    if type(layer) is nn.Linear:
        return layer.weight
    if isinstance(layer, _ConvNd) and not isinstance(layer, _ConvTransposeNd) and layer.groups == 1:
        return layer.weight.flatten(1)
    # Hugging Face's linear layer of GPT-2, which holds its weight as (inputs, outputs).
    if type(layer).__name__ == "Conv1D" and isinstance(getattr(layer, "nf", None), int):
        weight = layer.weight
        assert isinstance(weight, Tensor)
        return weight.t()
    return None


def sparse_layer(layer: nn.Module, many: bool) -> MatrixLayer:
    """The sparse form of a layer that has one, for one input at a time or for many."""
    return SparseConv(layer) if isinstance(layer, _ConvNd) else ColumnsLinear(layer, many, csr=True)


def in_form(layer: nn.Module, form: str, many: bool) -> MatrixLayer:
    """A layer in the form of a `Choice` other than "dense"."""
    if form == "sparse":
        return sparse_layer(layer, many)
    if form == "columns" and not isinstance(layer, _ConvNd):
        return ColumnsLinear(layer, many, csr=False)
    raise ValueError(f"a {type(layer).__name__} layer has no form {form!r}")


class MatrixLayer(nn.Module):
    """W, in CSR or dense, and b, as a vector and as a column."""

    weight: Tensor
    bias: Tensor
    stacked: Tensor

    def __init__(self, weight: Tensor, bias: Any, csr: bool = True) -> None:
        super().__init__()
        bias = bias.detach().clone() if isinstance(bias, Tensor) else weight.new_zeros(len(weight))
        self.register_buffer("weight", to_csr(weight) if csr else weight.detach().contiguous())
        self.register_buffer("bias", bias)
        self.register_buffer("stacked", bias.unsqueeze(1))


class ColumnsLinear(MatrixLayer):
    """y = W x + b on columns, with W in CSR or dense, for inputs of any number of dimensions.

    many: for many rows at a time; then inputs that no weight reads are left out, if they are many too.
    """

    used: Tensor | None

    def __init__(self, layer: nn.Module, many: bool, csr: bool) -> None:
        weight = matrix(layer)
        assert weight is not None
        used = weight.detach().any(0).nonzero().squeeze(1)
        few = many and len(used) < FEW * weight.shape[1]
        super().__init__(weight[:, used] if few else weight, layer.bias, csr)
        self.register_buffer("used", used if few else None)
        self.turn = copied_columns if csr else columns

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        y = product(self.weight, self.bias, self.stacked, self.turn(x.reshape(-1, x.shape[-1]), self.used))
        return rows(y).contiguous().view(*x.shape[:-1], len(self.bias))


class RowsLinear(nn.Module):
    """y = x Wᵀ + b with Wᵀ at hand, which `F.linear` finds anew for every call."""

    turned: Tensor
    bias: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.register_buffer("turned", weight.t())
        self.register_buffer("bias", weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        return F.linear(x, self.turned.t(), self.bias)


class SparseConv(MatrixLayer):
    """A convolution as W_csr times the unfolded image: no unfolding for a 1x1 kernel of stride 1."""

    def __init__(self, layer: _ConvNd) -> None:
        weight = matrix(layer)
        assert weight is not None
        super().__init__(weight, layer.bias)
        self.kernel, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        self.padding: list[int] = layer._reversed_padding_repeated_twice
        self.mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, *size) or one image without n -> the same with the output's channels and size."""
        if x.dim() == len(self.kernel) + 1:
            return self.forward(x.unsqueeze(0))[0]
        x = F.pad(x, self.padding, self.mode) if any(self.padding) else x
        size = [self._length(i, length) for i, length in enumerate(x.shape[2:])]
        result = x.new_empty(len(x), len(self.bias), math.prod(size))
        group = max(1, BLOCK // (self.weight.shape[1] * max(1, math.prod(size))))
        for start in range(0, len(x), group):
            part, place = x[start : start + group], result[start : start + group]
            unfolded = self._unfold(part, size)
            if len(part) == 1:
                torch.addmm(self.stacked, self.weight, unfolded, out=place[0])
            else:
                outputs = torch.addmm(self.stacked, self.weight, unfolded)
                place.copy_(outputs.view(len(self.bias), len(part), -1).transpose(0, 1))
        return result.view(len(x), len(self.bias), *size)

    def _length(self, i: int, length: int) -> int:
        return (length - self.dilation[i] * (self.kernel[i] - 1) - 1) // self.stride[i] + 1

    def _unfold(self, x: Tensor, size: list[int]) -> Tensor:
        """(n, channels, *padded) -> (channels · kernel, n · size): a strided view, copied once."""
        x = x if len(x) == 1 else x.transpose(0, 1).contiguous().transpose(0, 1)
        n, channels, *steps = x.stride()
        inside = [step * d for step, d in zip(steps, self.dilation, strict=True)]
        outside = [step * s for step, s in zip(steps, self.stride, strict=True)]
        view = x.as_strided(
            (x.shape[1], *self.kernel, len(x), *size), (channels, *inside, n, *outside), x.storage_offset()
        )
        return view.reshape(self.weight.shape[1], -1)
