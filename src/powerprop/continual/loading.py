"""Learners made from their files."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual import saving
from powerprop.continual.objective import Model, Objective
from powerprop.continual.strategy import KINDS, OptimizerFactory, Strategy

__all__ = ["load_learner"]


def load_learner(
    path: str | Path,
    model: nn.Module,
    *,
    optimizer: OptimizerFactory | Optimizer | None = None,
    objective: Objective | Callable[[Model, Any, int], Tensor] | None = None,
    **options: Any,
) -> Strategy:
    """The learner that `save` wrote into a file, made from the settings that the file has.

    model: the network, with any weights; those of the file are put into it.
    optimizer, objective: by default those of the file; one that is not torch's, or a function of your own, must be
        given again.
    options: further arguments to make the learner with, such as `schedule`, or others than in the file.

    Examples:
        >>> learner = continual.EWC(model, sgd, steps=20)
        >>> learner.learn((x, y))
        >>> learner.save("learner.safetensors")
        >>> learner = continual.load_learner("learner.safetensors", model)
    """
    tensors, data = saving.read_learner(path)
    identity, saved = data["identity"], dict(data["options"])
    kind = KINDS.get(identity["method"])
    if kind is None:
        text = f"{path} is of {identity['method']}, not one of {', '.join(KINDS)}"
        raise ValueError(f"{text}: make the learner yourself and call its load()")
    if saved.pop("schedule") is not None and "schedule" not in options:
        raise ValueError(f"{path} is of a learner with a schedule, which no file can hold: say schedule=…")
    made = objective if objective is not None else saving.made_objective(identity["objective"])
    base = saved.pop("optimizer")
    own = {"alpha": identity["alpha"], "rate": identity["rate"], **saved, **options}
    learner = kind(model, optimizer or _factory(*base), objective=made, **own)
    saving.take_up(learner, tensors, data, given=options)
    return learner


def _factory(name: str, defaults: dict[str, Any]) -> OptimizerFactory:
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ValueError(f"the saved learner has the optimiser {name}, which is not one of torch's: say optimizer=…")
    taken = inspect.signature(kind).parameters  # AdamW has defaults that it does not take
    known: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in defaults.items() if key in taken
    }  # fmt: skip
    return lambda parameters: kind(parameters, **known)
