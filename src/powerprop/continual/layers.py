"""The layers of a model whose weights are their own, and what goes into them."""

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

from powerprop.continual.rows import all_tensors
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
    "warn_of_loose",
]


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
    if not answers:
        return set()
    pairs = [(n, p) for n, parameters in own.items() for p in parameters.values() if p is not None and p.requires_grad]
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
