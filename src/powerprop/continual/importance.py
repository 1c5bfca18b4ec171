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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from powerprop.continual.data import all_tensors, count_rows, take_rows
from powerprop.continual.layers import loose_layers, swapped_parameters
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


def mean_over_inputs(
    model: nn.Module, loss: Loss, batches: Iterable[Any], measure: Measure, *further: Loss
) -> dict[str, Tensor]:
    """The mean over all inputs of measure(∂ loss of that input alone / ∂θ), for every parameter that the loss uses.

    It is the same however the inputs are cut into batches. The model is in evaluation mode meanwhile; parameters that
    ask for no gradient have no entry.

    loss: of a batch, through the model's layers as they are; called with batches of one input.
    batches: tensors, or tuples, lists and dictionaries of them, with one row for every input.
    further: losses whose means are added.
    """
    total: dict[str, Tensor] = {}
    count, shapes, each = 0, None, list[_Gradients]()
    with evaluating(model), torch.enable_grad():
        for batch in batches:
            rows, found = count_rows(batch), [(t.shape[1:], t.dtype) for t in all_tensors(batch)]
            if found != shapes:
                shapes, each = found, [_Gradients(model, one, batch) for one in (loss, *further)]
            for gradients in each:
                for index in torch.split(torch.arange(rows, device=gradients.device), gradients.at_a_time):
                    _add(total, gradients.sums(batch, index, measure))
            count += rows
    if not count:
        raise ValueError("expected batches with at least one input, got none")
    return {name: each / count for name, each in total.items()}


