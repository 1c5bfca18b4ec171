"""How much the answers of a network depend on each of its weights: the diagonal of the Fisher information, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.continual.objective import Classification, Model, Objective
from powerprop.continual.persample import mean_over_inputs
from powerprop.continual.rows import all_tensors
from powerprop.continual.task import are_labels

__all__ = ["LABELS", "Labels", "check_information", "check_labels", "diagonal_fisher", "sensitivity"]

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
        Objectives other than classification have no labels: of them it is what they say themselves, in closed form
        (`Objective.natural`, `Objective.information`), and with "empirical" the square of the gradient of their loss.
    model: the module as the task sees it; by default itself.
    generator: draws labels, on the CPU.
    """
    check_labels(labels)
    seen = module if model is None else model
    if labels == "empirical":
        return _sum_of([objective.loss], module, batches, task, seen)
    if not isinstance(objective, Classification) or type(objective).natural is not Objective.natural:
        terms, batches = _terms(objective, batches, task, seen)
        return _sum_of(terms, module, batches, task, seen)
    batches = (_classified(objective, batch) for batch in batches)
    if labels == "predicted":
        return mean_over_inputs(module, lambda batch: _least_surprise(objective, seen, batch), batches, torch.square)
    labelled = _labelled(batches, objective, seen, labels, generator)
    return mean_over_inputs(module, lambda batch: _surprise(objective, seen, *batch), labelled, torch.square)


def sensitivity(
    module: nn.Module,
    batches: Iterable[Any],
    objective: Objective,
    model: Model | None = None,
    mean: bool = False,
    task: int = 0,
) -> dict[str, Tensor]:
    """1/N Σ_n |∂‖f(x_n)‖² / ∂θ_i|: how much the outputs change with each weight (Aljundi et al., 2018).

    mean: of the squares of the outputs, instead of their sum.
    """
    seen = module if model is None else model

    def length(batch: Any) -> Tensor:
        outputs = list(all_tensors(objective.compared(objective.outputs(seen, batch, task))))
        if not outputs:
            kind = type(objective).__name__
            raise TypeError(f"{kind} does not call the model itself: say in its `outputs` what the network answers")
        squares = torch.cat([part.square().flatten() for part in outputs if part.is_floating_point()])
        return squares.mean() if mean else squares.sum()

    return mean_over_inputs(module, length, batches, torch.abs)


def check_information(objective: Objective, labels: str) -> None:
    """An error if there is no Fisher information of an objective, before anything is trained."""
    closed = isinstance(objective, Classification) or type(objective).natural is not Objective.natural
    if labels != "empirical" and not closed:
        objective.information()


def _classified(objective: Classification, batch: Any) -> Any:
    """A batch whose targets are classes; with others, nothing of what was learned would be in the information."""
    y = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    if isinstance(y, Tensor) and not are_labels(y):
        text = f"{type(objective).__name__} expects labels that are integers (N,), got {y.dtype} {tuple(y.shape)}"
        raise ValueError(f"{text}; say objective=Regression() or another that learns such targets")
    return batch


def _terms(
    objective: Objective, batches: Iterable[Any], task: int, model: Model
) -> tuple[Sequence[Callable[[Model, Any, int], Tensor]], Iterable[Any]]:
    """One function for every number whose squared gradients count, and the data, which is looked at for their count."""
    if type(objective).natural is Objective.natural:
        return objective.information(), batches
    batches = list(batches)
    with torch.no_grad():
        found = objective.natural(objective.outputs(model, batches[0], task)) if batches else None
    return [partial(_natural, objective, k) for k in range(0 if found is None else found.shape[1])], batches


def _natural(objective: Objective, k: int, model: Model, batch: Any, task: int) -> Tensor:
    found = objective.natural(objective.outputs(model, batch, task))
    assert found is not None
    return found[:, k].mean()


def _sum_of(
    terms: Sequence[Callable[[Model, Any, int], Tensor]], module: nn.Module, batches: Iterable[Any], task: int,
    model: Model,
) -> dict[str, Tensor]:  # fmt: skip
    """The sum over some functions; they all see the same data."""
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
        if p.shape[1] < 2:
            raise ValueError(f"a class is told from others: expected two or more outputs, got {p.shape[1]}")
        if labels == "expected":
            for label, share in enumerate(p.unbind(1)):
                yield x, torch.full((len(x),), label, device=x.device), (share * p.shape[1]).sqrt()
        else:
            drawn = torch.multinomial(p.cpu(), 1, generator=generator)[:, 0]
            yield x, drawn.to(p.device), torch.ones_like(p[:, 0])
