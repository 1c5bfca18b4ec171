"""Models as graphs of layers: how they are called, traced, annotated, and their batch norms folded."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from powerprop.reparam import fold
from powerprop.sparse.linear import densify

__all__ = ["Call", "UntraceableError", "inference_copy", "same", "trace"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of the largest output: what other orders of summation change; in half precision 5%."""
UNTAGGED = {torch.ops.aten.hardswish.default}
"""Pointwise, though torch does not say so."""


@dataclass(frozen=True)
class Call:
    """model(*args, **kwargs). Tensors are the inputs; every other argument is part of what is exported."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, example: Any) -> Call:
        """An input, a tuple of arguments, or a dict of named ones; at least one of them is a tensor."""
        if isinstance(example, Mapping):
            call = cls(kwargs=dict(example))
        else:
            call = cls(tuple(example) if isinstance(example, (tuple, list)) else (example,))
        if not call.tensors():
            raise TypeError(
                f"example must be a tensor, a tuple of arguments or a dict of named ones that holds a tensor, "
                f"got {type(example).__name__}"
            )
        return call

    def __call__(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    def tensors(self) -> list[Tensor]:
        """The inputs."""
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    def batch(self) -> int:
        """The length of the first input."""
        first = self.tensors()[0]
        return len(first) if first.dim() else 1

    def is_batched(self) -> bool:
        """True if all inputs have the same length."""
        return all(x.dim() and len(x) == self.batch() for x in self.tensors())

    def resized(self, size: int) -> Call:
        """The same call with this many inputs: the first ones, all of them again after the last."""
        take = torch.arange(size) % self.batch()
        args, kwargs = tree_map_only(Tensor, lambda x: x[take.to(x.device)], (self.args, self.kwargs))
        return Call(args, kwargs)

    def named(self, model: nn.Module) -> dict[str, Any]:
        """The arguments by the names that the model's `forward` gives them, defaults included."""
        bound = inspect.signature(model.forward).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def inputs(self, model: nn.Module) -> list[Tensor]:
        """The arguments that are tensors, in the order of the model's `forward`."""
        return [v for v in self.named(model).values() if isinstance(v, Tensor)]


def same(outputs: Any, wanted: Any) -> bool:
    """True if all tensors of two outputs agree up to the rounding of their type."""
    mine, theirs = ([x for x in tree_leaves(o) if isinstance(x, Tensor)] for o in (outputs, wanted))
    return len(mine) == len(theirs) and all(map(_close, mine, theirs))


