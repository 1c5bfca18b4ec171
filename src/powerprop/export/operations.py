"""What the compiled code can compute of a graph: each node as one operation on channels of lanes, or None."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from powerprop.export.graph import is_inplace, module_of, shape_of

__all__ = ["Operation", "is_image", "lanes_of", "mark_signals", "matrix", "understand"]

FUNCTIONS: dict[str, int] = {
    "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4, "hardswish": 5, "sigmoid": 6, "tanh": 7, "relu6": 8,
}  # fmt: skip
"""By the numbers that `kernel/infer.c` gives them."""
CALLED: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", "relu": "relu", F.gelu: "gelu", F.silu: "silu", F.hardswish: "hardswish",
    torch.sigmoid: "sigmoid", "sigmoid": "sigmoid", F.sigmoid: "sigmoid", torch.tanh: "tanh", "tanh": "tanh",
    F.tanh: "tanh", F.relu6: "relu6", torch.relu_: "relu", "relu_": "relu",
}  # fmt: skip
MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu", nn.GELU: "gelu", nn.SiLU: "silu", nn.Hardswish: "hardswish", nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh", nn.ReLU6: "relu6",
}  # fmt: skip
ADDS = {operator.add, torch.add, "add", operator.iadd, "add_"}
POOLS: dict[Any, Callable[..., nn.Module]] = {
    F.max_pool2d: nn.MaxPool2d, torch.max_pool2d: nn.MaxPool2d, F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """kind: "product", "pool", "function", "add", "affine", "norm", "flatten" or "nothing", of these inputs.

    weight: (outputs, inputs of a group, height, width) of a product, a linear layer's kernel being 1 x 1.
    values: what else it takes.
    """

    kind: str
    inputs: tuple[fx.Node, ...]
    weight: Tensor | None = None
    bias: Tensor | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


def matrix(layer: nn.Module) -> Tensor | None:
    """The weight of a layer as a matrix (outputs, inputs), or None if the layer has no sparse form."""
    if type(layer) is nn.Linear:
        return layer.weight
    if isinstance(layer, _ConvNd) and not isinstance(layer, _ConvTransposeNd):
        return layer.weight.flatten(1)
    # Hugging Face's linear layer of GPT-2, which holds its weight as (inputs, outputs).
    if type(layer).__name__ == "Conv1D" and isinstance(getattr(layer, "nf", None), int):
        weight = layer.weight
        assert isinstance(weight, Tensor)
        return weight.t()
    return None


def is_image(node: fx.Node) -> bool:
    """True for values with channels first: of two dimensions, and signals, which `mark_signals` has found."""
    return len(shape_of(node)) == 4 or "signal" in node.meta


def lanes_of(node: fx.Node) -> tuple[int, int, int] | None:
    """Channels, height and width of a node's value: of images (n, c, h, w), signals (n, c, w), or rows (..., c)."""
    shape = shape_of(node)
    if is_image(node):
        return (shape[1], *([1] if len(shape) == 3 else []), *shape[2:])
    return (shape[-1], 1, 1) if len(shape) in (2, 3) else None


def mark_signals(network: fx.GraphModule) -> None:
    """Note which values of three dimensions have their channels first: those around one-dimensional convolutions."""
    for node in network.graph.nodes:
        signal = isinstance(module_of(network, node), nn.Conv1d)
        for n in (node, *node.all_input_nodes):
            if (signal or any("signal" in i.meta for i in node.all_input_nodes)) and len(shape_of(n)) == 3:
                n.meta["signal"] = True


def understand(network: fx.GraphModule, node: fx.Node) -> Operation | None:
    """A node as an operation that the compiled code has, or None."""
    layer, inputs = module_of(network, node), tuple(node.all_input_nodes)
    known = [lanes_of(n) for n in (node, *inputs)]
    kinds = {getattr(n.meta.get("tensor_meta"), "dtype", None) for n in (node, *inputs)}
    if None in known or not inputs or kinds != {torch.float32}:
        return None
    if is_inplace(network, node) and len(inputs[0].users) > 1:
        return None
    return _layer(layer, inputs, node) if layer is not None else _call(inputs, node)


def _layer(layer: nn.Module, inputs: tuple[fx.Node, ...], node: fx.Node) -> Operation | None:
    if len(inputs) != 1 or len(node.args) != 1:
        return None
    images = is_image(inputs[0])
    if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        return _convolution(layer, inputs) if images and layer.padding_mode == "zeros" else None
    if not isinstance(layer, _ConvNd) and not images and (weight := matrix(layer)) is not None:
        if weight.shape[1] > 1 << 16:  # places in 16 bits
            return None
        return Operation("product", inputs, weight[:, :, None, None], getattr(layer, "bias", None), LINEAR)
    if isinstance(layer, (nn.Identity, nn.Dropout)):
        return Operation("nothing", inputs)
    if isinstance(layer, nn.Flatten):
        return _flatten(inputs, layer.start_dim, layer.end_dim)
    if isinstance(layer, nn.LayerNorm) and not images and len(layer.normalized_shape) == 1:
        size = layer.normalized_shape[0]
        weight, bias = _or(layer.weight, torch.ones, size), _or(layer.bias, torch.zeros, size)
        return Operation("norm", inputs, weight, bias, {"eps": layer.eps})
    if isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer.running_var is not None:
        if len(shape_of(inputs[0])) == 3 and not images:
            return None
        size = layer.num_features
        scale = _or(layer.weight, torch.ones, size) / (layer.running_var + layer.eps).sqrt()
        return Operation("affine", inputs, scale, _or(layer.bias, torch.zeros, size) - layer.running_mean * scale)
    if type(layer) in MODULES:
        tanh = isinstance(layer, nn.GELU) and layer.approximate == "tanh"
        return Operation("function", inputs, values={"name": "gelu_tanh" if tanh else MODULES[type(layer)]})
    return _pool(layer, inputs, node) if len(shape_of(inputs[0])) == 4 else None


