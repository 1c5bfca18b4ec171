"""Layers as sparse products, and graphs of a few plain operations in which activations stay columns between them.

    linear:       y = (W xᵀ)ᵀ + b, with W in CSR on the left; (W₂ f((W₁ xᵀ))ᵀ)ᵀ = rows(W₂ f(W₁ columns(x)))
    convolution:  y = W unfolded(x) + b

This is the one place that knows torch's CSR tensors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from powerprop.export.graph import is_inplace, is_pointwise, module_of, replace_node, shape_of, tidy
from powerprop.sparse.products import transposed

__all__ = ["DenseLinear", "SparseConv", "SparseLinear", "columns", "lower", "matrix", "product", "rows"]

WIDE = 8
"""From this many rows on the vectorised transposition is faster than the plain one."""
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


# --- columns ----------------------------------------------------------------------------------------------------------


def columns(x: Tensor, used: Tensor | None = None) -> Tensor:
    """(n, in) as the columns that `product` takes: (in, n), or a vector if there is but one.

    used: the inputs that have weights at all, if the others were left out of the matrix.
    """
    x = x if used is None else x.index_select(1, used)
    if len(x) == 1:
        return x.ravel()
    return transposed(x) if len(x) >= WIDE else x.t()


def rows(y: Tensor) -> Tensor:
    """The way back from `columns`: (n, out), as a view."""
    return y.unsqueeze(0) if y.dim() == 1 else y.t()


def product(weight: Tensor, bias: Tensor, stacked: Tensor, x: Tensor) -> Tensor:
    """W x + b for columns x: (in, n) -> (out, n), or for one vector, which is faster. The second bias is (out, 1).

    With the sparse matrix on the left the result comes as columns again, so that a chain of layers copies nothing;
    `F.linear(x, csr)` is several times slower.
    """
    return torch.addmv(bias, weight, x) if x.dim() == 1 else torch.addmm(stacked, weight, x)


# --- layers -----------------------------------------------------------------------------------------------------------


def sparse_layer(layer: nn.Module, many: bool) -> SparseLinear | SparseConv:
    """The sparse form of a layer that has one, for one input at a time or for many."""
    return SparseConv(layer) if isinstance(layer, _ConvNd) else SparseLinear(layer, many)


class DenseLinear(nn.Module):
    """y = x Wᵀ + b with Wᵀ at hand, which `F.linear` finds anew for every call."""

    turned: Tensor
    bias: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.register_buffer("turned", weight.t())
        self.register_buffer("bias", weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """(n, in) -> (n, out)"""
        return torch.addmm(self.bias, x, self.turned)


class _Sparse(nn.Module):
    """W in CSR, and b as a vector and as a column."""

    weight: Tensor
    bias: Tensor
    stacked: Tensor

    def __init__(self, weight: Tensor, bias: object) -> None:
        super().__init__()
        bias = bias.detach().clone() if isinstance(bias, Tensor) else weight.new_zeros(len(weight))
        self.register_buffer("weight", to_csr(weight))
        self.register_buffer("bias", bias)
        self.register_buffer("stacked", bias.unsqueeze(1))


class SparseLinear(_Sparse):
    """y = W x + b on columns, for inputs of any number of dimensions.

    many: for many rows at a time; then inputs that no weight reads are left out, if they are many too.
    """

    used: Tensor | None

    def __init__(self, layer: nn.Module, many: bool) -> None:
        weight = matrix(layer)
        assert weight is not None
        used = weight.detach().any(0).nonzero().squeeze(1)
        few = many and len(used) < FEW * weight.shape[1]
        super().__init__(weight[:, used] if few else weight, layer.bias)
        self.register_buffer("used", used if few else None)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        y = product(self.weight, self.bias, self.stacked, columns(x.reshape(-1, x.shape[-1]), self.used))
        return rows(y).contiguous().view(*x.shape[:-1], len(self.bias))


class SparseConv(_Sparse):
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


# --- graphs -----------------------------------------------------------------------------------------------------------


def lower(network: fx.GraphModule, sparse: Collection[str], many: bool) -> None:
    """Let these layers compute sparsely, in place, and call linear ones without their modules.

    A module's call takes longer than the product of a small layer.
    """
    for name in sparse:
        network.set_submodule(name, sparse_layer(network.get_submodule(name), many))
    for node in list(network.graph.nodes):
        if _does_nothing(network, node):
            replace_node(node, node.all_input_nodes[0])
        elif node.op == "call_module":
            _as_functions(network, node)
    _push_rows_down(network)
    _reuse_memory(network)
    tidy(network)


def _does_nothing(network: fx.GraphModule, node: fx.Node) -> bool:
    """True for dropout, identities, and what makes a matrix of what is one already."""
    layer = module_of(network, node)
    if isinstance(layer, (nn.Identity, nn.Dropout)):
        return True
    if isinstance(layer, nn.Flatten):
        axes: tuple[object, ...] = (layer.start_dim, layer.end_dim)
    elif node.target in ("flatten", torch.flatten):
        axes = (*node.args[1:], *node.kwargs.items())
    else:
        return False
    return axes in ((1,), (1, -1)) and len(shape_of(node.all_input_nodes[0])) == 2


def _as_functions(network: fx.GraphModule, node: fx.Node) -> None:
    """A linear layer as functions of its tensors and its input."""
    layer, graph, x, vectors = module_of(network, node), network.graph, node.args[0], len(shape_of(node)) == 2

    def tensors(*names: str) -> Iterator[fx.Node]:
        return (graph.get_attr(f"{node.target}.{n}") for n in names if getattr(layer, n) is not None)

    if type(layer) is nn.Linear and vectors:
        layer = DenseLinear(layer)
        network.set_submodule(str(node.target), layer)
    with graph.inserting_before(node):
        if isinstance(layer, SparseLinear) and vectors:
            turned = graph.call_function(columns, (x, *tensors("used")))
            y = graph.call_function(product, (*tensors("weight", "bias", "stacked"), turned))
            replace_node(node, graph.call_function(rows, (y,)))
        elif isinstance(layer, DenseLinear):
            bias, turned = tensors("bias", "turned")
            replace_node(node, graph.call_function(torch.addmm, (bias, x, turned)))
        elif type(layer) is nn.Linear:
            replace_node(node, graph.call_function(F.linear, (x, *tensors("weight", "bias"))))


def _push_rows_down(network: fx.GraphModule) -> None:
    """f(rows(x)) = rows(f(x)) for functions of each number, and columns(rows(x)) = x."""
    graph = network.graph
    for node in list(graph.nodes):
        source = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
        if source is None or source.target is not rows:
            continue
        inner = source.all_input_nodes[0]
        if node.target is columns:
            replace_node(node, inner)
        elif is_pointwise(network, node):
            node.replace_input_with(source, inner)
            _insert_after(node, lambda n: graph.call_function(rows, (n,)))
    for node in graph.find_nodes(op="call_function", target=rows):
        if not node.users:
            graph.erase_node(node)
        elif any(user.target not in DENSE for user in node.users):  # who gets them may ask for rows in memory
            _insert_after(node, lambda n: graph.call_method("contiguous", (n,)))


def _insert_after(node: fx.Node, make: Callable[[fx.Node], fx.Node]) -> None:
    with node.graph.inserting_after(node):
        replace_node(node, make(node))


DENSE = {F.linear, torch.addmm}
FRESH = {product, *DENSE, F.conv1d, F.conv2d, F.conv3d}
RELUS = {F.relu, torch.relu, "relu"}


def _reuse_memory(network: fx.GraphModule) -> None:
    """A ReLU of what nothing else reads writes over it."""
    for node in list(network.graph.nodes):
        relu = isinstance(module_of(network, node), nn.ReLU) or node.target in RELUS
        if not relu or is_inplace(network, node) or len(node.all_input_nodes) != 1:
            continue
        source = node.all_input_nodes[0]
        if len(source.users) == 1 and (source.target in FRESH or isinstance(module_of(network, source), nn.Conv2d)):
            with network.graph.inserting_before(node):
                replace_node(node, network.graph.call_function(torch.relu_, (source,)))
