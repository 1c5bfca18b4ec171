"""Real sparse inference: a pruned network becomes one that computes with its non-zero weights, where that pays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from powerprop.export.calls import Call, same
from powerprop.export.draft import Draft, make_draft
from powerprop.export.exported import Exported
from powerprop.export.files import load as load_weights
from powerprop.export.files import read
from powerprop.export.layers import matrix
from powerprop.export.measure import measured_choices
from powerprop.export.plan import MARGIN, Choice, Plan, best_times, choose
from powerprop.reparam import fold

__all__ = ["load", "sparse"]

Forms = dict[str, str]
"""The forms of layers by name; those that are not in it stay dense."""


@torch.no_grad()
def sparse(model: nn.Module, example: Any, *, plan: Plan | None = None, margin: float = MARGIN) -> Exported:
    """A network with the same outputs, up to rounding, that computes sparsely where that is faster here.

    Batch norms are folded and dead units removed exactly, where the model can be traced. Then every layer of which at
    least half is zero is measured at the example's batch size, dense against sparse; the networks that its forms make
    are measured against the dense one, and the fastest is returned: never a slower one than the model itself.

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
    return _fastest(dense, draft, call, measured_choices(draft, margin), margin)


def load(path: str | Path, model: nn.Module, example: Any) -> Exported:
    """Read a file into a model and export it by the plan in the file; without a plan it is measured here."""
    content = read(path)
    load_weights(path, model)
    return sparse(model, example, plan=content.plan)


def _fastest(dense: nn.Module, draft: Draft, call: Call, choices: list[Choice], margin: float) -> Exported:
    """Measure the networks that the choices make, and take the fastest."""
    plan = Plan("dense", draft.traced, call.batch(), torch.get_num_threads(), margin, notes=draft.notes)
    candidates = {"dense": (Forms(), Exported(dense, plan))}
    for kind, forms in _candidates(draft, choices).items():
        network = Exported(draft.build(forms), plan, draft.arguments)
        if _agrees(network, dense, call):
            candidates[kind] = forms, network
        else:
            note = f"with other forms of {', '.join(sorted(forms))} the outputs are others: left out"
            plan = replace(plan, notes=(*plan.notes, note))
    calls = {kind: _calling(network, call) for kind, (_, network) in candidates.items()}
    calls["dense"] = _calling(dense, call)
    times = best_times(calls, call.tensors()[0].device, seconds=0.2)
    best = _winner(times, margin)
    if best != "dense":  # the fastest of several may have been lucky once: it must win again, alone against the dense
        again = best_times({kind: calls[kind] for kind in ("dense", best)}, call.tensors()[0].device, seconds=0.1)
        times |= again
        best = _winner(again, margin)
    forms, network = candidates[best]
    network.plan = replace(
        plan,
        network=best,
        choices=tuple(_final(choice, forms.get(choice.layer, "dense"), best) for choice in choices),
        times=times,
        removed=draft.removed if best != "dense" else {},
    )
    return network.eval()


def _winner(times: dict[str, float], margin: float) -> str:
    """The fastest, if the rule prefers it to the dense network."""
    best = min(times, key=lambda kind: times[kind])
    return best if choose(times["dense"], times[best], margin) == "sparse" else "dense"


def _candidates(draft: Draft, choices: list[Choice]) -> dict[str, Forms]:
    """All dense, all on columns, all sparse, each layer as it was fastest alone: neighbours of a kind copy less."""
    fastest = {c.layer: c.form for c in choices if c.form != "dense"}
    if not draft.traced:
        return {"sparse": fastest} if fastest else {}
    columns = {c.layer: "columns" for c in choices if c.columns is not None}
    able = {c.layer: "sparse" for c in choices if c.sparse is not None}
    found: dict[str, Forms] = {"smaller": {}}
    for kind, forms in (("columns", columns), ("all sparse", able), ("sparse", fastest)):
        if forms not in found.values():
            found[kind] = forms
    return found


def _final(choice: Choice, form: str, network: str) -> Choice:
    """The choice as the network of all layers settled it."""
    if form == choice.form:
        return choice
    reason = f"the {network} network is faster" if form == "dense" else f"faster in the {network} network"
    return replace(choice, form=form, reason=reason)


def _calling(network: nn.Module, call: Call) -> Callable[[], object]:
    return lambda: call(network)


def _agrees(network: nn.Module, dense: nn.Module, call: Call) -> bool:
    try:
        return same(call(network), call(dense))
    except (RuntimeError, AttributeError, TypeError):  # code of the model that looks into its layers
        return False


def _followed(plan: Plan, dense: nn.Module, draft: Draft) -> Exported:
    """The network of an earlier plan; nothing is measured."""
    forms = {c.layer: c.form for c in plan.choices if c.form != "dense"}
    known = {n for n, m in draft.network.named_modules() if matrix(m) is not None}
    if forms.keys() - known:
        missing = ", ".join(sorted(forms.keys() - known))
        raise ValueError(f"the plan is of another model: this one has no layer {missing}")
    if plan.network == "dense":
        return Exported(dense, plan).eval()
    plan = replace(plan, traced=draft.traced, removed=draft.removed, notes=draft.notes)
    return Exported(draft.build(forms), plan, draft.arguments).eval()
