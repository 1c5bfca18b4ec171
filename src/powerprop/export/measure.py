"""Which form of a layer is fastest at its own input: dense, dense on columns, or sparse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from powerprop.export.csr import columns, product, rows
from powerprop.export.draft import Draft
from powerprop.export.layers import ColumnsLinear, RowsLinear, matrix, sparse_layer
from powerprop.export.plan import SPARSE_ENOUGH, Choice, best_times, choose
from powerprop.mask_entries import count

__all__ = ["measured_choices"]


def measured_choices(draft: Draft, margin: float) -> list[Choice]:
    """The fastest form of every layer that has others, and that the example calls."""
    return [_choice(draft, name, layer, x, margin) for name, (layer, x) in _layers(draft).items()]


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


def _choice(draft: Draft, name: str, layer: nn.Module, x: Tensor, margin: float) -> Choice:
    """The rule for one layer: the fastest of its other forms, if `choose` prefers it to the dense one."""
    weight = matrix(layer)
    assert weight is not None
    zero = 1 - count(weight != 0) / max(1, weight.numel())
    if zero < SPARSE_ENOUGH:
        return Choice(name, "dense", zero, reason=f"less than {SPARSE_ENOUGH:.0%} is zero")
    try:
        calls = _forms(draft, name, layer, x)
        calls["sparse"]()
    except RuntimeError as error:
        return Choice(name, "dense", zero, reason=f"no sparse product here: {str(error).splitlines()[0]}")
    times = best_times(calls, x.device)
    best = min(calls.keys() - {"dense"}, key=lambda form: times[form])
    form = best if choose(times["dense"], times[best], margin) == "sparse" else "dense"
    return Choice(name, form, zero, times["dense"], times["sparse"], columns=times.get("columns"))


def _forms(draft: Draft, name: str, layer: nn.Module, x: Tensor) -> dict[str, Callable[[], object]]:
    """Calls of a layer in each of its forms, as they run in a network."""
    many = x.dim() > 1 and len(x) > 1
    other = sparse_layer(layer, many)
    if not (draft.traced and x.dim() == 2 and isinstance(other, ColumnsLinear)):
        return {"dense": lambda: layer(x), "sparse": lambda: other(x)}
    given = columns(x).contiguous() if any(name == after for _, after in draft.links) else None
    kept = any(name == before for before, _ in draft.links)
    forms = {"columns": ColumnsLinear(layer, many, csr=False), "sparse": other}
    calls = {form: _on_columns(linear, x, given, kept) for form, linear in forms.items()}
    return {"dense": _on_rows(layer, x, given), **calls}


def _on_columns(layer: ColumnsLinear, x: Tensor, given: Tensor | None, kept: bool) -> Callable[[], object]:
    """A call that makes columns of its rows and rows of its columns, unless the neighbours do without."""
    parts, turn, used = (layer.weight, layer.bias, layer.stacked), layer.turn, layer.used
    given = given if used is None else None

    def call() -> Tensor:
        y = product(*parts, turn(x, used) if given is None else given)
        return y if kept else rows(y).contiguous()

    return call


def _on_rows(layer: nn.Module, x: Tensor, given: Tensor | None) -> Callable[[], object]:
    if type(layer) is not nn.Linear:
        return lambda: layer(x)
    dense = RowsLinear(layer)
    bias, turned = dense.bias, dense.turned
    return lambda: torch.addmm(bias, x if given is None else rows(given), turned)
