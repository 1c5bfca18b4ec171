"""From layers to a few plain operations: sparse products, activations kept as columns between them, nothing copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from powerprop.export.csr import columns, copied_columns, product, rows
from powerprop.export.graph import Shapes, is_inplace, is_pointwise, module_of, replace_module, tidy
from powerprop.export.layers import ColumnsLinear, RowsLinear, in_form, matrix

__all__ = ["links", "lower"]

DENSE = {F.linear, torch.addmm}
FRESH = {product, *DENSE, F.conv1d, F.conv2d, F.conv3d}
RELUS = {F.relu, torch.relu}
TURNS = {columns, copied_columns}


def links(network: fx.GraphModule, shapes: Shapes) -> set[tuple[str, str]]:
    """Pairs of linear layers on vectors of which the first can hand columns on to the second."""
    found = set()
    for node in network.graph.nodes:
        source = node.all_input_nodes[0] if _takes_columns(network, node, shapes) else None
        while source is not None and is_pointwise(network, source):
            source = source.all_input_nodes[0]
        if source is not None and _takes_columns(network, source, shapes):
            found.add((str(source.target), str(node.target)))
    return found


def _takes_columns(network: fx.GraphModule, node: fx.Node, shapes: Shapes) -> bool:
    layer = module_of(network, node)
    linear = layer is not None and matrix(layer) is not None and not isinstance(layer, _ConvNd)
    return linear and len(shapes[node]) == 2


def lower(network: fx.GraphModule, forms: Mapping[str, str], shapes: Shapes, many: bool) -> None:
    """Let these layers compute sparsely or on columns, in place, and call the others without their modules.

    A module's call takes longer than the product of a small layer. Linear layers on vectors hand columns on to one
    another: (W₂ f((W₁ xᵀ))ᵀ)ᵀ = rows(W₂ f(W₁ columns(x))).
    """
    for name, form in forms.items():
        replace_module(network, name, in_form(network.get_submodule(name), form, many))
    _drop_identities(network, shapes)
    for node in list(network.graph.nodes):
        layer, vectors = module_of(network, node), len(shapes.get(node, ())) == 2
        if type(layer) is nn.Linear and vectors:
            layer = RowsLinear(layer)
            replace_module(network, str(node.target), layer)
        if isinstance(layer, ColumnsLinear) and vectors:
            _as_product(network.graph, node, layer)
        elif isinstance(layer, RowsLinear) and vectors:
            _as_function(network.graph, node, torch.addmm, "bias", None, "turned")
        elif type(layer) is nn.Linear:
            _as_function(network.graph, node, F.linear, None, "weight", *(["bias"] if layer.bias is not None else []))
    _push_rows_down(network)
    _reuse_memory(network)
    tidy(network)


def _drop_identities(network: fx.GraphModule, shapes: Shapes) -> None:
    for node in list(network.graph.nodes):
        if isinstance(module_of(network, node), (nn.Identity, nn.Dropout)) or _flattens_a_matrix(network, node, shapes):
            node.replace_all_uses_with(node.all_input_nodes[0])
            network.graph.erase_node(node)


def _flattens_a_matrix(network: fx.GraphModule, node: fx.Node, shapes: Shapes) -> bool:
    """True if the node makes a matrix of what is one already."""
    layer = module_of(network, node)
    if isinstance(layer, nn.Flatten):
        axes: tuple[object, ...] = (layer.start_dim, layer.end_dim)
    elif node.target in ("flatten", torch.flatten):
        axes = (*node.args[1:], *node.kwargs.items())
    else:
        return False
    return axes in ((1,), (1, -1)) and len(shapes[node.all_input_nodes[0]]) == 2


def _as_product(graph: fx.Graph, node: fx.Node, layer: ColumnsLinear) -> None:
    with graph.inserting_before(node):
        parts = [graph.get_attr(f"{node.target}.{n}") for n in ("weight", "bias", "stacked")]
        used = () if layer.used is None else (graph.get_attr(f"{node.target}.used"),)
        turned = graph.call_function(layer.turn, (node.args[0], *used))
        result = graph.call_function(rows, (graph.call_function(product, (*parts, turned)),))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _as_function(graph: fx.Graph, node: fx.Node, function: Callable[..., Tensor], *names: str | None) -> None:
    """Call a function on tensors of the layer, by name, and on its input, None."""
    with graph.inserting_before(node):
        args = [node.args[0] if name is None else graph.get_attr(f"{node.target}.{name}") for name in names]
        result = graph.call_function(function, tuple(args))
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
        if node.target in TURNS:
            node.replace_all_uses_with(inner)
            graph.erase_node(node)
        elif is_pointwise(network, node):
            _swap(graph, node, source, inner)
    for node in list(graph.nodes):
        if node.target is rows and not node.users:
            graph.erase_node(node)
        elif node.target is rows and any(user.target not in DENSE for user in node.users):
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
