"""What a network says about an input before its last linear layer, and the examples that stand for a mean of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.continual.layers import inputs_noted
from powerprop.continual.objective import PART, Model

__all__ = ["features_of", "herd", "linear_layers", "same_tensors"]


def linear_layers(network: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers by name; a network without any is an error."""
    found = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    if not found:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in network.modules()}))
        raise ValueError(f"features are what goes into the last nn.Linear: expected one in the model, got {kinds}")
    return found


@torch.no_grad()
def features_of(network: nn.Module, model: Model, x: Tensor) -> Tensor:
    """What goes into the last linear layer that gives the outputs, each row divided by its length.

    model: the network as a function of the inputs alone, in evaluation mode.
    """
    layers, noted, found = linear_layers(network), list[tuple[str, Tensor]](), []
    with inputs_noted(layers, lambda name, inputs: noted.append((name, inputs))):
        for part in torch.split(x, PART):
            outputs = model(part).shape[1]
            name, inputs = noted[-1] if noted else ("none that is called", part)
            if not noted or layers[name].out_features != outputs:
                last = f"{name!r} with {layers[name].out_features} outputs" if noted else "none that is called"
                text = f"expected it to give the {outputs} outputs of the model, got {last}"
                raise ValueError(f"features are what goes into the last nn.Linear: {text}")
            found.append(F.normalize(inputs.flatten(1)))
            noted.clear()
    return torch.cat(found)


def herd(features: Tensor, count: int | None) -> Tensor:
    """Rows whose running means stay as near as can be to the mean μ of all, each taken once (Rebuffi et al., 2017,
    algorithm 4):

        p_k = argmin_x ‖μ - (φ(x) + Σ_{j<k} φ(p_j)) / k‖

    count: how many; None is all of them, as they come.
    """
    if count is None:
        return torch.arange(len(features))
    features = features.double().cpu()
    mean, half = features.mean(0), features.square().sum(1) / 2
    total, chosen = torch.zeros_like(mean), list[int]()
    for k in range(1, min(count, len(features)) + 1):
        nearness = features @ (k * mean - total) - half  # -k²/2 times the squared distance, up to a constant
        nearness[chosen] = -torch.inf
        chosen.append(int(nearness.argmax()))
        total = total + features[chosen[-1]]
    return torch.tensor(chosen)


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """The same names with the same values, on the same devices."""
    pairs = [(tensor, other.get(name)) for name, tensor in one.items()]
    return len(one) == len(other) and all(
        b is not None and (a.device, a.dtype) == (b.device, b.dtype) and torch.equal(a, b) for a, b in pairs
    )
