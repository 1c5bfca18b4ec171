"""From layers to a few plain operations: sparse products, activations kept as columns between them, nothing copied."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn
from torch.nn import functional as F

from powerprop.export.csr import columns, product, rows
from powerprop.export.graph import Shapes, is_inplace, is_pointwise, module_of, replace_module, tidy
from powerprop.export.layers import SparseLinear, sparse_layer

__all__ = ["lower"]

FRESH = {product, F.linear, F.conv1d, F.conv2d, F.conv3d}
RELUS = {F.relu, torch.relu}


def lower(network: fx.GraphModule, names: Iterable[str], shapes: Shapes, many: bool) -> None:
    """Let these layers compute sparsely, in place, and call the others without their modules.

    A module's call takes longer than the product of a small layer. Linear layers on vectors hand columns on to one
    another: (W₂ f((W₁ xᵀ))ᵀ)ᵀ = rows(W₂ f(W₁ columns(x))).
    """
    chosen = set(names)
    for name in chosen:
        replace_module(network, name, sparse_layer(network.get_submodule(name), many))
    for node in list(network.graph.nodes):
        layer = module_of(network, node)
        if isinstance(layer, SparseLinear) and len(shapes[node]) == 2:
            _as_product(network.graph, node, layer)
        elif type(layer) is nn.Linear:
            _as_function(network.graph, node, layer)
        elif isinstance(layer, (nn.Identity, nn.Dropout)):
            node.replace_all_uses_with(node.all_input_nodes[0])
            network.graph.erase_node(node)
    _push_rows_down(network)
    _reuse_memory(network)
    tidy(network)


def _as_product(graph: fx.Graph, node: fx.Node, layer: SparseLinear) -> None:
    with graph.inserting_before(node):
        parts = [graph.get_attr(f"{node.target}.{n}") for n in ("weight", "bias", "stacked")]
        used = () if layer.used is None else (graph.get_attr(f"{node.target}.used"),)
        turned = graph.call_function(columns, (node.args[0], *used))
        result = graph.call_function(rows, (graph.call_function(product, (*parts, turned)),))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _as_function(graph: fx.Graph, node: fx.Node, layer: nn.Linear) -> None:
    with graph.inserting_before(node):
        weight = graph.get_attr(f"{node.target}.weight")
        bias = None if layer.bias is None else graph.get_attr(f"{node.target}.bias")
        result = graph.call_function(F.linear, (node.args[0], weight, bias))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _push_rows_down(network: fx.GraphModule) -> None:
    """f(rows(x)) = rows(f(x)) for functions of each number, and columns(rows(x)) = x."""
    graph = network.graph
    for node in list(graph.nodes):
        source = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
        if source is None or source.target is not rows:
            continue
        inner = source.all_input_nodes[0]
        if node.target is columns:
            node.replace_all_uses_with(inner)
            graph.erase_node(node)
        elif is_pointwise(network, node):
            _swap(graph, node, source, inner)
    for node in list(graph.nodes):
        if node.target is rows and not node.users:
            graph.erase_node(node)
        elif node.target is rows and any(user.target is not F.linear for user in node.users):
            _copy_rows(graph, node)


def _swap(graph: fx.Graph, node: fx.Node, source: fx.Node, inner: fx.Node) -> None:
    node.replace_input_with(source, inner)
    with graph.inserting_after(node):
        outer = graph.call_function(rows, (node,))
    node.replace_all_uses_with(outer, delete_user_cb=lambda user: user is not outer)
    if not source.users:
        graph.erase_node(source)


def _copy_rows(graph: fx.Graph, node: fx.Node) -> None:
    """Whoever gets them may ask for rows in memory, as `view` does."""
    with graph.inserting_after(node):
        copied = graph.call_method("contiguous", (node,))
    node.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)


def _reuse_memory(network: fx.GraphModule) -> None:
    """A ReLU of what nothing else reads writes over it."""
    graph = network.graph
    for node in list(graph.nodes):
        relu = isinstance(module_of(network, node), nn.ReLU) or node.target in RELUS or node.target == "relu"
        if not relu or is_inplace(network, node) or len(node.all_input_nodes) != 1:
            continue
        source = node.all_input_nodes[0]
        if len(source.users) == 1 and (source.target in FRESH or isinstance(module_of(network, source), nn.Conv2d)):
            with graph.inserting_before(node):
                result = graph.call_function(torch.relu_, (source,))
            node.replace_all_uses_with(result)
            graph.erase_node(node)
