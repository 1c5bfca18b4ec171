"""A task that is being learned, as tensors and plain data: what a learner needs to go on in the middle of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from powerprop.continual.combine import act, verbs_of
from powerprop.continual.moments import Moments
from powerprop.masks import Masks, pack, unpack

if TYPE_CHECKING:
    from powerprop.continual.strategy import Strategy

__all__ = ["below", "go_on", "ongoing_state"]

PLAIN = (bool, int, float, str, type(None))


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with "prefix/", without it."""
    return {n[len(prefix) + 1 :]: t for n, t in tensors.items() if n.startswith(f"{prefix}/")}


def ongoing_state(learner: Strategy) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Where the task in hand stands: steps, random numbers, the optimiser, masks, and what methods keep meanwhile."""
    now = learner.now
    assert now is not None
    if now.batches:
        raise RuntimeError(f"{now.name}: gradients are coming together for a step: a learner is saved after update()")
    own = _own(learner)
    moments, plain = Moments(own, learner.optimizer).state()
    tensors = {f"generator/{purpose}": g.get_state() for purpose, g in now.generators.items()}
    tensors |= {f"optimizer/{name}": tensor for name, tensor in moments.items()}
    tensors |= {f"own/{name}": p.detach() for name, p in own.items() if name not in _of_model(learner)}
    for kind, masks in (("active", learner.optimizer.active), ("trainable", learner.optimizer.trainable)):
        tensors |= {f"{kind}/{name}": pack(mask) for name, mask in masks.items() if not mask.all()}
    data: dict[str, Any] = {
        "id": now.id, "name": now.name, "classes": now.classes, "steps": now.steps, "phase": now.phase,
        "step": now.step, "losses": learner.tally.plain(), "optimizer": plain, "groups": _groups(learner, own),
        "methods": {},
    }  # fmt: skip
    own_kind: Any = type(learner)
    for function in verbs_of(own_kind, "ongoing"):
        kind = function.__qualname__.rpartition(".")[0]
        found, data["methods"][kind] = function(learner)
        tensors |= {f"{kind}/{name}": tensor for name, tensor in found.items()}
    return tensors, data


def go_on(learner: Strategy, tensors: Mapping[str, Tensor], data: Mapping[str, Any], weights: Any) -> None:
    """Begin the task, and put everything where it was.

    weights: puts the weights of the file into the model, where beginning has changed them.
    """
    classes = None if data["classes"] is None else tuple(data["classes"])
    again = data["id"] in learner.ids
    learner.begin(data["id"], classes=classes, steps=data["steps"], name=data["name"], again=again)
    now = learner.now
    assert now is not None
    weights()
    own = _own(learner)
    _put_own(learner, own, below("own", tensors))
    active, trainable = (_masks(learner, below(kind, tensors)) for kind in ("active", "trainable"))
    learner.optimizer.set_masks(active, trainable)
    Moments(own, learner.optimizer).load_state(below("optimizer", tensors), data["optimizer"])
    _set_groups(learner, own, data["groups"])
    now.phase, now.step = data["phase"], data["step"]
    now.generators = {}
    for purpose, state in below("generator", tensors).items():
        learner.generator(purpose).set_state(state)
    learner.tally.put(data["losses"])
    own_kind: Any = type(learner)
    for function in verbs_of(own_kind, "go_on"):
        kind = function.__qualname__.rpartition(".")[0]
        function(learner, below(kind, tensors), data["methods"][kind])


def _of_model(learner: Strategy) -> dict[str, nn.Parameter]:
    return dict(learner.model.named_parameters())


def _own(learner: Strategy) -> dict[str, nn.Parameter]:
    """All that the optimiser trains, by name: the model's parameters, and those of methods."""
    found = _of_model(learner)
    for own in act(learner, "own_parameters"):
        found |= {f"of the method/{name}": parameter for name, parameter in own.items()}
    return found


def _put_own(learner: Strategy, own: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor]) -> None:
    names = own.keys() - _of_model(learner).keys()
    if names != saved.keys():
        raise ValueError(f"the method trains {sorted(names)} beside the model, the file has {sorted(saved)}")
    with torch.no_grad():
        for name in names:
            own[name].copy_(saved[name])


def _masks(learner: Strategy, packed: Mapping[str, Tensor]) -> Masks | None:
    masters = learner.optimizer.masters
    found = {n: unpack(bits, masters[n].param.shape).to(masters[n].param.device) for n, bits in packed.items()}
    return Masks(found) if found else None


def _groups(learner: Strategy, own: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Any]]:
    """The settings of every group, such as a rate that a scheduler has changed, by its first parameter."""
    names: dict[int, str] = {id(parameter): name for name, parameter in own.items()}
    named = [(names.get(id(g["params"][0])), g) for g in learner.optimizer.param_groups if g["params"]]
    return {n: {k: v for k, v in g.items() if isinstance(v, PLAIN)} for n, g in named if n is not None}


def _set_groups(learner: Strategy, own: Mapping[str, nn.Parameter], saved: Mapping[str, dict[str, Any]]) -> None:
    for group in learner.optimizer.param_groups:
        first = id(group["params"][0]) if group["params"] else None
        for name, settings in saved.items():
            if name in own and id(own[name]) == first:
                group.update(settings)
