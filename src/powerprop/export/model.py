"""Real sparse inference: a pruned network becomes one that computes with its non-zero weights alone, where that pays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from powerprop.entries import count
from powerprop.export.calls import Call, same
from powerprop.export.columns import use_sparse
from powerprop.export.dead import remove_dead_units
from powerprop.export.graph import UntraceableError, fold_batch_norms, replace_module, shapes_of, trace
from powerprop.export.layers import matrix, sparse_layer
from powerprop.export.plan import MARGIN, SPARSE_ENOUGH, Choice, Plan, best_times, choose
from powerprop.reparam import fold

__all__ = ["Exported", "sparse"]


class Exported(nn.Module):
    """A network for inference alone, with the plan that made it; it is called as the original is.

    Arguments that were no tensors in the example (a task, say) are part of the network and must stay the same.
    """

    def __init__(self, network: nn.Module, plan: Plan, call: Call, fixed: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.network = network
        self.plan = plan
        self._names = tuple(fixed) if fixed is not None else ()
        self._fixed = {n: v for n, v in (fixed or {}).items() if not isinstance(v, Tensor)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the original network, up to rounding."""
        if self._fixed:
            args, kwargs = self._tensors(args, kwargs), {}
        return self.network(*args, **kwargs)

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments that are inputs; the others must be those of the example."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if len(args) > len(self._names) or given.keys() - set(self._names):
            raise TypeError(f"this network takes {', '.join(self._names)}; got {len(args)} and {', '.join(kwargs)}")
        for name, value in self._fixed.items():
            if given.get(name, value) != value:
                raise ValueError(f"exported for {name}={value!r}, called with {name}={given[name]!r}: export it again")
        return tuple(given[n] for n in self._names if n not in self._fixed)

    def train(self, mode: bool = True) -> Exported:
        """Refused: a sparse network has no weights to train."""
        if mode:
            raise ValueError("an exported network only answers; train the model it was made from")
        return super().train(False)


@dataclass
class Draft:
    """A network on its way: `build(names)` is a copy in which these layers compute sparsely."""

    network: nn.Module
    traced: bool
    build: Callable[[set[str]], nn.Module]
    removed: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@torch.no_grad()
def sparse(model: nn.Module, example: Any, *, plan: Plan | None = None, margin: float = MARGIN) -> Exported:
    """A network with the same outputs, up to rounding, that computes sparsely where that is faster here.

    Batch norms are folded and dead units removed exactly, where the model can be traced. Then every layer of which at
    least half is zero is measured at the example's batch size, dense against sparse; the network of the faster forms
    is measured against the dense one, and the fastest is returned: never a slower one than the model itself.

    example: an input, a tuple of arguments, or a dict of named ones, of the batch size to be fast at.
    plan: of an earlier export: its choices are followed and nothing is measured.
    margin: the rule, see `choose`: sparse if sparse time <= margin · dense time.
    """
    if not 0 < margin <= 1:
        raise ValueError(f"margin must be in (0, 1], got {margin!r}")
    call = Call.of(example)
    dense = fold(copy.deepcopy(getattr(model, "_orig_mod", model))).eval().requires_grad_(False)
    draft = _draft(dense, call)
    if plan is None:
        chosen, plan = _measured(dense, draft, call, margin)
    else:
        chosen, plan = _follow(plan, dense, draft, call)
    fixed = call.named(dense) if draft.traced and chosen is not dense else None
    return Exported(chosen, plan, call, fixed).eval()


def _draft(dense: nn.Module, call: Call) -> Draft:
    """The model as a graph that gives the same outputs, or, where there is none, layer by layer."""
    try:
        network = trace(copy.deepcopy(dense), call)
        fold_batch_norms(network)
        removed = remove_dead_units(network, _inputs(call, dense))
        _check(network, dense, call)
    except UntraceableError as error:
        note = f"layer by layer, batch norms and dead units stay: the model is not one graph ({error})"
        return Draft(dense, False, lambda names: _replaced(dense, names), notes=(note,))
    shapes = shapes_of(network, _inputs(call, dense))
    return Draft(network, True, lambda names: _rewritten(network, names, shapes), removed)


def _inputs(call: Call, model: nn.Module) -> list[Tensor]:
    return [v for v in call.named(model).values() if isinstance(v, Tensor)]


def _check(network: fx.GraphModule, dense: nn.Module, call: Call) -> None:
    """A graph must agree with the model for the example, and for half of it if the model takes that."""
    for this in filter(None, (call, call.half())):
        try:
            wanted = this(dense)
        except Exception:  # the model does not take this many inputs
            continue
        if not same(network(*_inputs(this, dense)), wanted):
            raise UntraceableError("its graph gives other outputs")


def _rewritten(network: nn.Module, names: set[str], shapes: dict[fx.Node, torch.Size]) -> nn.Module:
    assert isinstance(network, fx.GraphModule)
    result = copy.deepcopy(network)
    pairs = zip(network.graph.nodes, result.graph.nodes, strict=True)
    use_sparse(result, names, {new: shapes[old] for old, new in pairs if old in shapes})
    return result


