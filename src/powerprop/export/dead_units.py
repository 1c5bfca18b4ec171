"""Remove units that do nothing: exactly, with what they add as a constant folded into the next bias.

all incoming weights zero:  h_j = act(b_j) = c_j for every input, so that b' = b + W'_j c_j
all outgoing weights zero:  nothing reads h_j
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from powerprop.export.graph import calls_of, is_pointwise, module_of, shape_of, tidy

__all__ = ["remove_dead_units"]

Layer = nn.Linear | _ConvNd

CONSTANT_LAYERS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
CONSTANT_FUNCTIONS = {
    F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d,
}  # fmt: skip
"""What leaves a channel of one constant the same constant. Not average pools: those that pad mix zeros in."""


@torch.no_grad()
def remove_dead_units(network: fx.GraphModule) -> dict[str, int]:
    """Shrink the layers of an annotated graph in place; returns how many units each of them lost."""
    own = _own_layers(network)
    removed: Counter[str] = Counter()
    while True:  # a unit that is gone may leave others without consumers or without inputs
        found = {
            str(node.target): _shrink(network, node, own)
            for node in network.graph.nodes
            if _has_units(network, node, own)
        }
        if not any(found.values()):
            break
        removed.update(found)
    tidy(network)
    return {name: count for name, count in removed.items() if count}


def _own_layers(network: fx.GraphModule) -> set[str]:
    """Layers that are called once and share no parameter with another."""
    owners = Counter(id(p) for _, p in network.named_parameters(remove_duplicate=False))
    once = [name for name, calls in calls_of(network).items() if calls == 1]
    return {n for n in once if all(owners[id(p)] == 1 for p in network.get_submodule(n).parameters())}


def _is_layer(module: nn.Module | None) -> TypeGuard[Layer]:
    """True for layers whose units can be taken apart."""
    conv = isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd) and module.groups == 1
    return conv or type(module) is nn.Linear


def _has_units(network: fx.GraphModule, node: fx.Node, own: set[str]) -> bool:
    """Linear layers, and convolutions over batches of images, whose units might go."""
    layer = module_of(network, node)
    if str(node.target) not in own or not _is_layer(layer):
        return False
    return not isinstance(layer, _ConvNd) or len(shape_of(node)) == len(layer.kernel_size) + 2


def _shrink(network: fx.GraphModule, node: fx.Node, own: set[str]) -> int:
    """Remove the dead units of one layer; one unit stays even if all are dead."""
    layer: Any = module_of(network, node)
    weight = layer.weight.detach()
    consumers = _Search(network, node, own, len(weight)).consumers(node, [])
    if not consumers:
        return 0
    bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach()
    values = [_through(network, bias, consumer.between) for consumer in consumers]
    constant = ~weight.flatten(1).any(1)
    for consumer, value in zip(consumers, values, strict=True):
        if consumer.pads():  # a constant that is not zero ends at the border of the image
            constant &= value == 0
    dead = constant | ~torch.stack([consumer.columns().any(2).any(0) for consumer in consumers]).any(0)
    if dead.all():
        dead[0] = False
    if dead.any():
        for consumer, value in zip(consumers, values, strict=True):
            _drop_columns(consumer, value, dead)
        _drop_units(layer, dead)
    return int(dead.sum())


# --- who reads the units ----------------------------------------------------------------------------------------------


@dataclass
class _Consumer:
    """A layer that reads the units of another, each as `width` columns, after the nodes between them."""

    layer: Layer
    between: list[fx.Node]
    width: int

    def columns(self) -> Tensor:
        """The weights by the unit that they read: (outputs, units, all that read it)."""
        weight = self.layer.weight.detach()
        return weight.flatten(2) if isinstance(self.layer, _ConvNd) else weight.view(len(weight), -1, self.width)

    def pads(self) -> bool:
        """True if the layer sees zeros beside the constant of a channel."""
        return isinstance(self.layer, _ConvNd) and any(self.layer._reversed_padding_repeated_twice)


@dataclass
class _Search:
    """The paths from a layer to others along which unit j stays unit j, or becomes the j-th block."""

    network: fx.GraphModule
    source: fx.Node
    own: set[str]
    units: int

    def consumers(self, node: fx.Node, between: list[fx.Node]) -> list[_Consumer] | None:
        """All layers that read the units; None if anything else reads them too."""
        found: list[_Consumer] = []
        for user in node.users:
            layer = module_of(self.network, user)
            more: list[_Consumer] | None = None
            if _is_layer(layer):
                if str(user.target) in self.own and self._reads_units(node, layer):
                    width = 1 if isinstance(layer, _ConvNd) else layer.in_features // self.units
                    more = [_Consumer(layer, between, width)]
            elif self._keeps_units_apart(node, user):
                more = self.consumers(user, [*between, user])
            if more is None:
                return None
            found += more
        return found

    def _images(self) -> bool:
        return isinstance(module_of(self.network, self.source), _ConvNd)

    def _reads_units(self, node: fx.Node, layer: Layer) -> bool:
        """True if the units lie along the axis that the layer reads: channels of images, or the last axis."""
        if isinstance(layer, _ConvNd):
            return self._images() and len(shape_of(node)) == len(shape_of(self.source))
        return len(shape_of(node)) == 2 or not self._images()

    def _keeps_units_apart(self, node: fx.Node, user: fx.Node) -> bool:
        """Pools, means and flattening are known for images alone; functions of each number for all."""
        if is_pointwise(self.network, user):
            return True
        if not self._images() or len(user.all_input_nodes) != 1:
            return False
        layer = module_of(self.network, user)
        if isinstance(layer, CONSTANT_LAYERS) or (user.op == "call_function" and user.target in CONSTANT_FUNCTIONS):
            return len(shape_of(user)) == len(shape_of(node))
        if isinstance(layer, nn.Flatten):
            return (layer.start_dim, layer.end_dim) == (1, -1)
        if user.target in ("flatten", torch.flatten):
            return user.args[1:] == (1,) and not user.kwargs
        return user.target in ("mean", torch.mean) and _is_spatial_mean(user, len(shape_of(node)))


def _is_spatial_mean(user: fx.Node, dims: int) -> bool:
    axes = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim")
    if dims < 3 or not isinstance(axes, (tuple, list)):
        return False
    return sorted(a % dims for a in axes if isinstance(a, int)) == list(range(2, dims))


def _through(network: fx.GraphModule, values: Tensor, between: list[fx.Node]) -> Tensor:
    """The constants of units after the functions between two layers; pools and reshapes leave them alone."""
    run = fx.Interpreter(network)
    for node in (n for n in between if is_pointwise(network, n)):
        run.env = {node.all_input_nodes[0]: values.clone()}  # it may be written into
        values = run.run_node(node)
    return values


# --- taking them out --------------------------------------------------------------------------------------------------


def _drop_columns(consumer: _Consumer, value: Tensor, dead: Tensor) -> None:
    """Take the columns of dead units out of a layer, and add what they contributed to its bias."""
    layer, columns = consumer.layer, consumer.columns()
    added = (columns[:, dead].sum(2).double() @ value[dead].double()).to(columns.dtype)
    if added.any():
        layer.bias = _parameter(added if layer.bias is None else layer.bias.detach() + added)
    if isinstance(layer, _ConvNd):
        layer.weight = _parameter(layer.weight.detach()[:, ~dead])
        layer.in_channels = layer.weight.shape[1]
    else:
        layer.weight = _parameter(columns[:, ~dead].flatten(1))
        layer.in_features = layer.weight.shape[1]


def _drop_units(layer: Layer, dead: Tensor) -> None:
    layer.weight = _parameter(layer.weight.detach()[~dead])
    if layer.bias is not None:
        layer.bias = _parameter(layer.bias.detach()[~dead])
    if isinstance(layer, _ConvNd):
        layer.out_channels = len(layer.weight)
    else:
        layer.out_features = len(layer.weight)


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.contiguous(), requires_grad=False)