class _Gradients:
    """The gradients of a loss of each input by itself, for inputs that look like those of a batch.

    A parameter that linear layers alone use is not differentiated by: a zero that is added to the output of each of
    their calls, a tap, has the gradient δ. `direct` are the others that the loss uses.
    """

    def __init__(self, model: nn.Module, loss: Loss, batch: Any) -> None:
        self.model, self.loss, self.vectorised = model, loss, True
        self.named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.device = next(model.parameters()).device
        row = take_rows(batch, torch.zeros((), dtype=torch.long, device=self.device))
        linear = {name: module for name, module in model.named_modules() if _is_linear(module)}
        loose = loose_layers(lambda: loss(row), linear)
        self.layers = {module for name, module in linear.items() if name not in loose}
        with self._tapped() as calls:
            value = loss(row)
        self.calls, self.taps = [layer for layer, *_ in calls], [torch.zeros_like(out.detach()) for *_, out in calls]
        seen = value.requires_grad and torch.autograd.grad(value, list(self.named.values()), allow_unused=True)
        used = {n for n, g in zip(self.named, seen or [None] * len(self.named), strict=True) if g is not None}
        others = {p for module in set(model.modules()) - self.layers for p in module._parameters.values()}
        self.direct = {n: p.detach() for n, p in self.named.items() if n in used and p in others}
        self.closed = {n: p for n, p in self.named.items() if n in used and p not in others}
        numbers = [*self.direct.values(), *self.taps, *(x for _, x, _ in calls)]
        self.at_a_time = max(1, ROOM // max(1, 2 * sum(t.numel() for t in numbers)))

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
            with sdpa_kernel(SDPBackend.MATH), swapped_parameters(self.model, direct), self._tapped(taps) as calls:
                return self.loss(take_rows(batch, row)), [x for _, x, _ in calls]

        each = vmap(grad(of_one, argnums=(0, 1), has_aux=True), in_dims=(None, None, 0), randomness="different")
        (deltas, direct), inputs = each(self.taps, self.direct, index)
        a, delta = ([_wide(t).reshape(len(index), -1, t.shape[-1]) for t in each] for each in (inputs, deltas))
        total = {n: measure(_wide(g)).sum(0) for n, g in direct.items()}
        for name, parameter in self.closed.items():
            users = [i for i, layer in enumerate(self.calls) if any(p is parameter for p in layer._parameters.values())]
            own = torch.cat([delta[i] for i in users], 1)
            if parameter.ndim == 1:
                total[name] = measure(own.sum(1)).sum(0)
            else:
                total[name] = _of_weight(torch.cat([a[i] for i in users], 1), own, measure)
        return total

    @contextmanager
    def _tapped(self, taps: list[Tensor] | None = None) -> Iterator[list[tuple[nn.Module, Tensor, Tensor]]]:
        """Note layer, input and output of every call of a linear layer, and add the taps to the outputs."""
        calls: list[tuple[nn.Module, Tensor, Tensor]] = []

        def tap(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
            calls.append((layer, args[0] if args else kwargs["input"], output))
            return None if taps is None else output + taps[len(calls) - 1]

        hooks = [each.register_forward_hook(tap, prepend=True, with_kwargs=True) for each in self.layers]
        try:
            yield calls
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


def _wide(tensor: Tensor) -> Tensor:
    """In single precision at least: squares of small gradients vanish in half."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


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

    Examples:
        >>> fisher = continual.diagonal_fisher(model, batches, continual.Classification(), labels="expected")
    """
    check_labels(labels)

    def of_batch(loss: Callable[[Model, Any, int], Tensor], batch: Any) -> Tensor:
        return loss(seen, batch, task)

    def natural(batch: Any) -> Any:
        return objective.natural(objective.outputs(seen, batch, task))

    seen, rest = module if model is None else model, iter(batches)
    first = list(islice(rest, 1))
    batches = chain(first, rest)
    if not first or labels == "empirical":
        losses: list[Loss] = [partial(of_batch, objective.loss)]
    elif _has_natural(objective):
        losses = _columns(natural, module, first[0])
    elif not isinstance(objective, Classification):
        losses = [partial(of_batch, each) for each in objective.information()]
    else:
        batches = (_classified(objective, batch) for batch in batches)
        if labels == "sampled":
            batches = _labelled(batches, objective, seen, generator)
        losses = _surprises(objective, module, seen, labels, first[0])
    return mean_over_inputs(module, losses[0], batches, torch.square, *losses[1:])


def sensitivity(
    module: nn.Module, batches: Iterable[Any], objective: Objective, model: Model | None = None, mean: bool = False,
    task: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
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
    if labels != "empirical" and not isinstance(objective, Classification) and not _has_natural(objective):
        objective.information()


def _has_natural(objective: Objective) -> bool:
    return type(objective).natural is not Objective.natural


def _columns(numbers: Callable[[Any], Any], module: nn.Module, first: Any) -> list[Loss]:
    """A loss for each of the numbers that every input of a batch has; the first batch tells how many there are."""

    def mean_of(k: int, batch: Any) -> Tensor:
        mean: Tensor = numbers(batch)[:, k].mean()
        return mean

    with evaluating(module), torch.no_grad():
        return [partial(mean_of, k) for k in range(numbers(first).shape[1])]


def _surprises(objective: Classification, module: nn.Module, model: Model, labels: Labels, first: Any) -> list[Loss]:
    """-log p of the drawn label, or of the likeliest; or √p · -log p of each, whose squares have the mean over all."""

    def log_p(batch: Any) -> Tensor:
        return _outputs(objective, model, objective.inputs(batch)).log_softmax(1)

    def weighed(batch: Any) -> Tensor:
        own = log_p(batch)
        return -(own.detach().mul(0.5).exp() * own)

    if labels == "expected":
        return _columns(weighed, module, first)
    if labels == "predicted":
        return [lambda batch: -log_p(batch).max(1).values.mean()]
    return [lambda batch: F.cross_entropy(_outputs(objective, model, batch[0]), batch[1])]


def _outputs(objective: Classification, model: Model, x: Tensor) -> Tensor:
    """Those that are compared."""
    found: Tensor = objective.compared(model(x))
    if found.shape[1] < 2:
        raise ValueError(f"a class is told from others: expected two or more outputs, got {found.shape[1]}")
    return found


def _classified(objective: Classification, batch: Any) -> Any:
    """A batch whose targets are classes; with others, nothing of what was learned would be in the information."""
    y = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    if isinstance(y, Tensor) and not are_labels(y):
        text = f"{type(objective).__name__} expects labels that are integers (N,), got {y.dtype} {tuple(y.shape)}"
        raise ValueError(f"{text}; say objective=Regression() or another that learns such targets")
    return batch


def _labelled(
    batches: Iterable[Any], objective: Classification, model: Model, generator: torch.Generator | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs with labels that are drawn among the outputs that are compared."""
    for batch in batches:
        x = objective.inputs(batch)
        with torch.no_grad():
            p = _outputs(objective, model, x).softmax(1)
        yield x, torch.multinomial(p.cpu(), 1, generator=generator)[:, 0].to(p.device)
