"""How much the answers of a network depend on each of its weights: gradients of every input by itself, squared (the
diagonal of the Fisher information, exactly) or in absolute value.

    1/N Σ_n measure(∂ L(x_n; θ) / ∂θ)

`torch.func` differentiates some inputs at a time. For one the gradient of a linear layer's weight is Σ_p δ_p a_pᵀ
where p runs over the places at which the layer is used, a and δ being its inputs and the gradients of its outputs. If
there is one such place, one product of matrices gives the sum over the inputs,

    Σ_n (δ_n a_nᵀ)² = (δ∘δ)ᵀ (a∘a),        Σ_n |δ_n a_nᵀ| = |δ|ᵀ |a|.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from powerprop.continual.data import all_tensors, count_rows, take_rows
from powerprop.continual.layers import swapped_parameters
from powerprop.continual.objective import Classification, Model, Objective
from powerprop.continual.task import are_labels
from powerprop.eval_mode import evaluating

__all__ = [
    "LABELS", "Labels", "check_information", "check_labels", "diagonal_fisher", "mean_over_inputs", "sensitivity",
]  # fmt: skip

Loss = Callable[[Any], Tensor]
"""The loss of a batch; here of one that has a single input."""
Measure = Callable[[Tensor], Tensor]
"""torch.square or torch.abs: of a product, it is the product of the measures."""

ROOM = 2**24
"""Numbers that are held at a time, about."""


def mean_over_inputs(model: nn.Module, loss: Loss, batches: Iterable[Any], measure: Measure) -> dict[str, Tensor]:
    """The mean over all inputs of measure(∂ loss of that input alone / ∂θ), for every parameter that the loss uses.

    It is the same however the inputs are cut into batches. The model is in evaluation mode meanwhile; parameters that
    ask for no gradient have no entry.

    loss: of a batch, through the model's layers as they are; called with batches of one input.
    batches: tensors, or tuples, lists and dictionaries of them, with one row for every input.
    """
    total: dict[str, Tensor] = {}
    plan, count = None, 0
    with evaluating(model), torch.enable_grad():
        for batch in batches:
            rows, shapes = count_rows(batch), _shapes(batch)
            if plan is None or plan.shapes != shapes:
                plan = _Plan(model, loss, batch, shapes)
            for index in torch.split(torch.arange(rows, device=plan.device), plan.at_a_time):
                _add(total, plan.sums(batch, index, measure))
            count += rows
    if not count:
        raise ValueError("expected batches with at least one input, got none")
    return {name: each / count for name, each in total.items()}


class _Plan:
    """Which calls are of linear layers, which parameters are used in other ways, and how many inputs fit at a time."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Any, shapes: Any) -> None:
        self.model, self.loss, self.shapes, self.vectorised = model, loss, shapes, True
        self.named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.device = next(model.parameters()).device
        self.layers = {module for module in model.modules() if _is_linear(module)}
        self.calls: list[nn.Module] = []
        self.taps: list[Tensor] = []
        self._look(batch)

    def _look(self, batch: Any) -> None:
        """Run one input through the network with the weights of linear layers out of autograd's sight, as long as their
        own layer is at work: a parameter that still has a gradient is used elsewhere, or by a layer of another kind."""
        own, inputs = {layer: dict(layer._parameters) for layer in self.layers}, 0

        def hide(layer: nn.Module, *_: Any) -> None:
            layer._parameters.update({n: None if p is None else p.detach() for n, p in own[layer].items()})  # type: ignore[misc]

        def show(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            nonlocal inputs
            layer._parameters.update(own[layer])
            self.calls.append(layer)
            self.taps.append(torch.zeros_like(output, requires_grad=False))
            inputs += _input(args, kwargs).numel()

        hooks = [layer.register_forward_pre_hook(hide) for layer in self.layers]
        hooks += [layer.register_forward_hook(show, prepend=True, with_kwargs=True) for layer in self.layers]
        try:
            value = self.loss(take_rows(batch, torch.zeros((), dtype=torch.long, device=self.device)))
        finally:
            for hook in hooks:
                hook.remove()
            for layer in self.layers:
                layer._parameters.update(own[layer])
        seen = value.requires_grad and torch.autograd.grad(value, list(self.named.values()), allow_unused=True)
        found = zip(self.named.items(), seen or [None] * len(self.named), strict=True)
        self.direct = {n: p.detach() for (n, p), g in found if g is not None}
        size = sum(p.numel() for p in self.direct.values()) + sum(tap.numel() for tap in self.taps) + inputs
        self.at_a_time = max(1, ROOM // max(1, 2 * size))

    def sums(self, batch: Any, index: Tensor, measure: Measure) -> dict[str, Tensor]:
        """Σ measure(gradient) over some inputs of a batch."""
        if self.vectorised:
            try:
                return self._together(batch, index, measure)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.vectorised = False
                text = f"{type(self.model).__name__} cannot be vectorised, its inputs are gone through one by one"
                warnings.warn(f"{text}: {str(error).partition('.')[0]}", stacklevel=2)
        return self._one_by_one(batch, index, measure)

    def _one_by_one(self, batch: Any, index: Tensor, measure: Measure) -> dict[str, Tensor]:
        """The plain definition: what `_together` must give too."""
        total: dict[str, Tensor] = {}
        for row in index:
            found = torch.autograd.grad(self.loss(take_rows(batch, row)), list(self.named.values()), allow_unused=True)
            _add(total, {n: measure(_wide(g)) for n, g in zip(self.named, found, strict=True) if g is not None})
        return total

    def _together(self, batch: Any, index: Tensor, measure: Measure) -> dict[str, Tensor]:
        def of_one(taps: list[Tensor], direct: Mapping[str, Tensor], row: Tensor) -> tuple[Tensor, list[Tensor]]:
            with sdpa_kernel(SDPBackend.MATH), swapped_parameters(self.model, direct), self._tapped(taps) as inputs:
                return self.loss(take_rows(batch, row)), inputs

        each = vmap(grad(of_one, argnums=(0, 1), has_aux=True), in_dims=(None, None, 0), randomness="different")
        (deltas, direct), inputs = each(self.taps, self.direct, index)
        a, delta = ([_wide(t).reshape(len(index), -1, t.shape[-1]) for t in each] for each in (inputs, deltas))
        return self._linear(a, delta, measure) | {n: measure(_wide(g)).sum(0) for n, g in direct.items()}

    def _linear(self, a: list[Tensor], delta: list[Tensor], measure: Measure) -> dict[str, Tensor]:
        """Of the weights and biases that are used by linear layers alone, which may be called several times."""
        total = {}
        for name, parameter in self.named.items():
            users = [i for i, each in enumerate(self.calls) if any(p is parameter for p in each._parameters.values())]
            if name in self.direct or not users:
                continue
            own_delta = torch.cat([delta[i] for i in users], 1)
            if parameter.ndim == 1:
                total[name] = measure(own_delta.sum(1)).sum(0)
            else:
                total[name] = _of_weight(torch.cat([a[i] for i in users], 1), own_delta, measure)
        return total

    @contextmanager
    def _tapped(self, taps: list[Tensor]) -> Iterator[list[Tensor]]:
        """Add a zero to every output of a linear layer, by which δ is the gradient, and note its inputs."""
        inputs: list[Tensor] = []

        def tap(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            inputs.append(_input(args, kwargs))
            return output + taps[len(inputs) - 1]

        hooks = [each.register_forward_hook(tap, prepend=True, with_kwargs=True) for each in set(self.calls)]
        try:
            yield inputs
        finally:
            for hook in hooks:
                hook.remove()


def _is_linear(module: nn.Module) -> bool:
    """True for linear layers as torch has them: weights that are parameters, and no other forward."""
    own = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return own and module._parameters.get("weight") is not None


def _of_weight(a: Tensor, delta: Tensor, measure: Measure) -> Tensor:
    """Σ_n measure(Σ_p δ_np a_npᵀ), for (inputs, places, features)."""
    if a.shape[1] == 1:
        return measure(delta[:, 0]).T @ measure(a[:, 0])
    size = max(1, ROOM // max(1, delta.shape[2] * a.shape[2]))
    parts = zip(torch.split(a, size), torch.split(delta, size), strict=True)
    return torch.stack([measure(d.transpose(1, 2) @ x).sum(0) for x, d in parts]).sum(0)


def _add(total: dict[str, Tensor], found: Mapping[str, Tensor]) -> None:
    total |= {name: total[name] + each if name in total else each for name, each in found.items()}


def _input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else kwargs["input"]
    return found


def _wide(tensor: Tensor) -> Tensor:
    """In single precision at least: squares of small gradients vanish in half."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _shapes(batch: Any) -> Any:
    """What the rows of a batch look like."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape[1:]), batch.dtype
    if isinstance(batch, Mapping):
        return {key: _shapes(value) for key, value in batch.items()}
    return [_shapes(part) for part in batch] if isinstance(batch, (tuple, list)) else batch


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
        _add(total, mean_over_inputs(module, partial(_of_batch, term, model, task), batches, torch.square))
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
