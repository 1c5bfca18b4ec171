"""Parameters and buffers that must stay as they are, whoever calls the optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Frozen"]


class Frozen:
    """What an optimiser leaves bit-identical, whatever its momentum, its decay or the forward passes do.

    A frozen parameter is shown to the base optimiser without a gradient, which every one of torch takes for "leave it
    alone", decay and momentum included. A frozen buffer gets its value back after every step: forward passes change
    running statistics, no optimiser does.

    parameters: biases, norms, heads; weights with an α have masks of their own.
    buffers: their values at this moment are the ones that stay.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = (), buffers: Iterable[Tensor] = ()) -> None:
        self.parameters = {id(parameter): parameter for parameter in parameters}
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]

    def holds(self, parameter: nn.Parameter) -> bool:
        """True for a frozen parameter."""
        return id(parameter) in self.parameters

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, frozen parameters have no gradient."""
        gradients = [(p, p.grad) for p in self.parameters.values() if p.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def confined(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """The closure, after which frozen parameters have no gradient either: optimisers call it inside their step."""
        if closure is None or not self.parameters:
            return closure

        def evaluate() -> Any:
            loss = closure()
            for parameter in self.parameters.values():
                parameter.grad = None
            return loss

        return evaluate

    @torch.no_grad()
    def restore(self) -> None:
        """All buffers as they were when they were frozen."""
        for buffer, kept in self.buffers:
            buffer.copy_(kept)
