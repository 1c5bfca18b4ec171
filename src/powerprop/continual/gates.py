"""Gates on the inputs of layers: which of them each task opens, and which units are in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powerprop.masks import pack, unpack

__all__ = ["Gates", "put_gates"]

Opened = dict[str, Tensor]


class Gates:
    """The hard gates of every task learned so far, one bit for each, and what they have in use all together.

    loose: the layers that gates have no power over, which are held.
    """

    def __init__(self) -> None:
        self.tasks: list[Opened] = []
        self.let_in: Opened = {}
        self.seen: Opened = {}
        self.loose: list[str] = []

    def of(self, task: int | None) -> Opened:
        """The gates of a task, or an error that names the tasks there are."""
        if task is None or not 0 <= task < len(self.tasks):
            known = f"in 0..{len(self.tasks) - 1} (the tasks learned so far)" if self.tasks else "learned first"
            raise ValueError(f"task must be {known}, whose gates are known, got {task}")
        return self.tasks[task]

    def add(self, opened: Opened, seen: Opened) -> None:
        """One more task: the gates that it opens, and the output units of every layer that it sees behind them."""
        self.tasks.append({key: gate.cpu() for key, gate in opened.items()})
        self.let_in |= {key: gate.cpu() | self.used(key, gate).cpu() for key, gate in opened.items()}
        self.seen |= {name: units.cpu() | self.seen.get(name, units.cpu()) for name, units in seen.items()}

    def used(self, key: str, like: Tensor) -> Tensor:
        """The gates of this name that some task has opened; none, if there are other gates now than there were."""
        found = self.let_in.get(key)
        if found is None or found.shape != like.shape:
            return torch.zeros(like.shape, dtype=torch.bool, device=like.device)
        return found.to(like.device)

    def free(self, name: str, weight: Tensor) -> Tensor:
        """1 - min(a_out, a_in): the entries of a layer's weight or bias that no task so far depends on.

        A layer without gates of its own lets everything in; the units that a bias is added to need not be let in.
        """
        seen = self.seen[name].to(weight.device)
        if weight.ndim == 1:
            return ~seen
        let_in = self.let_in.get(name, torch.ones(weight.shape[1], dtype=torch.bool)).to(weight.device)
        both = seen[:, None] & let_in[None, :]
        return ~both.view(*both.shape, *[1] * (weight.ndim - 2)).expand(weight.shape)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """One bit for every gate and task, and for every unit in use."""
        named = {f"{task}/{key}": gate for task, gates in enumerate(self.tasks) for key, gate in gates.items()}
        named |= {f"in/{key}": gate for key, gate in self.let_in.items()}
        named |= {f"out/{name}": units for name, units in self.seen.items()}
        sizes = {name: len(bits) for name, bits in named.items()}
        data = {"tasks": len(self.tasks), "sizes": sizes, "loose": self.loose}
        return {name: pack(bits) for name, bits in named.items()}, data

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self.tasks, self.let_in, self.seen = [{} for _ in range(data["tasks"])], {}, {}
        self.loose = list(data.get("loose", ()))
        for name, size in data["sizes"].items():
            kind, _, key = name.partition("/")
            where = {"in": self.let_in, "out": self.seen}.get(kind)
            where = self.tasks[int(kind)] if where is None else where
            where[key] = unpack(tensors[name], (size,))


def put_gates(layers: Mapping[str, nn.Module], gate: Callable[[str], Tensor]) -> list[RemovableHandle]:
    """Let the inputs of layers pass through gates, one for each feature or channel, until the handles are removed.

    gate: asked with the name of the layer in every forward pass; booleans are hard gates, which stop NaN too.
    """

    def gated(name: str) -> Callable[..., tuple[Any, ...]]:
        def hook(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x, a = inputs[0], gate(name)
            if not isinstance(layer, nn.Linear):
                a = a.view(-1, *[1] * (layer.weight.ndim - 2))  # type: ignore[operator]
            return x.masked_fill(~a, 0) if a.dtype == torch.bool else x * a.to(x.dtype), *inputs[1:]

        return hook

    return [layer.register_forward_pre_hook(gated(name)) for name, layer in layers.items()]
