"""Who reads the units of a layer, and what happens to the units on the way there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from powerprop.export.graph import calls_of, is_pointwise, module_of, shapes_of

__all__ = ["Layer", "Reach", "Reader", "is_layer"]

Layer = nn.Linear | _ConvNd

CONSTANT_LAYERS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
CONSTANT_FUNCTIONS = {
    F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d,
}  # fmt: skip
"""What leaves a channel of one constant the same constant. Not average pools: those that pad mix zeros in."""


def is_layer(module: nn.Module | None) -> TypeGuard[Layer]:
    """True for layers whose units can be taken apart."""
    conv = isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd) and module.groups == 1
    return conv or type(module) is nn.Linear


@dataclass
class Reader:
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


class Reach:
    """The paths of a graph from layer to layer along which unit j stays unit j, or becomes the j-th block."""

    def __init__(self, network: fx.GraphModule, example: list[Tensor]) -> None:
        self.network = network
        self.shapes = shapes_of(network, example)
        self.free = self._own_layers()

    def _own_layers(self) -> set[str]:
        """Layers that are called once and share no parameter with another."""
        owners = Counter(id(p) for _, p in self.network.named_parameters(remove_duplicate=False))
        return {
            name
            for name, calls in calls_of(self.network).items()
            if calls == 1 and all(owners[id(p)] == 1 for p in self.network.get_submodule(name).parameters())
        }

    def layers(self) -> list[fx.Node]:
        """The layers whose units might go: linear ones, and convolutions over batches of images."""
        nodes = [n for n in self.network.graph.nodes if str(n.target) in self.free]
        return [n for n in nodes if self._has_units(module_of(self.network, n), self.shapes[n])]

    def _has_units(self, layer: nn.Module | None, shape: torch.Size) -> bool:
        return is_layer(layer) and (not isinstance(layer, _ConvNd) or len(shape) == len(layer.kernel_size) + 2)

    def readers(self, source: fx.Node) -> list[Reader]:
        """All layers that read the units of a layer; none if anything else reads them too."""
        layer = module_of(self.network, source)
        assert is_layer(layer)
        return self._follow(source, source, [], len(layer.weight)) or []

    def _follow(self, source: fx.Node, node: fx.Node, between: list[fx.Node], units: int) -> list[Reader] | None:
        found: list[Reader] = []
        for user in node.users:
            layer = module_of(self.network, user)
            if is_layer(layer):
                if str(user.target) not in self.free or not self._reads_units(source, node, layer):
                    return None
                width = 1 if isinstance(layer, _ConvNd) else layer.in_features // units
                found.append(Reader(layer, between, width))
            elif self._keeps_units_apart(source, node, user):
                more = self._follow(source, user, [*between, user], units)
                if more is None:
                    return None
                found += more
            else:
                return None
        return found

    def _images(self, source: fx.Node) -> bool:
        return isinstance(module_of(self.network, source), _ConvNd)

    def _reads_units(self, source: fx.Node, node: fx.Node, layer: Layer) -> bool:
        """True if the units lie along the axis that the layer reads: channels of images, or the last axis."""
        if isinstance(layer, _ConvNd):
            return self._images(source) and len(self.shapes[node]) == len(self.shapes[source])
        return len(self.shapes[node]) == 2 or not self._images(source)

    def _keeps_units_apart(self, source: fx.Node, node: fx.Node, user: fx.Node) -> bool:
        """Pools, means and flattening are known for images alone; functions of each number for all."""
        if is_pointwise(self.network, user):
            return True
        if not self._images(source) or len(user.all_input_nodes) != 1 or user not in self.shapes:
            return False
        layer = module_of(self.network, user)
        if isinstance(layer, CONSTANT_LAYERS) or (user.op == "call_function" and user.target in CONSTANT_FUNCTIONS):
            return len(self.shapes[user]) == len(self.shapes[node])
        if isinstance(layer, nn.Flatten):
            return (layer.start_dim, layer.end_dim) == (1, -1)
        if user.target in ("flatten", torch.flatten):
            return user.args[1:] == (1,) and not user.kwargs
        return user.target in ("mean", torch.mean) and _is_spatial_mean(user, len(self.shapes[node]))


def _is_spatial_mean(user: fx.Node, dims: int) -> bool:
    axes = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim")
    if dims < 3 or not isinstance(axes, (tuple, list)):
        return False
    return sorted(a % dims for a in axes if isinstance(a, int)) == list(range(2, dims))
