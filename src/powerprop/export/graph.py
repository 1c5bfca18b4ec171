"""Models as graphs of layers: tracing, batch norms folded into the layers before them, and what may be rewritten."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from powerprop.export.calls import Call

__all__ = ["Shapes", "UntraceableError", "fold_batch_norms", "is_pointwise", "module_of", "replace_module", "trace"]

POINTWISE_LAYERS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Identity, nn.Dropout,
)  # fmt: skip
POINTWISE_FUNCTIONS = {
    torch.relu, torch.tanh, torch.sigmoid, F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish,
    F.tanh, F.sigmoid, F.softplus, F.softsign, F.hardtanh, F.hardswish, F.hardsigmoid,
}  # fmt: skip
POINTWISE_METHODS = {"relu", "tanh", "sigmoid"}


class UntraceableError(Exception):
    """The model's Python code depends on its inputs, so that no one graph describes it."""


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = m.__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(m, nn.Sequential)
        return known or (type(m).__name__ == "Conv1D" and hasattr(m, "nf"))


def trace(model: nn.Module, call: Call) -> fx.GraphModule:
    """The graph of a model in evaluation mode, whose inputs are the call's tensors, in the order of `forward`.

    All other arguments are fixed to the values of the call.
    """
    try:
        arguments = call.named(model)
        fixed = {n: v for n, v in arguments.items() if not isinstance(v, Tensor)}
        if any(not isinstance(v, (int, float, str, bool, type(None))) for v in fixed.values()):
            raise TypeError("arguments that are neither tensors nor plain values")
        graph = _Tracer().trace(model, concrete_args=fixed)
        _drop_inputs(graph, [n in fixed for n in arguments])
        return fx.GraphModule(model, graph)
    except Exception as error:  # tracing runs the model's own code, which may raise anything
        raise UntraceableError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error


def _drop_inputs(graph: fx.Graph, fixed: list[bool]) -> None:
    """Remove the inputs that have fixed values, with the assertions that fx adds for them."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    for node, drop in zip(inputs, fixed, strict=True):
        if drop:
            erase(graph, node)


def erase(graph: fx.Graph, node: fx.Node) -> None:
    """Remove a node and all that uses it."""
    for user in list(node.users):
        erase(graph, user)
    graph.erase_node(node)


def module_of(network: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The layer that a node calls, if it calls one."""
    return network.get_submodule(str(node.target)) if node.op == "call_module" else None


def replace_module(network: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module in the place of this name."""
    owner, _, attribute = name.rpartition(".")
    setattr(network.get_submodule(owner), attribute, module)


def is_pointwise(network: fx.GraphModule, node: fx.Node) -> bool:
    """True if the node applies one function to each number of its only input, and to nothing else."""
    if sum(isinstance(a, fx.Node) for a in [*node.args, *node.kwargs.values()]) != 1:
        return False
    if node.op == "call_module":
        found = isinstance(module_of(network, node), POINTWISE_LAYERS)
    elif node.op == "call_function":
        found = node.target in POINTWISE_FUNCTIONS
    else:
        found = node.op == "call_method" and node.target in POINTWISE_METHODS
    return found and not (is_inplace(network, node) and len(node.all_input_nodes[0].users) > 1)


def is_inplace(network: fx.GraphModule, node: fx.Node) -> bool:
    """True if the node writes into its input."""
    return bool(getattr(module_of(network, node), "inplace", False) or node.kwargs.get("inplace", False))


def fold_batch_norms(network: fx.GraphModule) -> None:
    """γ(Wx + b - μ)/σ + β = (γ/σ W)x + (γ/σ(b - μ) + β), where a batch norm is all that uses a layer."""
    calls = calls_of(network)
    for node in list(network.graph.nodes):
        norm = module_of(network, node)
        if not isinstance(norm, _BatchNorm) or norm.running_mean is None or norm.training:
            continue
        before = node.all_input_nodes[0]
        layer = module_of(network, before)
        if layer is None or len(before.users) > 1 or calls[str(before.target)] > 1:
            continue
        if isinstance(layer, _ConvNd) and not isinstance(layer, _ConvTransposeNd):
            replace_module(network, str(before.target), fuse_conv_bn_eval(layer, norm))
        elif type(layer) is nn.Linear and isinstance(norm, nn.BatchNorm1d):
            replace_module(network, str(before.target), fuse_linear_bn_eval(layer, norm))
        else:
            continue
        node.replace_all_uses_with(before)
        network.graph.erase_node(node)
    tidy(network)


def calls_of(network: fx.GraphModule) -> dict[str, int]:
    """How often each layer is called."""
    counts: dict[str, int] = {}
    for node in network.graph.nodes:
        if node.op == "call_module":
            counts[str(node.target)] = counts.get(str(node.target), 0) + 1
    return counts


def tidy(network: fx.GraphModule) -> None:
    """Make the code of a changed graph."""
    network.graph.lint()
    network.delete_all_unused_submodules()
    network.recompile()


Shapes = dict[fx.Node, torch.Size]


class _ShapeInterpreter(fx.Interpreter):
    def __init__(self, network: fx.GraphModule) -> None:
        super().__init__(network)
        self.shapes: Shapes = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.shapes[n] = result.shape
        return result


def shapes_of(network: fx.GraphModule, example: list[Tensor]) -> Shapes:
    """The shape of every node that is a tensor, for the example."""
    interpreter = _ShapeInterpreter(network)
    interpreter.run(*example)
    return interpreter.shapes
