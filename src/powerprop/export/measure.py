"""Real sparse inference: a pruned network becomes one that computes with its non-zero weights, where that pays."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from powerprop import kernel
from powerprop.export.dead_units import remove_dead_units
from powerprop.export.exported import MARGIN, Choice, Exported, Plan
from powerprop.export.graph import Call, UntraceableError, fold_batch_norms, inference_copy, same, trace
from powerprop.export.lower import DenseLinear, layer_program, lower
from powerprop.export.operations import matrix
from powerprop.export.program import Program
from powerprop.mask_entries import count

__all__ = ["Candidate", "as_graph", "best_times", "choose", "sparse"]

SPARSE_ENOUGH = 0.5
"""Layers of which less is zero stay dense without being measured."""


def choose(dense: float, sparse: float | None, margin: float = MARGIN) -> str:
    """The rule: "sparse" if its time is at most margin · the dense time, else "dense"; None is "has no sparse form".

    Examples:
        >>> pp.export.choose(dense=1.0, sparse=0.5)
        'sparse'
    """
    return "sparse" if sparse is not None and sparse <= margin * dense else "dense"


@torch.no_grad()
def sparse(model: nn.Module, example: Any, *, plan: Plan | None = None, margin: float = MARGIN) -> Exported:
    """A network with the same outputs, up to rounding, that computes sparsely where that is faster here.

    Batch norms are folded and dead units removed exactly, where the model can be traced. Then every layer of which at
    least half is zero is measured at the example's batch size, dense against sparse; the network that the fastest forms
    make is verified and measured against the dense one: what is returned is never slower than the model itself.

    example: an input, a tuple of arguments, or a dict of named ones, of the batch size to be fast at.
    plan: of an earlier export: its choices are followed and nothing is measured.
    margin: the rule, see `choose`: sparse if sparse time <= margin · dense time.

    Examples:
        >>> fast = pp.export.sparse(model, x)
        >>> torch.allclose(fast(x), model(x), atol=1e-5)
        True
    """
    if not 0 < margin <= 1:
        raise ValueError(f"margin must be in (0, 1], got {margin!r}")
    call, dense = Call.of(example), inference_copy(model)
    if matrix(dense) is not None:  # a single layer, which has no name of its own
        dense = nn.Sequential(dense)
    finish = partial(_fastest, margin=margin) if plan is None else partial(_followed, plan=plan)
    try:
        return finish(as_graph(dense, call)).eval()
    except UntraceableError as error:
        note = f"layer by layer, batch norms and dead units stay: the model is not one graph ({error})"
    try:
        return finish(Candidate(dense, dense, call, notes=(note,))).eval()
    except UntraceableError as error:
        notes = (note, f"no layer was replaced: {error}")
        return Exported(dense, Plan("dense", False, call.batch(), torch.get_num_threads(), margin, notes=notes)).eval()


@dataclass
class Candidate:
    """A network on its way to its sparse form: one graph where the model has one, else the model itself.

    network: takes the tensors of the example alone if it is a graph; then `arguments` are all of them by name.
    """

    dense: nn.Module
    network: nn.Module
    call: Call
    arguments: dict[str, Any] | None = None
    removed: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def inputs(self) -> Call:
        """The call of `network`."""
        return Call(tuple(self.call.inputs(self.dense))) if self.traced else self.call

    @property
    def traced(self) -> bool:
        """True if the network is a graph of the model."""
        return self.arguments is not None

    def build(self, layers: Collection[str], plan: Plan) -> Exported:
        """A copy in which these layers compute sparsely."""
        result = copy.deepcopy(self.network)
        if self.traced:
            assert isinstance(result, fx.GraphModule)
            lower(result, layers, self.call.inputs(self.dense))
        else:
            for name, (layer, x) in self.called().items():
                if name in layers and (program := layer_program(layer, x)) is not None:
                    result.set_submodule(name, program)
        return Exported(result, plan, self.arguments)

    def called(self) -> dict[str, tuple[nn.Module, Tensor]]:
        """The layers with a sparse form that the example calls, with their first inputs."""
        found: dict[str, tuple[nn.Module, Tensor]] = {}

        def note(name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
            if len(args) == 1 and isinstance(args[0], Tensor):
                found.setdefault(name, (layer, args[0]))

        able = {n: m for n, m in self.network.named_modules() if matrix(m) is not None}
        handles = [m.register_forward_pre_hook(partial(note, n)) for n, m in able.items()]
        try:
            self.inputs(self.network)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def check(self, mine: nn.Module) -> None:
        """A network must agree with the model for the example, and for half of it if the model takes that."""
        for call in (self.call, *([self.call.resized(self.call.batch() // 2)] if self.call.is_batched() else [])):
            try:
                wanted = call(self.dense)
            except Exception:  # the model does not take this many inputs
                continue
            try:
                agrees = same(call(mine), wanted)
            except (RuntimeError, AttributeError, TypeError):  # code of the model that looks into its layers
                agrees = False
            if not agrees:
                raise UntraceableError("it gives other outputs")


def as_graph(dense: nn.Module, call: Call) -> Candidate:
    """The model as one graph, batch norms folded and dead units removed."""
    network = trace(copy.deepcopy(dense), call)
    fold_batch_norms(network)
    removed = remove_dead_units(network)
    return Candidate(dense, network, call, call.named(dense), removed)


def _fastest(candidate: Candidate, margin: float) -> Exported:
    """Measure every layer, then the networks that they make, and take the fastest."""
    choices = [_choice(n, *found, candidate.traced, margin) for n, found in candidate.called().items()]
    plan = Plan("dense", candidate.traced, candidate.call.batch(), torch.get_num_threads(), margin)
    networks = {"dense": Exported(candidate.dense, plan)}
    if candidate.traced:
        networks["smaller"] = candidate.build((), plan)
    if any(c.sparse is not None if candidate.traced else c.form == "sparse" for c in choices):
        networks["sparse"], choices = _chained(candidate, choices, plan)
    *_, changed = networks.values()
    candidate.check(changed)
    best, times = _race({**networks, "dense": candidate.dense}, candidate.call, margin)
    if best != "sparse":
        choices = [replace(c, form="dense", reason=f"the {best} network is faster") if c.form == "sparse" else c
                   for c in choices]  # fmt: skip
    networks[best].plan = replace(
        plan, network=best, choices=tuple(choices), times=times, notes=(*candidate.notes, *_left(networks[best])),
        removed=candidate.removed if best != "dense" else {},
    )  # fmt: skip
    return networks[best]


def _chained(candidate: Candidate, choices: list[Choice], plan: Plan) -> tuple[Exported, list[Choice]]:
    """The network of the forms that were faster alone, or of all sparse ones, if that is faster.

    A chain that nothing interrupts saves what is done where one ends.
    """
    forms = {"sparse": choices, "chain": [c if c.sparse is None else replace(c, form="sparse") for c in choices]}
    if not candidate.traced or forms["sparse"] == forms["chain"]:
        del forms["chain"]
    elif all(c.form == "dense" for c in choices):
        del forms["sparse"]
    built = {n: candidate.build([c.layer for c in form if c.form == "sparse"], plan) for n, form in forms.items()}
    best = next(iter(built))
    if len(built) > 1:
        calls = {name: partial(candidate.call, network) for name, network in built.items()}
        times = best_times(calls, candidate.call.tensors()[0].device)
        best = min(times, key=lambda name: times[name])
    return built[best], forms[best]


def _left(network: Exported) -> tuple[str, ...]:
    """What torch computes beside the programs of a graph, in words."""
    graph = network.network
    programs = {n for n, m in graph.named_children() if isinstance(m, Program)}
    if not isinstance(graph, fx.GraphModule) or not programs:
        return ()
    calls = [n for n in graph.graph.nodes if n.op.startswith("call") and n.target not in (*programs, getitem)]
    names = [n.name if n.op == "call_function" else str(n.target) for n in calls]
    return (f"{len(programs)} compiled programs, and by torch: {', '.join(names) or 'nothing'}",)


def _race(networks: Mapping[str, nn.Module], call: Call, margin: float) -> tuple[str, dict[str, float]]:
    """The fastest of several may have been lucky once: it must win again, alone against the dense."""
    device = call.tensors()[0].device
    calls = {kind: partial(call, network) for kind, network in networks.items()}
    times = best_times(calls, device, seconds=0.2)
    best = min(times, key=lambda kind: times[kind])
    if best != "dense":
        times |= best_times({kind: calls[kind] for kind in ("dense", best)}, device, seconds=0.1)
    return best if choose(times["dense"], times[best], margin) == "sparse" else "dense", times


def _followed(candidate: Candidate, plan: Plan) -> Exported:
    """The network of an earlier plan; nothing is measured."""
    known = {n for n, m in candidate.network.named_modules() if matrix(m) is not None}
    layers = {c.layer for c in plan.choices if c.form == "sparse"}
    if missing := sorted(layers - known):
        raise ValueError(f"the plan is of another model: this one has no layer {', '.join(missing)}")
    if plan.network == "dense":
        return Exported(candidate.dense, plan)
    plan = replace(plan, traced=candidate.traced, removed=candidate.removed)
    network = candidate.build(layers, plan)
    network.plan = replace(plan, notes=(*candidate.notes, *_left(network)))
    candidate.check(network)
    return network


# --- measuring --------------------------------------------------------------------------------------------------------


def _choice(name: str, layer: nn.Module, x: Tensor, traced: bool, margin: float) -> Choice:
    """The rule for one layer at its first input."""
    weight = matrix(layer)
    assert weight is not None
    zero = 1 - count(weight != 0) / max(1, weight.numel())
    if zero < SPARSE_ENOUGH:
        return Choice(name, "dense", zero, reason=f"less than {SPARSE_ENOUGH:.0%} is zero")
    program = layer_program(layer, x)
    if program is None or kernel.library() is None:
        return Choice(name, "dense", zero, reason=f"no sparse product here: {kernel.backend() if program else layer}")
    calls = {"dense": partial(layer, x), "sparse": partial(program, x)}
    if traced and x.dim() == 2 and type(layer) is nn.Linear:
        turned = DenseLinear(layer)
        calls["dense"] = partial(torch.addmm, turned.bias, x, turned.turned)
    times = best_times(calls, x.device)
    return Choice(name, choose(times["dense"], times["sparse"], margin), zero, times["dense"], times["sparse"])


def best_times(
    calls: Mapping[str, Callable[[], object]], device: torch.device, seconds: float = 0.05
) -> dict[str, float]:
    """Seconds per call of each, the least of many rounds that time all in turn: what else runs disturbs all alike.

    seconds: to spend on each, as far as a few rounds need no longer.
    """
    for call in calls.values():  # the first call of all warms up
        call()
    best = {name: _timed(call, 1, device) for name, call in calls.items()}
    repeats = {name: max(1, round(2e-4 / t)) for name, t in best.items()}
    end = time.perf_counter() + seconds * len(calls)
    rounds = 0
    while rounds < 5 or time.perf_counter() < end:
        for name, call in calls.items():
            best[name] = min(best[name], _timed(call, repeats[name], device))
        rounds += 1
    return best


def _timed(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeats
