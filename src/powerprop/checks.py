"""Arguments of `Powerprop` that cannot be right: every error repeats the input and says what was expected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from powerprop.select import Where, name_patterns
from powerprop.weight import WeightState

__all__ = [
    "check_decay",
    "check_groups",
    "check_kinds",
    "check_masks",
    "check_still_here",
    "check_weight",
    "check_where",
    "nothing_chosen",
]


def check_kinds(optimizer: object, model: object, sparsify: object) -> None:
    """An optimiser, a module, and a sparsifier or none."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if hasattr(optimizer, "masters"):
        raise TypeError(f"this optimizer is a Powerprop already, wrap its .base instead: {optimizer!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if sparsify is not None and (isinstance(sparsify, type) or not hasattr(sparsify, "attach")):
        raise TypeError(f"sparsify must be a method such as RigL(sparsity=0.9, steps=10_000), got {sparsify!r}")


def check_decay(decay: float, masters: Mapping[str, WeightState]) -> float:
    """A decay of φ, which there must be."""
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < math.inf:
        raise ValueError(f"decay must be a number, at least 0, got {decay!r}")
    if decay and all(master.alpha == 1 for master in masters.values()):
        raise ValueError(
            f"decay is of φ, and alpha = 1 has none: give the base optimiser a weight decay, got {decay:g}"
        )
    return float(decay)


def check_where(where: Where | None) -> Where | None:
    """The choice of weights; several patterns as a list, because they may be asked for again."""
    return where if where is None or isinstance(where, str) or callable(where) else name_patterns(where)


def check_weight(name: str, param: nn.Parameter, alpha: float) -> None:
    """A weight that can be given this α."""
    if isinstance(param, UninitializedParameter):
        raise ValueError(f"{name!r} has no shape yet: run one forward pass before wrapping the optimiser")
    if alpha > 1 and param.is_meta:
        raise ValueError(
            f"{name!r} is on the meta device and has no values yet: give it memory (model.to_empty) and initialise it "
            f"before wrapping the optimiser"
        )
    if alpha > 1 and param.numel() and not param.detach().any():
        raise ValueError(
            f"{name!r} is all zero: φ = 0 is a fixed point for alpha = {alpha:g} > 1, so it would never "
            f"learn; initialise it with non-zero values first, or leave it out through where="
        )


def check_groups(groups: Iterable[Mapping[str, Any]]) -> None:
    """Groups whose steps Powerprop follows up; its update is made in place, which autograd cannot see through."""
    if any(group.get("differentiable") for group in groups):
        raise ValueError(
            "differentiable=True is for alpha = 1 without masks alone: gradients would not go through the update of "
            "Powerprop; powerprop.reparametrize(model, alpha) is a form of it that autograd sees"
        )


def check_still_here(model: nn.Module, masters: Mapping[str, WeightState]) -> None:
    """Without a gradient anywhere: whether the model still holds the parameters that were wrapped."""
    if any(weight.param.grad is not None for weight in masters.values()):
        return
    named = dict(model.named_parameters(remove_duplicate=False))
    if gone := [name for name, weight in masters.items() if named.get(name) is not weight.param]:
        raise RuntimeError(
            f"{gone[0]!r} of the model is no longer the parameter that was wrapped, so that no step would train it: "
            f"fully_shard, to_empty and their like replace parameters; wrap the optimiser after them"
        )


def check_masks(masks: Mapping[str, Tensor], masters: Mapping[str, WeightState]) -> None:
    """Masks of weights that are here, each of the right kind and shape."""
    if unknown := set(masks) - set(masters):
        raise KeyError(f"masks for {sorted(unknown)}, but the weights here are {sorted(masters)}")
    for name, mask in masks.items():
        masters[name].check_mask(mask)


def nothing_chosen(model: nn.Module, where: Where | None) -> str:
    """What to say if no weight gets α."""
    names = [n for n, _ in model.named_parameters()]
    shown = ", ".join([*names[:5], *(["..."] if names[5:] else [])])
    return (
        f"no weight to give alpha to: the optimiser holds none that where={where!r} chooses among the model's "
        f"parameters: {shown or 'none'}; does it hold this model's parameters, not a copy's, and do they train "
        f"(requires_grad)? where= chooses others"
    )
