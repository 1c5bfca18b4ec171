"""Gradients of every input by itself, squared or in absolute value, summed without a loop over the inputs.

A layer that multiplies its inputs a by weights has the gradient Σ_p δ_p a_pᵀ for one input, where p runs over the
places at which the weights are used: positions of a convolution, words of a sentence, calls of the layer. `torch.func`
gives δ for all inputs at once; weights used in one place need one product of matrices more,

    Σ_n (δ_n a_nᵀ)² = (δ∘δ)ᵀ (a∘a),        Σ_n |δ_n a_nᵀ| = |δ|ᵀ |a|.

Parameters of all other kinds (norms, embeddings, weights used outside of their layer) are differentiated as they are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from powerprop.continual.rows import count_rows, take_rows
from powerprop.continual.view import wearing
from powerprop.eval_mode import evaluating

__all__ = ["mean_over_inputs"]

Loss = Callable[[Any], Tensor]
"""The loss of a batch; here of one that has a single input."""
Measure = Callable[[Tensor], Tensor]
"""torch.square or torch.abs: of a product, it is the product of the measures."""
Pair = tuple[Tensor, Tensor]
"""Inputs and gradients of the outputs of a layer, both (inputs, groups, places, features)."""

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
                for name, part in plan.sums(batch, index, measure).items():
                    total[name] = total[name] + part if name in total else part
            count += rows
    if not count:
        raise ValueError("expected batches with at least one input, got none")
    return {name: each / count for name, each in total.items()}


class _Plan:
    """Which layers have a closed form in this model, which parameters have not, and how many inputs fit at a time."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Any, shapes: Any) -> None:
        self.model, self.loss, self.shapes = model, loss, shapes
        self.named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.device = next(model.parameters()).device
        self.vectorised = True
        self._look(batch)

    def _look(self, batch: Any) -> None:
        """Run one input through the network with the weights of layers out of sight of autograd, as long as their own
        layer is at work: a parameter that still has a gradient is used elsewhere, or by a layer of another kind."""
        self.calls: list[tuple[nn.Module, Tensor, int]] = []
        layers = [module for module in self.model.modules() if _has_closed_form(module)]

        def hide(layer: nn.Module, *_: Any) -> None:
            for name, parameter in layer._parameters.items():
                layer._parameters[name] = None if parameter is None else parameter.detach()  # type: ignore[assignment]

        def show(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            layer._parameters.update(own[layer])
            size = _arranged(layer, _input(args, kwargs).detach().unsqueeze(0), output.detach().unsqueeze(0))[0].numel()
            self.calls.append((layer, torch.zeros_like(output, requires_grad=False), size))

        own = {layer: dict(layer._parameters) for layer in layers}
        hooks = [layer.register_forward_pre_hook(hide) for layer in layers]
        hooks += [layer.register_forward_hook(show, prepend=True, with_kwargs=True) for layer in layers]
        try:
            value = self.loss(take_rows(batch, torch.zeros((), dtype=torch.long, device=self.device)))
        finally:
            for hook in hooks:
                hook.remove()
            for layer in layers:
                layer._parameters.update(own[layer])
        seen = value.requires_grad and torch.autograd.grad(value, list(self.named.values()), allow_unused=True)
        found = zip(self.named.items(), seen or [None] * len(self.named), strict=True)
        self.direct = {n: p.detach() for (n, p), g in found if g is not None}
        size = sum(p.numel() for p in self.direct.values()) + sum(tap.numel() + size for _, tap, size in self.calls)
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
            for name, g in zip(self.named, found, strict=True):
                if g is not None:
                    each = measure(_wide(g))
                    total[name] = total[name] + each if name in total else each
        return total

    def _together(self, batch: Any, index: Tensor, measure: Measure) -> dict[str, Tensor]:
        def of_one(taps: list[Tensor], direct: Mapping[str, Tensor], row: Tensor) -> tuple[Tensor, list[Tensor]]:
            with sdpa_kernel(SDPBackend.MATH), wearing(self.model, direct), self._tapped(taps) as inputs:
                return self.loss(take_rows(batch, row)), inputs

        each = vmap(grad(of_one, argnums=(0, 1), has_aux=True), in_dims=(None, None, 0), randomness="different")
        (deltas, direct), inputs = each([tap for _, tap, _ in self.calls], self.direct, index)
        pairs = [_arranged(c[0], _wide(a), _wide(d)) for c, a, d in zip(self.calls, inputs, deltas, strict=True)]
        layers = [layer for layer, _, _ in self.calls]
        return self._closed(layers, pairs, measure) | {n: measure(_wide(g)).sum(0) for n, g in direct.items()}

    def _closed(self, layers: list[nn.Module], pairs: list[Pair], measure: Measure) -> dict[str, Tensor]:
        """Of the weights and biases that are used by layers with a closed form alone."""
        total = {}
        for name, parameter in self.named.items():
            users = {kind: [i for i, each in enumerate(layers) if each._parameters.get(kind) is parameter]
                     for kind in ("weight", "bias")}  # fmt: skip
            if name in self.direct or not any(users.values()):
                continue
            used = [pairs[i] for of_kind in users.values() for i in of_kind]
            a, delta = (torch.cat(each, 2) for each in zip(*used, strict=True))
            summed = _of_weight(a, delta, measure) if users["weight"] else measure(delta.sum(2)).sum(0)
            total[name] = summed.view_as(parameter)
        return total

    @contextmanager
    def _tapped(self, taps: list[Tensor]) -> Iterator[list[Tensor]]:
        """Add a zero to every output of a layer, by which δ is the gradient, and note its inputs."""
        inputs: list[Tensor] = []

        def tap(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            inputs.append(_input(args, kwargs))
            return output + taps[len(inputs) - 1]

        layers = {layer for layer, _, _ in self.calls}
        hooks = [layer.register_forward_hook(tap, prepend=True, with_kwargs=True) for layer in layers]
        try:
            yield inputs
        finally:
            for hook in hooks:
                hook.remove()


# --- layers with a closed form ----------------------------------------------------------------------------------


def _has_closed_form(module: nn.Module) -> bool:
    """True for linear and convolutional layers as torch has them: weights that are parameters, and no other forward."""
    kind = type(module)
    if module._parameters.get("weight") is None:
        return False
    if isinstance(module, nn.Linear):
        return kind.forward is nn.Linear.forward
    for known in (nn.Conv1d, nn.Conv2d):
        if isinstance(module, known):
            return kind.forward is known.forward and kind._conv_forward is known._conv_forward  # type: ignore[attr-defined]
    return False


def _arranged(layer: nn.Module, x: Tensor, delta: Tensor) -> Pair:
    """What meets in every entry of the weight: inputs and δ as (inputs, groups, places, features)."""
    if isinstance(layer, nn.Linear):
        return tuple(each.reshape(len(each), 1, -1, each.shape[-1]) for each in (x, delta))  # type: ignore[return-value]
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
    rows, dims = len(x), len(layer.kernel_size)
    x = x.reshape(-1, layer.in_channels, *x.shape[-dims:])
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    kernel, dilation, stride = (_two(each) for each in (layer.kernel_size, layer.dilation, layer.stride))
    patches = F.unfold(x.unsqueeze(2) if dims == 1 else x, kernel, dilation, 0, stride)
    delta = delta.reshape(patches.shape[0], layer.out_channels, -1)
    return tuple(  # type: ignore[return-value]
        each.reshape(rows, -1, layer.groups, each.shape[1] // layer.groups, each.shape[2]).permute(0, 2, 1, 4, 3)
        .flatten(2, 3) for each in (patches, delta)
    )  # fmt: skip


def _of_weight(a: Tensor, delta: Tensor, measure: Measure) -> Tensor:
    """Σ_n measure(Σ_p δ_np a_npᵀ)."""
    if a.shape[2] == 1:
        return measure(delta[:, :, 0]).permute(1, 2, 0) @ measure(a[:, :, 0]).permute(1, 0, 2)
    size = max(1, ROOM // max(1, math.prod(delta.shape[1::2]) * a.shape[3]))
    parts = (
        measure(d.transpose(2, 3) @ x).sum(0) for x, d in zip(*(torch.split(t, size) for t in (a, delta)), strict=True)
    )
    return torch.stack(list(parts)).sum(0)


def _two(numbers: tuple[int, ...]) -> tuple[int, int]:
    return (1, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


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
