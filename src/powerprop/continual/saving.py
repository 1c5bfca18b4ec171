"""Learners on disk: one safetensors file with a JSON text in its header, and no pickle."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.combine import all_arguments, call_hooks
from powerprop.continual.history import Learned
from powerprop.continual.objective import OBJECTIVES, Objective
from powerprop.files import read_tensors, write_tensors
from powerprop.masks import Masks, pack, unpack
from powerprop.optim import Powerprop

__all__ = [
    "Moments", "below", "made_objective", "of_kind", "put_back", "read_learner", "snapshot", "state_of",
    "take_up", "trained_parameters", "write_learner",
]  # fmt: skip

FORMAT = "powerprop-learner-3"
PLAIN = (bool, int, float, str, type(None))
State = tuple[dict[str, Tensor], dict[str, Any]]


# --- files ------------------------------------------------------------------------------------------------------


def write_learner(path: str | Path, tensors: dict[str, Tensor], data: dict[str, Any]) -> None:
    """Write tensors and plain data as one file with a checksum, whole or not at all."""
    write_tensors(path, FORMAT, tensors, data)


def read_learner(path: str | Path) -> State:
    """Read what `write_learner` wrote, onto the CPU; a truncated, damaged or foreign file is an error that names it."""
    return read_tensors(path, FORMAT)


# --- a learner as tensors and plain data ------------------------------------------------------------------------


def state_of(learner: Any) -> State:
    """Everything that was learned, with that of the method's own parts; and where the task in hand stands."""
    of_parts, parts = _together({name: part.state() for name, part in learner.parts.items()})
    tensors = weights(learner.model, learner.optimizer) | of_parts
    data: dict[str, Any] = {
        "identity": identity(learner), "options": options_of(learner),
        "tasks": [list(task) for task in learner.tasks], "visits": learner.visits,
        "records": learner.records, "parts": parts,
    }  # fmt: skip
    if learner.now is not None:
        own, data["now"] = _state_now(learner)
        tensors |= _above("now", own)
    return tensors, data


def identity(learner: Any) -> dict[str, Any]:
    """What a saved learner and the one that takes it up must have in common, besides the model and its arguments."""
    optimizer, objective = learner.optimizer, learner.objective
    made = [type(objective).__name__, objective.options()]
    alphas = {n: m.alpha for n, m in optimizer.masters.items() if learner.head_of(n) is None}
    return {"method": type(learner).__name__, "objective": made, "alpha": optimizer.alpha, "rate": optimizer.rate,
            "alphas": alphas}  # fmt: skip


def options_of(learner: Any) -> dict[str, Any]:
    """The arguments that the learner can be made of again; the base optimiser with its own."""
    base = learner.optimizer.base
    defaults = {k: v for k, v in base.defaults.items() if isinstance(v, (*PLAIN, tuple))}
    made = {"optimizer": [type(base).__name__, defaults], "schedule": None if learner.schedule is None else "given"}
    return made | _arguments(learner)


def _arguments(learner: Any) -> dict[str, Any]:
    """The plain arguments by name; those of strategies that share a name, by part."""
    parts: dict[type, dict[str, Any]] = getattr(learner, "own_options", {})
    of_parts = {f"{kind.__name__}.{name}": value for kind, own in parts.items() for name, value in own.items()}
    names = all_arguments(type(learner)) - {name for own in parts.values() for name in own}
    found = {name: getattr(learner, name) for name in sorted(names)}
    return {name: value for name, value in (found | of_parts).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, PLAIN)


