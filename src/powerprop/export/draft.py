"""A network on its way to its sparse form: one graph where the model has one, else layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx, nn

from powerprop.export.calls import Call, same
from powerprop.export.dead import remove_dead_units
from powerprop.export.exported import Fast
from powerprop.export.graph import Shapes, UntraceableError, fold_batch_norms, replace_module, shapes_of, trace
from powerprop.export.layers import sparse_layer
from powerprop.export.lower import links, lower

__all__ = ["Draft", "make_draft"]


@dataclass
class Draft:
    """A network on its way: `build({name: form})` is a copy in which these layers compute sparsely or on columns.

    call: of `network`, and of what `build` makes. A traced one takes the tensors of the example alone.
    arguments: of the example by name, all of them, if the network is traced.
    links: linear layers of which the first can hand columns on to the second.
    """

    network: nn.Module
    call: Call
    traced: bool
    build: Callable[[Mapping[str, str]], nn.Module]
    arguments: dict[str, Any] | None = None
    removed: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    links: set[tuple[str, str]] = field(default_factory=set)


def make_draft(dense: nn.Module, call: Call) -> Draft:
    """The model as a graph that gives the same outputs, or, where there is none, layer by layer."""
    try:
        network = trace(copy.deepcopy(dense), call)
        inputs = call.inputs(dense)
        fold_batch_norms(network)
        removed = remove_dead_units(network, inputs)
        _check(network, dense, call)
    except UntraceableError as error:
        note = f"layer by layer, batch norms and dead units stay: the model is not one graph ({error})"
        return Draft(dense, call, False, partial(_replaced, dense, many=call.batch() > 1), notes=(note,))
    shapes, many = shapes_of(network, inputs), call.batch() > 1
    build = partial(_rewritten, network, shapes=shapes, many=many)
    return Draft(network, Call(tuple(inputs)), True, build, call.named(dense), removed, links=links(network, shapes))


def _check(network: fx.GraphModule, dense: nn.Module, call: Call) -> None:
    """A graph must agree with the model for the example, and for half of it if the model takes that."""
    for this in filter(None, (call, call.half())):
        try:
            wanted = this(dense)
        except Exception:  # the model does not take this many inputs
            continue
        if not same(network(*this.inputs(dense)), wanted):
            raise UntraceableError("its graph gives other outputs")


def _rewritten(network: fx.GraphModule, forms: Mapping[str, str], shapes: Shapes, many: bool) -> nn.Module:
    result = copy.deepcopy(network)
    pairs = zip(network.graph.nodes, result.graph.nodes, strict=True)
    lower(result, forms, {new: shapes[old] for old, new in pairs if old in shapes}, many)
    return Fast(result)


def _replaced(model: nn.Module, forms: Mapping[str, str], many: bool) -> nn.Module:
    result = copy.deepcopy(model)
    for name in (n for n, form in forms.items() if form == "sparse"):
        replace_module(result, name, sparse_layer(result.get_submodule(name), many))
    return result