def _close(mine: Tensor, wanted: Tensor) -> bool:
    if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point() or not wanted.numel():
        return torch.equal(mine, wanted)
    finite = wanted[wanted.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(mine, wanted, rtol=0, atol=TOLERANCE.get(wanted.dtype, 5e-2) * scale, equal_nan=True)


def inference_copy(model: nn.Module) -> nn.Module:
    """A copy of a model that only answers: evaluation mode, no gradients, the textbook form folded."""
    dense = copy.deepcopy(getattr(model, "_orig_mod", model))
    densify(dense)
    return fold(dense).eval().requires_grad_(False)


# --- tracing ----------------------------------------------------------------------------------------------------------


class UntraceableError(Exception):
    """The model's Python code depends on its inputs, so that no one graph describes it."""


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = m.__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(m, nn.Sequential)
        return known or (type(m).__name__ == "Conv1D" and hasattr(m, "nf"))


def trace(model: nn.Module, call: Call) -> fx.GraphModule:
    """The graph of a model in evaluation mode, whose inputs are the call's tensors, in the order of `forward`.

    All other arguments are fixed to the values of the call. The graph is annotated: see `annotate`.
    """
    try:
        arguments = call.named(model)
        fixed = {n: v for n, v in arguments.items() if not isinstance(v, Tensor)}
        if any(not isinstance(v, (int, float, str, bool, type(None))) for v in fixed.values()):
            raise TypeError("arguments that are neither tensors nor plain values")
        graph = _Tracer().trace(model, concrete_args=fixed)
        for node, name in zip(graph.find_nodes(op="placeholder"), arguments, strict=True):
            if name in fixed:
                _erase(graph, node)
        network = fx.GraphModule(model, graph)
    except Exception as error:  # tracing runs the model's own code, which may raise anything
        raise UntraceableError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    annotate(network, call.inputs(model))
    return network


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Remove an input of a fixed value, with the assertions that fx adds for it."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


@torch.no_grad()
def annotate(network: fx.GraphModule, inputs: list[Tensor]) -> None:
    """Run the graph and note the shape of every node that is a tensor, and whether it is a function of each number."""
    _Notes(network).propagate(*inputs)


def shape_of(node: fx.Node) -> torch.Size:
    """The shape of a node in the example that the graph was annotated with; () if it is no tensor."""
    found = node.meta.get("tensor_meta")
    return getattr(found, "shape", torch.Size())


def is_pointwise(network: fx.GraphModule, node: fx.Node) -> bool:
    """True if the node applies one function to each number of its only input, and to nothing else."""
    shared = is_inplace(network, node) and len(node.all_input_nodes[0].users) > 1
    return bool(node.meta.get("pointwise")) and not shared


class _Notes(ShapeProp):
    def run_node(self, n: fx.Node) -> Any:
        watch = _Watch(shape_of(n.all_input_nodes[0]) if len(n.all_input_nodes) == 1 else None)
        with watch:
            result = super().run_node(n)
        called = n.op.startswith("call")
        n.meta["pointwise"] = called and watch.pointwise and isinstance(result, Tensor) and result.shape == watch.shape
        return result


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Are all operations tagged as pointwise, of tensors of one shape alone, and without chance?"""

    def __init__(self, shape: torch.Size | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape = shape
        self.pointwise = shape is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tagged = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
        shapes = {x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self.pointwise &= (tagged or func in UNTAGGED) and shapes <= {self.shape, torch.Size()}
        return func(*args, **(kwargs or {}))


# --- layers -----------------------------------------------------------------------------------------------------------


def module_of(network: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The layer that a node calls, if it calls one."""
    return network.get_submodule(str(node.target)) if node.op == "call_module" else None


def is_inplace(network: fx.GraphModule, node: fx.Node) -> bool:
    """True if the node writes into its input."""
    return bool(getattr(module_of(network, node), "inplace", False) or node.kwargs.get("inplace", False))


def calls_of(network: fx.GraphModule) -> Counter[str]:
    """How often each layer is called."""
    return Counter(str(node.target) for node in network.graph.find_nodes(op="call_module", sort=False))


def tidy(network: fx.GraphModule) -> None:
    """Make the code of a changed graph."""
    network.graph.lint()
    network.delete_all_unused_submodules()
    network.recompile()


def replace_node(node: fx.Node, other: fx.Node) -> None:
    """Let all users of a node use another instead."""
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)
    if not node.users:
        node.graph.erase_node(node)


def fold_batch_norms(network: fx.GraphModule) -> None:
    """γ(Wx + b - μ)/σ + β = (γ/σ W)x + (γ/σ(b - μ) + β), where a batch norm is all that uses a layer."""
    for before, node, norm in _batch_norms(network):
        layer: Any = module_of(network, before)
        if isinstance(layer, _ConvNd) and not isinstance(layer, _ConvTransposeNd):
            network.set_submodule(str(before.target), fuse_conv_bn_eval(layer, norm))
        elif type(layer) is nn.Linear and isinstance(norm, nn.BatchNorm1d):
            network.set_submodule(str(before.target), fuse_linear_bn_eval(layer, norm))
        else:
            continue
        replace_node(node, before)
    tidy(network)


def _batch_norms(network: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node, Any]]:
    """Norms with their nodes, and the only call of a layer before each, which nothing else reads."""
    calls = calls_of(network)
    for node in list(network.graph.nodes):
        norm = module_of(network, node)
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None and not norm.training:
            before = node.all_input_nodes[0]
            if len(before.users) == 1 and calls[str(before.target)] == 1:
                yield before, node, norm
