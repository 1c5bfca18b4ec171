"""The layers of a model: those whose weights are their own, what goes into them, which of their units are seen."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.continual.data import all_tensors, drawing_from, take_rows
from powerprop.select import matches, name_patterns

__all__ = [
    "channels",
    "check_protect",
    "inputs_noted",
    "joined",
    "loose_layers",
    "own_layers",
    "patches",
    "protected",
    "put",
    "swapped_parameters",
    "units_seen",
    "warn_of_loose",
]


@contextmanager
def swapped_parameters(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other tensors in the place of some parameters, wherever they are used; its own are not touched.

    `torch.func.functional_call` does the same for one call of `forward`; objectives may call anything of the model.
    """
    named = dict(model.named_parameters())
    other = {id(named[name]): tensor for name, tensor in weights.items()}
    places = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in other
    ]
    for parameters, name, parameter in places:
        parameters[name] = other[id(parameter)]  # type: ignore[assignment]
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    _list_weights(recurrent)
    try:
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter
        _list_weights(recurrent)


def _list_weights(recurrent: list[nn.RNNBase]) -> None:
    """Recurrent layers keep a list of their weights beside them, which must name the same ones."""
    for module in recurrent:
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def check_protect(model: nn.Module, protect: str | Sequence[str] | None) -> list[str] | None:
    """The name patterns of protected parameters as a list; patterns that fit none of the model's are an error."""
    if protect is None:
        return None
    patterns = name_patterns(protect)
    if not any(matches(name, patterns) for name, _ in model.named_parameters()):
        known = ", ".join(name for name, _ in model.named_parameters())
        raise ValueError(f"protect must be patterns of parameters' names, got {patterns}, which fit none of {known}")
    return patterns


def protected(model: nn.Module, protect: list[str] | None) -> dict[str, nn.Parameter]:
    """The parameters that fit one of the patterns by name; all of them for None."""
    return {n: p for n, p in model.named_parameters() if protect is None or matches(n, protect)}


