"""Sparse layers in a graph: products in the place of linear layers, and activations kept as columns between them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn
from torch.nn import functional as F

from powerprop.export.csr import product
from powerprop.export.graph import Shapes, is_inplace, is_pointwise, module_of, replace_module, tidy
from powerprop.export.layers import SparseConv, sparse_layer

__all__ = ["use_sparse"]

RELUS = {F.relu, torch.relu}


def use_sparse(network: fx.GraphModule, names: Iterable[str], shapes: Shapes) -> None:
    """Let these layers compute sparsely, in place. Linear layers on vectors hand columns on to one another."""
    chosen = set(names)
    for name in chosen:
        replace_module(network, name, sparse_layer(network.get_submodule(name)))
    for node in list(network.graph.nodes):
        layer = module_of(network, node)
        if layer is None or str(node.target) not in chosen or isinstance(layer, SparseConv):
            continue
        if len(shapes[node]) == 2:
            _as_product(network.graph, node)
    _push_down(network)
    tidy(network)


def _as_product(graph: fx.Graph, node: fx.Node) -> None:
    """layer(x) -> product(W, b, xᵀ)ᵀ"""
    with graph.inserting_before(node):
        weight, bias = (graph.get_attr(f"{node.target}.{n}") for n in ("weight", "bias"))
        columns = graph.call_method("t", (node.args[0],))
        result = graph.call_function(product, (weight, bias, columns))
        rows = graph.call_method("t", (result,))
    node.replace_all_uses_with(rows)
    graph.erase_node(node)


def _push_down(network: fx.GraphModule) -> None:
    """Move transpositions behind the functions of each number that follow, where two of them cancel."""
    graph = network.graph
    for node in list(graph.nodes):
        source = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
        if source is None or not _is_t(source):
            continue
        columns = source.all_input_nodes[0]
        if _is_t(node):
            node.replace_all_uses_with(columns)
            graph.erase_node(node)
        elif is_pointwise(network, node):
            _swap(network, node, source, columns)
    for node in list(graph.nodes):
        if _is_t(node) and not node.users:
            graph.erase_node(node)
        elif _is_t(node) and not all(type(module_of(network, user)) is nn.Linear or _is_product(user) for user in node.users):
            with graph.inserting_after(node):  # what follows may ask for rows in memory, as `view` does
                copied = graph.call_method("contiguous", (node,))
            node.replace_all_uses_with(copied, delete_user_cb=lambda user, copied=copied: user is not copied)


def _swap(network: fx.GraphModule, node: fx.Node, source: fx.Node, columns: fx.Node) -> None:
    """f(xᵀ) -> f(x)ᵀ; a ReLU of a fresh product works in its memory."""
    node.replace_input_with(source, columns)
    with network.graph.inserting_after(node):
        rows = network.graph.call_method("t", (node,))
    node.replace_all_uses_with(rows, delete_user_cb=lambda user: user is not rows)
    if not is_inplace(network, node) and _is_product(columns) and _is_relu(network, node):
        if set(columns.users) <= {node} | {u for u in columns.users if _is_t(u) and not u.users}:
            with network.graph.inserting_before(node):
                fast = network.graph.call_function(torch.relu_, (columns,))
            node.replace_all_uses_with(fast)
            network.graph.erase_node(node)


def _is_t(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "t"


def _is_product(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is product


def _is_relu(network: fx.GraphModule, node: fx.Node) -> bool:
    return isinstance(module_of(network, node), nn.ReLU) or node.target in RELUS or node.target == "relu"