def _replaced(model: nn.Module, names: set[str]) -> nn.Module:
    result = copy.deepcopy(model)
    for name in names:
        replace_module(result, name, sparse_layer(result.get_submodule(name)))
    return result


def _measured(dense: nn.Module, draft: Draft, call: Call, margin: float) -> tuple[nn.Module, Plan]:
    """Measure layers, then networks, and take the fastest."""
    choices = [_choice(name, layer, x, margin) for name, (layer, x) in _layers(draft.network, call).items()]
    networks: dict[str, nn.Module] = {"dense": dense}
    if draft.traced:
        networks["smaller"] = draft.network
    notes = list(draft.notes)
    picked = _variants(draft, choices)
    for variant, names in picked.items():
        network = draft.build(names)
        if _works(network, dense, draft, call):
            networks[variant] = network
        else:
            notes.append(f"the network with sparse {', '.join(sorted(names))} gives other outputs and was left out")
    inputs = Call(tuple(_inputs(call, dense))) if draft.traced else call
    times = best_times(
        {n: _calling(network, call if n == "dense" else inputs) for n, network in networks.items()},
        call.tensors()[0].device,
        seconds=0.2,
    )
    best = min(times, key=lambda n: times[n])
    best = best if choose(times["dense"], times[best], margin) == "sparse" else "dense"
    names = picked.get(best, set())
    plan = Plan(
        network="sparse" if best in picked else best,
        traced=draft.traced,
        batch=call.batch(),
        threads=torch.get_num_threads(),
        margin=margin,
        choices=tuple(_final(choice, choice.layer in names, best) for choice in choices),
        times={"sparse" if n == best and n in picked else n: t for n, t in times.items()},
        removed=draft.removed if best != "dense" else {},
        notes=tuple(notes),
    )
    return networks[best], plan


def _variants(draft: Draft, choices: list[Choice]) -> dict[str, set[str]]:
    """The layers that were faster alone; and all that can be sparse, because columns stay columns between them."""
    faster = {c.layer for c in choices if c.form == "sparse"}
    able = {c.layer for c in choices if c.sparse is not None}
    variants = {"sparse": faster} if faster else {}
    if draft.traced and able - faster:
        variants["all sparse"] = able
    return variants


def _final(choice: Choice, sparse: bool, network: str) -> Choice:
    """The choice as the network of all layers settled it."""
    if sparse == (choice.form == "sparse"):
        return choice
    reason = "faster among sparse neighbours" if sparse else f"the {network} network is faster"
    return replace(choice, form="sparse" if sparse else "dense", reason=reason)


def _calling(network: nn.Module, call: Call) -> Callable[[], object]:
    return lambda: call(network)


def _works(network: nn.Module, dense: nn.Module, draft: Draft, call: Call) -> bool:
    inputs = Call(tuple(_inputs(call, dense))) if draft.traced else call
    try:
        return same(inputs(network), call(dense))
    except (RuntimeError, AttributeError, TypeError):  # code of the model that looks into its layers
        return False


def _layers(network: nn.Module, call: Call) -> dict[str, tuple[nn.Module, Tensor]]:
    """The layers that have a sparse form and are called for the example, with their first input of it."""
    found: dict[str, tuple[nn.Module, Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            if len(args) == 1 and isinstance(args[0], Tensor):
                found.setdefault(name, (layer, args[0]))

        return hook

    handles = [m.register_forward_pre_hook(note(n)) for n, m in network.named_modules() if matrix(m) is not None]
    try:
        inputs = Call(tuple(_inputs(call, network))) if isinstance(network, fx.GraphModule) else call
        inputs(network)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _choice(name: str, layer: nn.Module, x: Tensor, margin: float) -> Choice:
    """Measure one layer on its own input."""
    weight = matrix(layer)
    assert weight is not None
    zero = 1 - count(weight != 0) / max(1, weight.numel())
    if zero < SPARSE_ENOUGH:
        return Choice(name, "dense", zero, reason=f"less than {SPARSE_ENOUGH:.0%} is zero")
    try:
        other = sparse_layer(layer)
        other(x)
    except RuntimeError as error:
        return Choice(name, "dense", zero, reason=f"no sparse product here: {str(error).splitlines()[0]}")
    times = best_times({"dense": lambda: layer(x), "sparse": lambda: other(x)}, x.device)
    return Choice(name, choose(times["dense"], times["sparse"], margin), zero, times["dense"], times["sparse"])


def _follow(plan: Plan, dense: nn.Module, draft: Draft, call: Call) -> tuple[nn.Module, Plan]:
    """The network of an earlier plan; nothing is measured."""
    names = {c.layer for c in plan.choices if c.form == "sparse"}
    known = {n for n, m in draft.network.named_modules() if matrix(m) is not None}
    if names - known:
        raise ValueError(f"the plan is of another model: it has no layer {', '.join(sorted(names - known))}")
    plan = replace(plan, traced=draft.traced, notes=draft.notes)
    if plan.network == "dense":
        return dense, plan
    return (draft.build(names) if names else draft.network), replace(plan, removed=draft.removed)
