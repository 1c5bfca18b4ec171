"""What a base optimiser remembers, as a part of a learner that carries it from task to task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.optim import Powerprop

__all__ = ["Moments"]


class Moments:
    """The state of the base optimiser for the parameters of a model, or others by name, such as Adam's moments."""

    trained = True
    """Steps change it, so that a task which diverges must be taken back."""

    def __init__(self, model: nn.Module | Mapping[str, nn.Parameter], optimizer: Powerprop | Optimizer) -> None:
        self.model = model
        self.base: Optimizer = optimizer.base if isinstance(optimizer, Powerprop) else optimizer

    def _named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters() if isinstance(self.model, nn.Module) else self.model)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors as "parameter/name", and the rest of what is remembered of each parameter as plain data."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, dict[str, Any]] = {}
        for name, parameter in self._named().items():
            for key, value in self.base.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    plain.setdefault(name, {})[key] = value
        return tensors, plain

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """What `state` gave, on the device of each parameter; a counter of steps only where torch wants it there."""
        known = self._named()
        counted = {p for g in self.base.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
        self.base.state.clear()
        for full, tensor in tensors.items():
            name, _, key = full.rpartition("/")
            of = known[name]
            device = of.device if key != "step" or of in counted else tensor.device
            self.base.state[of][key] = tensor.to(device, copy=True)
        for name, values in data.items():
            self.base.state[known[name]].update(values)
