"""All methods by name, and learners made from their files."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual import saving
from powerprop.continual.gem import AGEM, GEM
from powerprop.continual.generative_replay import DGR, RtF
from powerprop.continual.gradient_projection import GPM, OWM
from powerprop.continual.hat import HAT
from powerprop.continual.icarl import ICaRL
from powerprop.continual.lwf import LwF
from powerprop.continual.objective import Model, Objective
from powerprop.continual.packing.efficient import EfficientPackNet
from powerprop.continual.packing.packnet import PackNet
from powerprop.continual.packing.supermasks import SupSup
from powerprop.continual.regularization import EWC, MAS, SI, Laplace
from powerprop.continual.replay import DER, ER, DERpp, JointTraining, PerfectMemory
from powerprop.continual.strategy import Naive, OptimizerFactory, Strategy
from powerprop.continual.vcl import VCL

__all__ = ["STRATEGIES", "load_learner"]

STRATEGIES: dict[str, type[Strategy]] = {
    kind.__name__: kind
    for kind in (
        AGEM, DER, DERpp, DGR, EfficientPackNet, ER, EWC, GEM, GPM, HAT, ICaRL, JointTraining, Laplace, LwF, MAS, Naive,
        OWM, PackNet, PerfectMemory, RtF, SI, SupSup, VCL,
    )
}  # fmt: skip
"""Adding a method adds its name here."""


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
    """
    tensors, data = saving.read_learner(path)
    identity, saved = data["identity"], dict(data["options"])
    kind = STRATEGIES.get(identity["method"])
    if kind is None:
        text = f"{path} is of {identity['method']}, not one of {', '.join(STRATEGIES)}"
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