def take_up(learner: Any, tensors: Mapping[str, Tensor], data: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Make a learner what `state_of` described, all of it or nothing.

    given: arguments that it was made with on purpose, whatever the file has.
    """
    changing = {*given, *_task_attributes(learner)}
    own = {name: value for name, value in _arguments(learner).items() if name not in changing}
    _check_alike(data["options"], own)
    _check_alike(data["identity"], identity(learner))
    for name, own in data["parts"].items():
        if own.get("tasks", len(data["tasks"])) != len(data["tasks"]):
            raise ValueError(f"{name!r} of {own['tasks']} tasks, in a learner of {len(data['tasks'])}")
    learner.add_heads(len(data["tasks"]) + ("now" in data))
    now, plain = state_of(learner)
    kinds = ("model/", "phi/")
    check_shapes(*({n: t for n, t in each.items() if n.startswith(kinds)} for each in (tensors, now)))
    before = {n: t.clone() for n, t in now.items()}
    try:
        _put(learner, tensors, data)
        if "now" in data:
            _go_on(learner, tensors, data["now"])
            return
    except Exception:
        if learner.now is not None:
            learner.give_up()
        _put(learner, before, plain)
        raise
    learner.model.eval()


def _put(learner: Any, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
    load_weights(learner.model, learner.optimizer, tensors)
    learner.tasks = [Learned(name, None if own is None else tuple(own), id) for name, own, id in data["tasks"]]
    learner.records, learner.visits, learner.now = dict(data["records"]), data["visits"], None
    for number, learned in enumerate(learner.tasks):
        learner.objective.begin(number, learned.classes)
    for name, part in learner.parts.items():
        part.load_state(below(name, tensors), data["parts"][name])


def _check_alike(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """A learner goes on as it began."""
    for name, value in json.loads(json.dumps(own)).items():
        if saved.get(name, value) != value:
            raise ValueError(f"the saved learner has {name} {saved[name]!r}, this one has {value!r}")


def check_shapes(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """The same names with the same shapes, or an error with all that differ."""
    there, here = ({(n, tuple(t.shape)) for n, t in tensors.items()} for tensors in (saved, own))
    if there != here:
        only = [dict(sorted(one - other)) for one, other in ((there, here), (here, there))]
        raise ValueError(f"of the weights that differ the saved learner has {only[0]}, this one has {only[1]}")


def made_objective(saved: list[Any]) -> Objective:
    """The objective that a file describes, if its arguments suffice."""
    name, options = saved
    if name not in OBJECTIVES or options is None:
        raise ValueError(f"the saved learner has the objective {name}, which its file cannot make: say objective=…")
    return OBJECTIVES[name](**options)


# --- weights and moments ----------------------------------------------------------------------------------------


def weights(model: nn.Module, optimizer: Powerprop) -> dict[str, Tensor]:
    """All that a model holds; of a weight with α what its masks hide too."""
    masters = optimizer.masters
    rest = {f"model/{n}": t for n, t in model.state_dict().items() if n not in masters}
    return rest | {f"phi/{n}": m.theta() for n, m in masters.items()}


@torch.no_grad()
def load_weights(model: nn.Module, optimizer: Powerprop, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `weights` gave; no weight is masked afterwards."""
    optimizer.set_masks(None, None)
    model.load_state_dict(below("model", tensors), strict=False)
    theta = below("phi", tensors)
    for name, master in optimizer.masters.items():
        master.param.copy_(theta[name])
        master.kept = theta[name].clone() if theta[name].dtype != master.param.dtype else None


def snapshot(learner: Any) -> State:
    """Copies of what a task that diverges spoils: weights, and the parts of a method that steps change too."""
    changed = {name: part for name, part in learner.parts.items() if getattr(part, "trained", False)}
    tensors, plain = _together({name: part.state() for name, part in changed.items()})
    tensors |= weights(learner.model, learner.optimizer)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}, copy.deepcopy(plain)


def put_back(learner: Any, before: State) -> None:
    """The learner with the weights that it had; what it knows of tasks has not changed."""
    tensors, plain = before
    load_weights(learner.model, learner.optimizer, tensors)
    for name, part in learner.parts.items():
        part.load_state(*((below(name, tensors), plain[name]) if name in plain else part.state()))
    learner.model.eval()