LINEAR = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}


def _or(tensor: Tensor | None, make: Callable[[int], Tensor], size: int) -> Tensor:
    return make(size) if tensor is None else tensor.detach()


def _convolution(layer: nn.Conv1d | nn.Conv2d, inputs: tuple[fx.Node, ...]) -> Operation:
    """A signal is an image of one row."""
    weight = layer.weight if layer.weight.dim() == 4 else layer.weight.unsqueeze(2)
    left, _, *more = layer._reversed_padding_repeated_twice
    fill = (1,) * (2 - len(layer.stride))
    values: dict[str, Any] = {"stride": (*fill, *layer.stride), "padding": (more[0] if more else 0, left)}
    values |= {"dilation": (*fill, *layer.dilation), "groups": layer.groups}
    return Operation("product", inputs, weight, layer.bias, values)


def _flatten(inputs: tuple[fx.Node, ...], start: Any = 0, end: Any = -1) -> Operation | None:
    dims = len(shape_of(inputs[0]))
    if start != 1 or end not in (-1, dims - 1) or (dims == 3 and not is_image(inputs[0])):
        return None
    return Operation("flatten" if is_image(inputs[0]) else "nothing", inputs)


def _pool(layer: nn.Module, inputs: tuple[fx.Node, ...], node: fx.Node) -> Operation | None:
    """Windows of a maximum or a mean; their number is that of the node's shape."""
    high, wide = shape_of(inputs[0])[2:]
    if isinstance(layer, nn.AdaptiveAvgPool2d):
        out = shape_of(node)[2:]
        if not out[0] or not out[1] or high % out[0] or wide % out[1]:
            return None
        window = (high // out[0], wide // out[1])
        return Operation("pool", inputs, values=_window("mean", window, window, (0, 0), False))
    pair = nn.modules.utils._pair
    if isinstance(layer, nn.MaxPool2d) and pair(layer.dilation) == (1, 1) and not layer.return_indices:
        name, counted = "max", False
    elif isinstance(layer, nn.AvgPool2d) and layer.divisor_override is None:
        name, counted = "mean", layer.count_include_pad
    else:
        return None
    kernel, stride, padding = pair(layer.kernel_size), pair(layer.stride or layer.kernel_size), pair(layer.padding)
    return Operation("pool", inputs, values=_window(name, kernel, stride, padding, counted))


def _window(name: str, kernel: Any, stride: Any, padding: Any, counted: bool) -> dict[str, Any]:
    return {"name": name, "kernel": kernel, "stride": stride, "padding": padding, "counted": counted}


def _call(inputs: tuple[fx.Node, ...], node: fx.Node) -> Operation | None:
    """Functions and methods."""
    plain = len(inputs) == 1 and inputs[0] is node.args[0] if node.args else False
    if node.target in ADDS and len(node.args) == 2 and all(isinstance(a, fx.Node) for a in node.args):
        operands = tuple(a for a in node.args if isinstance(a, fx.Node))
        alike = len({shape_of(n) for n in (node, *operands)}) == 1 and not node.kwargs
        return Operation("add", operands) if alike else None
    if not plain:
        return None
    if node.target in CALLED:
        extra = {k: v for k, v in node.kwargs.items() if k != "inplace"}
        name = CALLED[node.target]
        if name == "gelu" and extra == {"approximate": "tanh"}:
            name, extra = "gelu_tanh", {}
        alone = len(node.args) == 1 and (not extra or extra == {"approximate": "none"})
        return Operation("function", inputs, values={"name": name}) if alone else None
    if node.target in ("flatten", torch.flatten):
        return _flatten(inputs, *node.args[1:], **{k[:-4]: v for k, v in node.kwargs.items()})
    if node.target in POOLS and len(shape_of(inputs[0])) == 4:
        return _pool(POOLS[node.target](*node.args[1:], **node.kwargs), inputs, node)
    if node.target in ("mean", torch.mean) and len(shape_of(inputs[0])) == 4 and len(shape_of(node)) == 2:
        axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        if isinstance(axes, (tuple, list)) and sorted(int(str(a)) % 4 for a in axes) == [2, 3]:
            window = tuple(shape_of(inputs[0])[2:])
            return Operation("pool", inputs, values=_window("mean", window, window, (0, 0), False))
    return None
