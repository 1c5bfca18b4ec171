"""Every strategy with what it takes to learn small tasks: the rows of the contract tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from powerprop import continual as c
from powerprop.continual import Strategy
from powerprop_paper.models import ReplayVAE

FEATURES = 8


class Row(NamedTuple):
    """A strategy, its arguments, and what it claims.

    objectives: those that it protects.
    alphas: powers that it takes; others are refused.
    masks: answers of earlier tasks stay as they were, to the bit.
    model: makes the network, if not any will do.
    """

    kind: type[Strategy]
    options: dict[str, Any]
    objectives: tuple[str, ...] = (
        "classification", "regression", "multi-label", "elbo", "function", "dictionary", "sliced",
    )  # fmt: skip
    alphas: tuple[float, ...] = (1.0, 1.5)
    masks: bool = False
    model: Callable[[], nn.Module] | None = None


STRATEGIES: dict[str, Row] = {
    "agem": Row(c.AGEM, {"memory": 40}),
    "der": Row(c.DER, {"memory": 40}),
    "der++": Row(c.DERpp, {"memory": 40}),
    "dgr": Row(c.DGR, {"hidden": (12,), "latent": 3}, ("classification",)),
    "efficient-packnet": Row(c.EfficientPackNet, {"gamma": 0.9, "retrain_steps": 10}, masks=True),
    "efficient-packnet-sparse": Row(
        c.EfficientPackNet, {"gamma": 0.9, "retrain_steps": 10, "sparse": True}, masks=True
    ),
    "er": Row(c.ER, {"memory": 40}),
    "er-online": Row(c.ER, {"memory": 40, "fill": "step"}),
    "ewc": Row(c.EWC, {"strength": 10.0}),
    "gem": Row(c.GEM, {"memory": 40}),
    "gpm": Row(c.GPM, {"threshold": 0.9}, alphas=(1.0,)),
    "hat": Row(c.HAT, {}, masks=True),
    "icarl": Row(c.ICaRL, {"memory": 40}, objectives=("classification",)),
    "joint-training": Row(c.JointTraining, {}),
    "laplace": Row(c.Laplace, {"strength": 10.0, "decay": 0.9}),
    "lwf": Row(c.LwF, {}, objectives=("classification",)),
    "mas": Row(c.MAS, {"strength": 0.1}),
    "naive": Row(c.Naive, {}),
    "owm": Row(c.OWM, {}, alphas=(1.0,)),
    "packnet": Row(c.PackNet, {"total_tasks": 3, "retrain_steps": 10}, masks=True),
    "perfect-memory": Row(c.PerfectMemory, {}),
    "rtf": Row(c.RtF, {}, ("classification",), model=lambda: ReplayVAE([FEATURES, 16, 16], 3, latent=3)),
    "si": Row(c.SI, {"strength": 1.0}),
    "supsup": Row(c.SupSup, {}, alphas=(1.0,), masks=True),
    "vcl": Row(c.VCL, {"examples": 4096, "samples": 3}),
}
"""Adding a method adds a row here."""


class Autoencoder(nn.Module):
    """A small variational autoencoder that draws its noise from the input, so that runs can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(FEATURES, 12), nn.Sequential(nn.Linear(3, 12), nn.ReLU())
        self.code, self.pixels = nn.Linear(12, 6), nn.Linear(12, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.code(torch.relu(self.encode(x))).chunk(2, 1)
        z = mean + (0.5 * log_variance).exp() * torch.sin(40 * x[:, :3])
        return self.pixels(self.decode(z)), mean, log_variance


def network(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, outputs)
    )


class Named(nn.Module):
    """A network that takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network(2)

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        return self.layers(inputs["x"])


def squared_error(model: Callable[[Tensor], Tensor], batch: Any, task: int) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def of_dictionaries(model: Callable[[Tensor], Tensor], batch: Any, task: int) -> Tensor:
    return (model({"x": batch["x"]}) - batch["y"]).square().mean()


def of_slices(model: Callable[[Tensor], Tensor], batch: Any, task: int) -> Tensor:
    """What a language model does: inputs and targets are cut out of one tensor, which the model could not take."""
    return (model(batch[:, :FEATURES]) - batch[:, FEATURES:]).square().mean()


OBJECTIVES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "classification": (lambda: network(3), c.Classification),
    "regression": (lambda: network(2), c.Regression),
    "multi-label": (lambda: network(4), c.MultiLabel),
    "elbo": (Autoencoder, c.Elbo),
    "function": (lambda: network(2), lambda: squared_error),
    "dictionary": (Named, lambda: of_dictionaries),
    "sliced": (lambda: network(2), lambda: of_slices),
}
PAIRS = [(name, objective) for name, row in STRATEGIES.items() for objective in row.objectives]


def tensors(objective: str, task: int, count: int = 64) -> tuple[Tensor, Tensor]:
    """Inputs in [0, 1] and targets of a kind, other ones for every task."""
    generator = torch.Generator().manual_seed(17 + task)
    x, mix = torch.rand(count, FEATURES, generator=generator), torch.randn(FEATURES, 4, generator=generator)
    y = (x - 0.5) @ mix
    if objective == "classification":
        return x, y[:, :3].argmax(1)
    return x, (y > 0).float() if objective == "multi-label" else y[:, :2]


class Dictionaries(Dataset[dict[str, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def data_of(objective: str, task: int) -> Any:
    """The data of a task as `learn` takes it."""
    x, y = tensors(objective, task)
    if objective == "dictionary":
        return Dictionaries(x, y)
    return torch.cat([x, y], 1) if objective == "sliced" else (x, y)


def inputs_of(objective: str, task: int) -> Any:
    """Some inputs as the network takes them."""
    x = tensors(objective, task)[0]
    return {"x": x} if objective == "dictionary" else x


def network_of(name: str, objective: str = "classification") -> nn.Module:
    return (STRATEGIES[name].model or OBJECTIVES[objective][0])()


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=1e-1),
}


def make(
    name: str, objective: str = "classification", alpha: float = 1.0, seed: int = 0, optimizer: str = "adam",
    **options: Any,
) -> Any:  # fmt: skip
    """A learner of a row of the table, always with the same first weights."""
    row, kind = STRATEGIES[name], OBJECTIVES[objective][1]
    net = network_of(name, objective)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    if issubclass(row.kind, c.EWC) and objective in ("function", "dictionary", "sliced"):
        options.setdefault("labels", "empirical")  # the Fisher information of a function is not known
    given = {"steps": 20, "batch_size": 16, "seed": seed, "alpha": alpha, "objective": kind(), **row.options}
    return row.kind(net, OPTIMIZERS[optimizer], **{**given, **options})


@cache
def _learned(name: str, alpha: float, options: tuple[tuple[str, Any], ...]) -> Strategy:
    ours = make(name, alpha=alpha, **dict(options))
    ours.learn(tensors("classification", 0))
    return ours  # type: ignore[no-any-return]


def learned(name: str, alpha: float = 1.0, **options: Any) -> Any:
    """A copy of a learner with one task behind it."""
    return copy.deepcopy(_learned(name, alpha, tuple(options.items())))


def state(learner: Strategy) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in learner.model.state_dict().items()}


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def loss_of(learner: Strategy, batch: Iterable[Tensor]) -> Tensor:
    """What a user's own loop computes: the loss of the task in hand."""
    objective: c.Objective = learner.objective
    with learner.viewing(learner.current) as model:
        return objective.loss(model, batch, learner.current)
