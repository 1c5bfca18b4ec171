"""Learners on disk: one safetensors file with a JSON text in its header, and no pickle."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from powerprop.continual.now import Learned
from powerprop.continual.objective import OBJECTIVES, Objective
from powerprop.continual.ongoing import below, go_on, ongoing_state
from powerprop.optim import Powerprop
from powerprop.tensorfiles import read_tensors, write_tensors

if TYPE_CHECKING:
    from powerprop.continual.strategy import Strategy

__all__ = ["below", "options_of", "put_back", "read_learner", "snapshot", "state_of", "take_up", "write_learner"]

FORMAT = "powerprop-learner-2"


# --- files ------------------------------------------------------------------------------------------------------


def write_learner(path: str | Path, tensors: dict[str, Tensor], data: dict[str, Any]) -> None:
    """Write tensors and plain data as one file with a checksum, whole or not at all."""
    write_tensors(path, FORMAT, tensors, data)


def read_learner(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_learner` wrote, onto the CPU; a truncated, damaged or foreign file is an error that names it."""
    return read_tensors(path, FORMAT)


# --- a learner as tensors and plain data ------------------------------------------------------------------------


def state_of(learner: Strategy) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that was learned, with that of the method's own parts; and where the task in hand stands."""
    tensors = weights(learner.model, learner.optimizer)
    data: dict[str, Any] = {
        "identity": identity(learner), "options": options_of(learner),
        "tasks": [list(task) for task in learner.tasks], "visits": learner.visits,
        "records": learner.records, "parts": {},
    }  # fmt: skip
    for name, part in learner.parts.items():
        own, data["parts"][name] = part.state()
        tensors |= {f"{name}/{key}": tensor for key, tensor in own.items()}
    if learner.now is not None:
        own, data["now"] = ongoing_state(learner)
        tensors |= {f"now/{key}": tensor for key, tensor in own.items()}
    return tensors, data


def identity(learner: Strategy) -> dict[str, Any]:
    """What a saved learner and the one that takes it up must have in common, besides the model."""
    optimizer = learner.optimizer
    own = {"method": type(learner).__name__, "objective": objective_of(learner.objective), "alpha": optimizer.alpha}
    own["rate"] = optimizer.rate
    alphas = {n: m.alpha for n, m in optimizer.masters.items() if learner.head_of(n) is None}
    return own | {name: getattr(learner, name) for name in _named(learner, "FIXED")} | {"alphas": alphas}


def options_of(learner: Strategy) -> dict[str, Any]:
    """The arguments that the learner can be made of again; the base optimiser with its own."""
    base = learner.optimizer.base
    defaults = {k: v for k, v in base.defaults.items() if v is None or isinstance(v, (bool, int, float, str, tuple))}
    made = {"optimizer": [type(base).__name__, defaults], "schedule": None if learner.schedule is None else "given"}
    parts: dict[type, dict[str, Any]] = getattr(learner, "own_options", {})
    of_parts = {f"{kind.__name__}.{name}": value for kind, own in parts.items() for name, value in own.items()}
    shared = {name for own in parts.values() for name in own}
    return made | {name: getattr(learner, name) for name in _named(learner, "OPTIONS") if name not in shared} | of_parts


def objective_of(objective: Objective) -> list[Any]:
    """Name and arguments of an objective."""
    return [type(objective).__name__, objective.options()]


def _named(learner: Strategy, attribute: str) -> list[str]:
    """What the classes of a learner list under this attribute."""
    return list(dict.fromkeys(name for kind in type(learner).__mro__ for name in vars(kind).get(attribute, ())))