class Moments:
    """The state of the base optimiser for the parameters of a model, or others by name, such as Adam's moments."""

    trained = True
    """Steps change it, so that a task which diverges must be taken back."""

    def __init__(self, model: nn.Module | Mapping[str, nn.Parameter], optimizer: Powerprop | Optimizer) -> None:
        self.model = model
        self.base: Optimizer = optimizer.base if isinstance(optimizer, Powerprop) else optimizer

    def _named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters() if isinstance(self.model, nn.Module) else self.model)

    def state(self) -> State:
        """Tensors as "parameter/name", and the rest of what is remembered of each parameter as plain data."""
        known = {name: self.base.state.get(parameter, {}) for name, parameter in self._named().items()}
        tensors = {f"{n}/{k}": v for n, of in known.items() for k, v in of.items() if isinstance(v, Tensor)}
        plain = {n: {k: v for k, v in of.items() if not isinstance(v, Tensor)} for n, of in known.items()}
        return tensors, {name: rest for name, rest in plain.items() if rest}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """What `state` gave, on the device of each parameter; a counter of steps only where torch wants it there."""
        known = self._named()
        counted = {p for g in self.base.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
        self.base.state.clear()
        for full, tensor in tensors.items():
            name, _, key = full.rpartition("/")
            of = known[name]
            device = of.device if key != "step" or of in counted else tensor.device
            self.base.state[of][key] = tensor.to(device, copy=True)
        for name, values in data.items():
            self.base.state[known[name]].update(values)


# --- in the middle of a task ------------------------------------------------------------------------------------


def _state_now(learner: Any) -> State:
    """Where the task in hand stands: steps, random numbers, the optimiser, masks, and what methods keep meanwhile."""
    now, optimizer = learner.now, learner.optimizer
    if now.batches:
        raise RuntimeError(f"{now.name}: gradients are coming together for a step: a learner is saved after update()")
    trained, of_model = trained_parameters(learner), dict(learner.model.named_parameters())
    moments, plain = Moments(trained, optimizer).state()
    methods, values = _together({name: _written(getattr(learner, name)) for name in _task_attributes(learner)})
    tensors = _above("generator", {purpose: g.get_state() for purpose, g in now.generators.items()})
    tensors |= _above("optimizer", moments) | _above("methods", methods)
    tensors |= _above("own", {name: p.detach() for name, p in trained.items() if name not in of_model})
    for kind, masks in (("active", optimizer.active), ("trainable", optimizer.trainable)):
        tensors |= _above(kind, {name: pack(mask) for name, mask in masks.items() if not mask.all()})
    groups = _groups(learner, trained)
    settings = {name: {k: v for k, v in group.items() if isinstance(v, PLAIN)} for name, group in groups.items()}
    data: dict[str, Any] = {
        "id": now.id, "name": now.name, "classes": now.classes, "steps": now.steps, "phase": now.phase,
        "step": now.step, "losses": [float(learner.tally.total), learner.tally.count], "optimizer": plain,
        "groups": settings, "methods": values,
    }  # fmt: skip
    return tensors, data


def _go_on(learner: Any, saved: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
    """Begin the task, and put everything where it was; the weights too, where beginning has changed them."""
    classes = None if data["classes"] is None else tuple(data["classes"])
    again = data["id"] in learner.ids
    learner.begin(data["id"], classes=classes, steps=data["steps"], name=data["name"], again=again)
    load_weights(learner.model, learner.optimizer, saved)
    now, tensors, trained = learner.now, below("now", saved), trained_parameters(learner)
    own, of_method = below("own", tensors), {name for name in trained if name.startswith(OF_METHOD)}
    if own.keys() != of_method:
        raise ValueError(f"the method trains {sorted(of_method)} beside the model, the file has {sorted(own)}")
    for name, tensor in own.items():
        trained[name].detach().copy_(tensor)
    learner.optimizer.set_masks(*(_masks(learner, below(kind, tensors)) for kind in ("active", "trainable")))
    Moments(trained, learner.optimizer).load_state(below("optimizer", tensors), data["optimizer"])
    for name, group in _groups(learner, trained).items():
        group.update(data["groups"].get(name, {}))
    now.phase, now.step, now.generators = data["phase"], data["step"], {}
    for purpose, state in below("generator", tensors).items():
        learner.generator(purpose).set_state(state)
    learner.tally.total.fill_(data["losses"][0])
    learner.tally.count = int(data["losses"][1])
    for name in _task_attributes(learner):
        setattr(learner, name, _read(learner, name, below(f"methods/{name}", tensors), data["methods"][name]))


OF_METHOD = "of the method/"


def trained_parameters(learner: Any) -> dict[str, nn.Parameter]:
    """All that the optimiser trains, by name: the model's parameters, and those of methods."""
    found = dict(learner.model.named_parameters())
    for own in call_hooks(learner, "own_parameters"):
        found |= {f"{OF_METHOD}{name}": parameter for name, parameter in own.items()}
    return found


def _task_attributes(learner: Any) -> list[str]:
    """What the classes of a learner list in `task_state`."""
    return list(dict.fromkeys(n for kind in type(learner).__mro__ for n in vars(kind).get("task_state", ())))


def of_kind(learner: Any, kind: type[Any]) -> list[Any]:
    """The values of one kind among what methods keep while a task is learned."""
    found = (getattr(learner, name, None) for name in _task_attributes(learner))
    return [value for value in found if isinstance(value, kind)]


def _written(value: Any) -> State:
    """What a method keeps while a task is learned: masks, tensors, a network, an optimiser, a part or a number."""
    if isinstance(value, Masks):
        return {name: pack(mask) for name, mask in value.items()}, {"masks": True}
    if isinstance(value, Mapping):
        return dict(value), {"tensors": True}
    if isinstance(value, nn.Module):
        return dict(value.state_dict()), {}
    if hasattr(value, "state"):
        tensors, data = (Moments(_numbered(value), value) if isinstance(value, Optimizer) else value).state()
        return tensors, {"part": data}
    return {}, {"plain": value}


def _read(learner: Any, name: str, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> Any:
    """The same again; networks and parts are there since the task was begun, and take up their state."""
    value = getattr(learner, name)
    if "masks" in data:
        return _masks(learner, tensors)
    if "tensors" in data:
        return {key: tensor.to(learner.device, copy=True) for key, tensor in tensors.items()}
    if "plain" in data:
        return data["plain"]
    if isinstance(value, nn.Module):
        value.load_state_dict(dict(tensors))
    else:
        part = Moments(_numbered(value), value) if isinstance(value, Optimizer) else value
        part.load_state(tensors, data["part"])
    return value


def _numbered(optimizer: Optimizer) -> dict[str, nn.Parameter]:
    every = (p for group in optimizer.param_groups for p in group["params"])
    return {str(number): parameter for number, parameter in enumerate(every)}


def _masks(learner: Any, packed: Mapping[str, Tensor]) -> Masks | None:
    masters = learner.optimizer.masters
    found = {n: unpack(bits, masters[n].param.shape).to(masters[n].param.device) for n, bits in packed.items()}
    return Masks(found) if found else None


def _groups(learner: Any, trained: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Any]]:
    """Every group of the optimiser by the name of its first parameter."""
    firsts = {g["params"][0]: g for g in learner.optimizer.param_groups if g["params"]}
    return {name: firsts[parameter] for name, parameter in trained.items() if parameter in firsts}


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with "prefix/", without it."""
    return {n[len(prefix) + 1 :]: t for n, t in tensors.items() if n.startswith(f"{prefix}/")}


def _together(states: Mapping[str, State]) -> State:
    """Several states by name as one."""
    tensors = {f"{name}/{key}": tensor for name, (own, _) in states.items() for key, tensor in own.items()}
    return tensors, {name: data for name, (_, data) in states.items()}


def _above(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}
