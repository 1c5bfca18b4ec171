"""Graphs in which runs of layers are compiled programs, and the other linear layers plain operations."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from powerprop.export.graph import annotate, is_inplace, module_of, replace_node, shape_of, tidy
from powerprop.export.operations import Operation, is_image, mark_signals, understand
from powerprop.export.program import Program

__all__ = ["DenseLinear", "layer_program", "lower"]

Run = dict[fx.Node, Operation]


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


def layer_program(layer: nn.Module, x: Tensor) -> nn.Module | None:
    """A single layer as a program, as it would be in a network, or None if the compiled code does not have it."""
    graph = fx.Graph()
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    network = fx.GraphModule({"layer": layer}, graph)
    annotate(network, [x])
    runs = list(_runs(network, {"layer"}))
    return _program(network, runs[0])[0] if runs else None


def lower(network: fx.GraphModule, sparse: Collection[str], inputs: list[Tensor]) -> None:
    """Let runs of operations around these layers be programs, in place, and call other linear layers without modules.

    A module's call takes longer than the product of a small layer.
    """
    annotate(network, inputs)
    for i, run in enumerate(list(_runs(network, sparse))):
        program, entering, leaving = _program(network, run)
        name = f"program{i}"
        network.add_module(name, program)
        with network.graph.inserting_after(list(run)[-1]):
            call = network.graph.call_module(name, tuple(entering))
        for place, node in enumerate(leaving):
            value = call
            if len(leaving) > 1:
                with network.graph.inserting_after(call):
                    value = network.graph.call_function(operator.getitem, (call, place))
            outside = {user for user in node.users if user not in run}
            node.replace_all_uses_with(value, delete_user_cb=outside.__contains__)
        for node in reversed(list(run)):
            network.graph.erase_node(node)
    for node in list(network.graph.nodes):
        if _does_nothing(network, node):
            replace_node(node, node.all_input_nodes[0])
        elif type(module_of(network, node)) is nn.Linear:
            _as_function(network, node)
    _reuse_memory(network)
    tidy(network)


def _runs(network: fx.GraphModule, sparse: Collection[str]) -> Iterator[Run]:
    """Operations one after the other, over one batch, with at least one of these layers; other layers end a run."""
    mark_signals(network)
    run: Run = {}
    for node in [*network.graph.nodes, None]:
        if node is not None and node.op in ("placeholder", "get_attr"):
            continue
        op = None if node is None or node.op == "output" else understand(network, node)
        fits = op is not None and (op.kind != "product" or str(node.target) in sparse)
        if run and not (fits and _lead(node) == _lead(next(iter(run)))):
            if any(op.kind == "product" for op in run.values()):
                yield _trimmed(run)
            run = {}
        if fits and op is not None and len({_lead(n) for n in (node, *op.inputs)}) == 1:
            run[node] = op


def _trimmed(run: Run) -> Run:
    """Without what stands before the first product: torch may do it in place."""
    nodes = list(run)
    first = next(i for i, n in enumerate(nodes) if run[n].kind == "product")
    return {n: run[n] for n in nodes[first:]}


def _lead(node: fx.Node) -> torch.Size:
    """The dimensions of the batch: of images one, of rows all but the last."""
    shape = shape_of(node)
    return shape[:1] if is_image(node) else shape[:-1]


def _program(network: fx.GraphModule, run: Run) -> tuple[Program, list[fx.Node], list[fx.Node]]:
    """The program of a run, with the values that enter and leave it."""
    entering = list(dict.fromkeys(n for op in run.values() for n in op.inputs if n not in run))
    leaving = [n for n in run if any(user not in run for user in n.users)]
    graph = fx.Graph()
    copies = {n: graph.placeholder(f"x{i}") for i, n in enumerate(entering)}
    for node in run:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    found = [copies[n] for n in leaving]
    graph.output(found if len(found) > 1 else found[0])
    return Program(fx.GraphModule(network, graph), run, entering, leaving), entering, leaving


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


def _as_function(network: fx.GraphModule, node: fx.Node) -> None:
    """A linear layer as a function of its tensors and its input."""
    layer, graph, x = module_of(network, node), network.graph, node.args[0]

    def tensors(names: Iterable[str]) -> Iterator[fx.Node]:
        return (graph.get_attr(f"{node.target}.{n}") for n in names if getattr(layer, n) is not None)

    with graph.inserting_before(node):
        if isinstance(layer, nn.Linear) and len(shape_of(node)) == 2:
            layer = DenseLinear(layer)
            network.set_submodule(str(node.target), layer)
            bias, turned = tensors(("bias", "turned"))
            replace_node(node, graph.call_function(torch.addmm, (bias, x, turned)))
        else:
            replace_node(node, graph.call_function(F.linear, (x, *tensors(("weight", "bias")))))


FRESH = {torch.addmm, F.linear, F.conv1d, F.conv2d, F.conv3d}
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