def take_up(learner: Strategy, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
    """Make a learner what `state_of` described, all of it or nothing."""
    check_identity(data["identity"], json.loads(json.dumps(identity(learner))))
    for name, own in data["parts"].items():
        if own.get("tasks", len(data["tasks"])) != len(data["tasks"]):
            raise ValueError(f"{name!r} of {own['tasks']} tasks, in a learner of {len(data['tasks'])}")
    learner.parameters.add_heads(len(data["tasks"]) + ("now" in data), lambda: learner.generator("head"))
    now, plain = state_of(learner)
    kinds = ("model/", "phi/")
    check_shapes(*({n: t for n, t in each.items() if n.startswith(kinds)} for each in (tensors, now)))
    before = {n: t.clone() for n, t in now.items()}
    try:
        _put(learner, tensors, data)
        if "now" in data:
            put = partial(load_weights, learner.model, learner.optimizer, tensors)
            go_on(learner, below("now", tensors), data["now"], put)
            return
    except Exception:
        if learner.now is not None:
            learner.give_up()
        _put(learner, before, plain)
        raise
    learner.model.eval()


def _put(learner: Strategy, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
    load_weights(learner.model, learner.optimizer, tensors)
    _remember(learner, data["tasks"], data["records"])
    learner.visits = data.get("visits", len(data["tasks"]))
    for name, part in learner.parts.items():
        part.load_state(below(name, tensors), data["parts"][name])


def _remember(learner: Strategy, tasks: Sequence[Sequence[Any]], records: Mapping[str, Any]) -> None:
    """These are the tasks that were learned, and what was written down about them."""
    learner.tasks = [
        Learned(name, None if own is None else tuple(own), *(id or [place]))  # older files count the tasks
        for place, (name, own, *id) in enumerate(tasks)
    ]
    learner.records, learner.now = dict(records), None
    for number, learned in enumerate(learner.tasks):
        learner.objective.begin(number, learned.classes)


def check_identity(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """A learner goes on as it began."""
    for name, value in own.items():
        if saved.get(name, value) != value:
            raise ValueError(f"the saved learner has {name} {saved[name]!r}, this one has {value!r}")


def check_shapes(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """The same names with the same shapes, or an error with all that differ."""
    there, here = ({(n, tuple(t.shape)) for n, t in tensors.items()} for tensors in (saved, own))
    if there != here:
        only = [dict(sorted(one - other)) for one, other in ((there, here), (here, there))]
        raise ValueError(f"of the weights that differ the saved learner has {only[0]}, this one has {only[1]}")


# --- weights ----------------------------------------------------------------------------------------------------


def weights(model: nn.Module, optimizer: Powerprop) -> dict[str, Tensor]:
    """All that a model holds. Of a weight with α only φ is kept; the model's weight is Ψ(φ)."""
    masters = optimizer.masters
    rest = {f"model/{n}": t for n, t in model.state_dict().items() if n not in masters}
    return rest | {f"phi/{n}": m.theta() for n, m in masters.items()}


@torch.no_grad()
def load_weights(model: nn.Module, optimizer: Powerprop, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `weights` gave; no weight is masked afterwards."""
    optimizer.set_masks(None, None)
    model.load_state_dict(below("model", tensors), strict=False)
    phi = below("phi", tensors)
    for name, master in optimizer.masters.items():
        master.param.copy_(phi[name])
        master.kept = phi[name].clone() if phi[name].dtype != master.param.dtype else None


def snapshot(learner: Strategy) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies of what a task that diverges spoils: weights, and the parts of a method that steps change too."""
    tensors, plain = weights(learner.model, learner.optimizer), {}
    for part in _trained(learner):
        own, plain[part] = learner.parts[part].state()
        tensors |= {f"{part}/{name}": tensor for name, tensor in own.items()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}, copy.deepcopy(plain)


def put_back(learner: Strategy, before: tuple[Mapping[str, Tensor], Mapping[str, Any]]) -> None:
    """The learner with the weights that it had; what it knows of tasks has not changed."""
    tensors, plain = before
    load_weights(learner.model, learner.optimizer, tensors)
    for name, part in learner.parts.items():
        part.load_state(*((below(name, tensors), plain[name]) if name in plain else part.state()))
    learner.model.eval()


def _trained(learner: Strategy) -> list[str]:
    return [name for name, part in learner.parts.items() if getattr(part, "trained", False)]


def made_objective(saved: list[Any]) -> Objective:
    """The objective that `objective_of` described, if its arguments suffice."""
    name, options = saved
    if name not in OBJECTIVES or options is None:
        raise ValueError(f"the saved learner has the objective {name}, which its file cannot make: say objective=…")
    return OBJECTIVES[name](**options)