def own_layers(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
    """The trainable layers of these kinds by name, without grouped ones and those that share their weight."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    times = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    found = {n: m for n, m in model.named_modules() if isinstance(m, kinds) and getattr(m, "groups", 1) == 1}
    return {n: m for n, m in found.items() if id(m.weight) in trained and times[id(m.weight)] == 1}


def channels(layer: nn.Module, tensor: Tensor) -> Tensor:
    """Inputs or outputs of a linear or convolutional layer as (rows, places, units)."""
    if isinstance(layer, nn.Linear):
        return tensor.reshape(len(tensor), -1, tensor.shape[-1])
    return tensor.flatten(2).transpose(1, 2)


def patches(layer: nn.Linear | nn.Conv2d, x: Tensor) -> Tensor:
    """The inputs of a layer as (rows, places, entries): what each row of its weight is multiplied with, and a 1 for
    the bias if it has one."""
    if isinstance(layer, nn.Conv2d):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padded = F.pad(x, layer._reversed_padding_repeated_twice, mode)
        found = F.unfold(padded, layer.kernel_size, layer.dilation, 0, layer.stride).transpose(1, 2)
    else:
        found = channels(layer, x)
    return found if layer.bias is None else torch.cat([found, torch.ones_like(found[..., :1])], -1)


def loose_layers(call: Callable[[], Any], layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """The layers whose weights a network does not use through their own `forward` alone, and how it uses them: hooks on
    these neither see nor change all that goes into them.

    Weights are out of autograd's sight while their layer is at work; one that has a gradient still is used elsewhere.

    call: runs the network, and gives its answers.
    """
    called: set[str] = set()
    own = {name: dict(layer._parameters) for name, layer in layers.items()}

    def hide(name: str, layer: nn.Module, _: Any) -> None:
        called.add(name)
        layer._parameters.update({kind: None if p is None else p.detach() for kind, p in own[name].items()})  # type: ignore[misc]

    def show(name: str, layer: nn.Module, _: Any, output: Any) -> None:
        layer._parameters.update(own[name])

    handles = [layer.register_forward_pre_hook(partial(hide, name)) for name, layer in layers.items()]
    handles += [layer.register_forward_hook(partial(show, name)) for name, layer in layers.items()]
    try:
        with torch.enable_grad():
            answers = [t.double().sum() for t in all_tensors(call()) if t.requires_grad and not t.is_complex()]
    finally:
        for handle in handles:
            handle.remove()
        for name, layer in layers.items():
            layer._parameters.update(own[name])
    used = _with_gradient(answers, own)
    found = {name: "is used outside of it" for name in layers if name in used}
    return found | {name: "is never used through it" for name in layers if name not in called}


def _with_gradient(answers: list[Tensor], own: Mapping[str, Mapping[str, Tensor | None]]) -> set[str]:
    pairs = [(n, p) for n, parameters in own.items() for p in parameters.values() if p is not None and p.requires_grad]
    if not answers or not pairs:
        return set()
    found = torch.autograd.grad(torch.stack(answers).sum(), [p for _, p in pairs], allow_unused=True)
    return {name for (name, _), gradient in zip(pairs, found, strict=True) if gradient is not None}


def warn_of_loose(task: str, loose: Mapping[str, str]) -> None:
    """Layers that a method cannot see all of are trained with the tasks so far only, which the user should know."""
    if loose:
        each = ", ".join(f"the weight of {name!r} {how}" for name, how in loose.items())
        warnings.warn(f"{task}: {each}: what goes into it cannot be seen, so it is held from now on", stacklevel=2)


@contextmanager
def inputs_noted(layers: Mapping[str, nn.Module], note: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Inside, every forward pass tells note(name, inputs) of each of these layers."""

    def hook(name: str) -> Callable[..., None]:
        return lambda layer, inputs: note(name, inputs[0].detach())

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def joined(layer: nn.Linear | nn.Conv2d, gradient: bool = False) -> Tensor:
    """A layer's weight, one row for each output, with the bias as a last entry; or its gradient."""
    parameters = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    tensors = [p.grad if gradient else p.detach() for p in parameters]
    return torch.cat([t.reshape(len(layer.weight), -1) for t in tensors if t is not None], 1)


@torch.no_grad()
def put(layer: nn.Linear | nn.Conv2d, rows: Tensor, gradient: bool = False) -> None:
    """The opposite of `joined`."""
    weight, bias = (p.grad if gradient and p is not None else p for p in (layer.weight, layer.bias))
    assert weight is not None
    entries = weight[0].numel()
    weight.copy_(rows[:, :entries].reshape(weight.shape))
    if bias is not None:
        bias.copy_(rows[:, entries])


PROBES = (torch.nan, 1.0, -1.0)
"""A unit is seen where one of these in its place changes something: NaN gets through all arithmetic, the numbers
through comparisons."""
ROWS = 256
"""Units that are looked at in one pass, a row of the batch for each."""


@torch.no_grad()
def units_seen(
    model: Callable[[Any], Any], x: Any, layers: Mapping[str, nn.Module], gates: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """For every layer the output units that reach an open gate of a later layer's input, or the model's output, without
    passing through another layer on the way. A layer that is not called is taken to be seen all of it.

    model: in evaluation mode; its rows are computed one by one.
    x: a batch of one input, as the model takes it. Where the model gives no answer, all units are taken to be seen.
    gates: layer -> which of its inputs are open; all of them where it has none.
    """
    with _Probe(layers, gates).hooked() as probe:
        return {name: probe.seen(name, model, x) for name in layers}


class _Probe:
    """Puts 0 for the output of all layers, but for one unit of one layer, and notes what their inputs are then."""

    def __init__(self, layers: Mapping[str, nn.Module], gates: Mapping[str, Tensor]) -> None:
        self.layers, self.gates = layers, gates
        self.name, self.units, self.value, self.notes = "", torch.arange(0), 0.0, list[Tensor]()
        self.called = False

    @contextmanager
    def hooked(self) -> Iterator[_Probe]:
        handles = [layer.register_forward_pre_hook(self._note(name)) for name, layer in self.layers.items()]
        handles += [layer.register_forward_hook(self._put(name)) for name, layer in self.layers.items()]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str) -> Callable[..., None]:
        def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found = channels(layer, inputs[0])
            self.notes.append(found[..., self.gates[name]] if name in self.gates else found)

        return note

    def _put(self, name: str) -> Callable[..., Tensor]:
        def put(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
            made = torch.zeros_like(output)
            if name == self.name:
                self.called = True
                units = made.movedim(-1, 1) if isinstance(layer, nn.Linear) else made
                units[torch.arange(len(self.units)), self.units] = self.value
            return made

        return put

    def seen(self, name: str, model: Callable[[Any], Any], x: Any) -> Tensor:
        layer = self.layers[name]
        count = len(layer.weight)  # type: ignore[arg-type]
        found, self.name, self.called = torch.zeros(count, dtype=torch.bool), name, False
        for units in torch.split(torch.arange(count), ROWS):
            self.units = units
            before, *after = (self._run(value, model, x) for value in (0.0, *PROBES))
            for noted in after:
                if len(noted) != len(before):  # the loss could not be computed of such outputs
                    found[units] = True
                    continue
                for old, new in zip(before, noted, strict=True):
                    found[units] |= (old != new).flatten(1).any(1).cpu()
        return found | (not self.called)

    def _run(self, value: float, model: Callable[[Any], Any], x: Any) -> list[Tensor]:
        """What all layers get and what the model gives; noise is the same in every run."""
        self.value, self.notes, rows = value, [], len(self.units)
        device = next(all_tensors(x)).device
        with drawing_from(0, device):
            try:
                answers = list(all_tensors(model(take_rows(x, torch.zeros(rows, dtype=torch.long)))))
            except Exception:
                if value == 0.0:
                    raise
                return []
        if not answers:
            self.called = False
        return [*self.notes, *(a if a.ndim and len(a) == rows else a.expand(rows, *a.shape) for a in answers)]
