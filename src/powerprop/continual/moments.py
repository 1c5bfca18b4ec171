"""What a base optimiser remembers, as a part of a learner that carries it from task to task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from powerprop.optim import Powerprop

__all__ = ["Moments"]


class Moments:
    """The state of the base optimiser for the parameters of a model, such as Adam's moments, by name."""

    def __init__(self, model: nn.Module, optimizer: Powerprop) -> None:
        self.model, self.base = model, optimizer.base

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors as "parameter/name", and the rest of what is remembered of each parameter as plain data."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, dict[str, Any]] = {}
        for name, parameter in self.model.named_parameters():
            for key, value in self.base.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    plain.setdefault(name, {})[key] = value
        return tensors, plain

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """What `state` gave, on the device of each parameter; a counter of steps only where torch wants it there."""
        known = dict(self.model.named_parameters())
        counted = {p for g in self.base.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
        self.base.state.clear()
        for full, tensor in tensors.items():
            name, _, key = full.rpartition("/")
            of = known[name]
            device = of.device if key != "step" or of in counted else tensor.device
            self.base.state[of][key] = tensor.to(device, copy=True)
        for name, values in data.items():
            self.base.state[known[name]].update(values)
