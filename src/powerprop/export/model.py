"""Real sparse inference: a pruned network becomes one that computes with its non-zero weights, where that pays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powerprop.export.calls import Call, same
from powerprop.export.draft import Draft, make_draft
from powerprop.export.exported import Exported
from powerprop.export.files import load as load_weights
from powerprop.export.files import read
from powerprop.export.layers import matrix, sparse_layer
from powerprop.export.plan import MARGIN, SPARSE_ENOUGH, Choice, Plan, best_times, choose
from powerprop.mask_entries import count
from powerprop.reparam import fold

__all__ = ["load", "sparse"]


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
    if matrix(dense) is not None:  # a single layer, which has no name of its own
        dense = nn.Sequential(dense)
    draft = make_draft(dense, call)
    if plan is not None:
        return _followed(plan, dense, draft)
    choices = [_choice(name, layer, x, margin) for name, (layer, x) in _layers(draft).items()]
    return _fastest(dense, draft, call, choices, margin)


def load(path: str | Path, model: nn.Module, example: Any) -> Exported:
    """Read a file into a model and export it by the plan in the file; without a plan it is measured here."""
    content = read(path)
    load_weights(path, model)
    return sparse(model, example, plan=content.plan)


def _fastest(dense: nn.Module, draft: Draft, call: Call, choices: list[Choice], margin: float) -> Exported:
    """Measure the networks that the choices make, and take the fastest."""
    plan = Plan("dense", draft.traced, call.batch(), torch.get_num_threads(), margin, notes=draft.notes)
    candidates = {"dense": (set[str](), Exported(dense, plan))}
    for kind, names in _candidates(draft, choices).items():
        network = Exported(draft.build(names), plan, draft.arguments)
        if _agrees(network, dense, call):
            candidates[kind] = names, network
        else:
            note = f"with sparse {', '.join(sorted(names))} the outputs are others: left out"
            plan = replace(plan, notes=(*plan.notes, note))
    calls = {kind: _calling(network, call) for kind, (_, network) in candidates.items()}
    calls["dense"] = _calling(dense, call)
    times = best_times(calls, call.tensors()[0].device, seconds=0.2)
    best = _winner(times, margin)
    if best != "dense":  # the fastest of several may have been lucky once: it must win again, alone against the dense
        again = best_times({kind: calls[kind] for kind in ("dense", best)}, call.tensors()[0].device, seconds=0.1)
        times |= again
        best = _winner(again, margin)
    names, network = candidates[best]
    network.plan = replace(
        plan,
        network=best,
        choices=tuple(_final(choice, choice.layer in names, best) for choice in choices),
        times=times,
        removed=draft.removed if best != "dense" else {},
    )
    return network.eval()


def _winner(times: dict[str, float], margin: float) -> str:
    """The fastest, if the rule prefers it to the dense network."""
    best = min(times, key=lambda kind: times[kind])
    return best if choose(times["dense"], times[best], margin) == "sparse" else "dense"


def _candidates(draft: Draft, choices: list[Choice]) -> dict[str, set[str]]:
    """No sparse layer, those that were faster alone, and all: columns stay columns between sparse neighbours."""
    faster = {c.layer for c in choices if c.form == "sparse"}
    able = {c.layer for c in choices if c.sparse is not None}
    if not draft.traced:
        return {"sparse": faster} if faster else {}
    found: dict[str, set[str]] = {"smaller": set()}
    if faster:
        found["sparse"] = faster
    if able - faster:
        found["all sparse"] = able
    return found


def _final(choice: Choice, sparse: bool, network: str) -> Choice:
    """The choice as the network of all layers settled it."""
    if sparse == (choice.form == "sparse"):
        return choice
    reason = "faster among sparse neighbours" if sparse else f"the {network} network is faster"
    return replace(choice, form="sparse" if sparse else "dense", reason=reason)


def _calling(network: nn.Module, call: Call) -> Callable[[], object]:
    return lambda: call(network)


def _agrees(network: nn.Module, dense: nn.Module, call: Call) -> bool:
    try:
        return same(call(network), call(dense))
    except (RuntimeError, AttributeError, TypeError):  # code of the model that looks into its layers
        return False


def _layers(draft: Draft) -> dict[str, tuple[nn.Module, Tensor]]:
    """The layers that have a sparse form and are called for the example, with their first input of it."""
    found: dict[str, tuple[nn.Module, Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            if len(args) == 1 and isinstance(args[0], Tensor):
                found.setdefault(name, (layer, args[0]))

        return hook

    handles = [m.register_forward_pre_hook(note(n)) for n, m in draft.network.named_modules() if matrix(m) is not None]
    try:
        draft.call(draft.network)
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
        other = sparse_layer(layer, many=x.dim() > 1 and len(x) > 1)
        other(x)
    except RuntimeError as error:
        return Choice(name, "dense", zero, reason=f"no sparse product here: {str(error).splitlines()[0]}")
    times = best_times({"dense": lambda: layer(x), "sparse": lambda: other(x)}, x.device)
    return Choice(name, choose(times["dense"], times["sparse"], margin), zero, times["dense"], times["sparse"])


def _followed(plan: Plan, dense: nn.Module, draft: Draft) -> Exported:
    """The network of an earlier plan; nothing is measured."""
    names = {c.layer for c in plan.choices if c.form == "sparse"}
    known = {n for n, m in draft.network.named_modules() if matrix(m) is not None}
    if names - known:
        raise ValueError(f"the plan is of another model: this one has no layer {', '.join(sorted(names - known))}")
    if plan.network == "dense":
        return Exported(dense, plan).eval()
    plan = replace(plan, traced=draft.traced, removed=draft.removed, notes=draft.notes)
    return Exported(draft.build(names), plan, draft.arguments).eval()
