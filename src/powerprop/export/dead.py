"""Remove units that do nothing: exactly, with what they add as a constant folded into the next bias.

all incoming weights zero:  h_j = act(b_j) = c_j for every input, so that b' = b + W'_j c_j
all outgoing weights zero:  nothing reads h_j
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from powerprop.export.graph import is_pointwise, module_of, tidy
from powerprop.export.reach import Layer, Reach, Reader, is_layer

__all__ = ["remove_dead_units"]


@torch.no_grad()
def remove_dead_units(network: fx.GraphModule, example: list[Tensor]) -> dict[str, int]:
    """Shrink the layers of a graph in place; returns how many units each of them lost."""
    reach = Reach(network, example)
    removed: Counter[str] = Counter()
    while True:  # a unit that is gone may leave others without readers or without inputs
        found = {str(node.target): _shrink(reach, node) for node in reach.layers()}
        if not any(found.values()):
            break
        removed.update(found)
    tidy(network)
    return {name: count for name, count in removed.items() if count}


def _shrink(reach: Reach, node: fx.Node) -> int:
    """Remove the dead units of one layer; one unit stays even if all are dead."""
    layer, readers = module_of(reach.network, node), reach.readers(node)
    assert is_layer(layer)
    if not readers:
        return 0
    weight = layer.weight.detach()
    bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach()
    values = [_through(reach.network, bias, reader.between) for reader in readers]
    constant = ~weight.flatten(1).any(1)
    for reader, value in zip(readers, values, strict=True):
        if reader.pads():  # a constant that is not zero ends at the border of the image
            constant &= value == 0
    dead = constant | ~torch.stack([reader.columns().any(2).any(0) for reader in readers]).any(0)
    if dead.all():
        dead[0] = False
    if dead.any():
        for reader, value in zip(readers, values, strict=True):
            _drop_columns(reader, value, dead)
        _drop_units(layer, dead)
    return int(dead.sum())


def _through(network: fx.GraphModule, values: Tensor, between: list[fx.Node]) -> Tensor:
    """The constants of units after the functions between two layers; pools and reshapes leave them alone."""
    for node in (n for n in between if is_pointwise(network, n)):
        others = [a for a in node.args if not isinstance(a, fx.Node)]
        named = {k: v for k, v in node.kwargs.items() if not isinstance(v, fx.Node)}
        if node.op == "call_module":
            values = network.get_submodule(str(node.target))(values.clone())
        elif node.op == "call_method":
            values = getattr(values, str(node.target))(*others, **named)
        else:
            assert callable(node.target)
            values = node.target(values.clone(), *others, **named)
    return values


def _drop_columns(reader: Reader, value: Tensor, dead: Tensor) -> None:
    """Take the columns of dead units out of a layer, and add what they contributed to its bias."""
    layer, columns = reader.layer, reader.columns()
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
