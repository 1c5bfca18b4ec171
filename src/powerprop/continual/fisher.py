"""How much the answers of a network depend on each of its weights: the diagonal of the Fisher information, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.continual.objective import Classification, Model, Objective
from powerprop.continual.persample import mean_over_inputs

__all__ = ["LABELS", "Labels", "check_labels", "diagonal_fisher", "sensitivity"]

Labels = Literal["sampled", "expected", "predicted", "empirical"]
LABELS: tuple[Labels, ...] = get_args(Labels)


def check_labels(labels: str) -> None:
    """An unknown kind of labels is an error that lists the known ones."""
    if labels not in LABELS:
        raise ValueError(f"labels must be one of {', '.join(LABELS)}, got {labels!r}")


def diagonal_fisher(
    module: nn.Module, batches: Iterable[Any], objective: Objective, task: int = 0, *,
    labels: Labels = "sampled", model: Model | None = None, generator: torch.Generator | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The mean over inputs of the squared gradient of the loss of that input alone,

        F_i = 1/N Σ_n (∂ -log p(y_n|x_n, θ) / ∂θ_i)²,

    exact, and the same for every batch size. It is the Fisher information if y is what the network itself expects:

    labels: "sampled", one label drawn for every input from the network's answer; "expected", the exact mean over all
        classes, at as many times the cost; "predicted", the likeliest label; "empirical", the label in the data.
        Objectives other than classification have no labels: of them it is the square of the gradient of their loss,
        or of what they say themselves (`Objective.information`).
    model: the module as the task sees it; by default itself.
    generator: draws labels, on the CPU.
    """
    check_labels(labels)
    seen = module if model is None else model
    if labels == "empirical" or not isinstance(objective, Classification):
        return _information(module, batches, objective, task, seen)
    if labels == "predicted":
        return mean_over_inputs(module, lambda batch: _least_surprise(objective, seen, batch), batches, torch.square)
    labelled = _labelled(batches, objective, seen, labels, generator)
    return mean_over_inputs(module, lambda batch: _surprise(objective, seen, *batch), labelled, torch.square)


def sensitivity(
    module: nn.Module, batches: Iterable[Any], objective: Objective, model: Model | None = None, mean: bool = False
) -> dict[str, Tensor]:
    """1/N Σ_n |∂‖f(x_n)‖² / ∂θ_i|: how much the outputs change with each weight (Aljundi et al., 2018).

    mean: of the squares of the outputs, instead of their sum.
    """
    seen = module if model is None else model

    def length(batch: Any) -> Tensor:
        outputs = objective.compared(seen(objective.inputs(batch)))
        parts = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        squares = torch.cat([part.square().flatten() for part in parts])
        return squares.mean() if mean else squares.sum()

    return mean_over_inputs(module, length, batches, torch.abs)


def _information(
    module: nn.Module, batches: Iterable[Any], objective: Objective, task: int, model: Model
) -> dict[str, Tensor]:
    """The sum over the functions of an objective's own; they all see the same data."""
    terms = objective.information()
    batches = batches if len(terms) == 1 else list(batches)
    total: dict[str, Tensor] = {}
    for term in terms:
        found = mean_over_inputs(module, partial(_of_batch, term, model, task), batches, torch.square)
        total |= {name: total[name] + each if name in total else each for name, each in found.items()}
    return total


def _of_batch(term: Callable[[Model, Any, int], Tensor], model: Model, task: int, batch: Any) -> Tensor:
    return term(model, batch, task)


def _least_surprise(objective: Objective, model: Model, batch: Any) -> Tensor:
    """That of the likeliest label, which needs no pass of its own to be known."""
    log_p: Tensor = objective.compared(model(objective.inputs(batch))).log_softmax(1)
    return -log_p.max(1).values.mean()


def _surprise(objective: Objective, model: Model, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return (weight * F.cross_entropy(objective.compared(model(x)), y, reduction="none")).mean()


def _labelled(
    batches: Iterable[Any], objective: Objective, model: Model, labels: Labels, generator: torch.Generator | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs with labels among the outputs that are compared, and the root of how much each counts."""
    for batch in batches:
        x = objective.inputs(batch)
        with torch.no_grad():
            p = objective.compared(model(x)).softmax(1)
        if labels == "expected":
            for label, share in enumerate(p.unbind(1)):
                yield x, torch.full((len(x),), label, device=x.device), (share * p.shape[1]).sqrt()
        else:
            drawn = torch.multinomial(p.cpu(), 1, generator=generator)[:, 0]
            yield x, drawn.to(p.device), torch.ones_like(p[:, 0])
