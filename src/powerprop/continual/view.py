"""A network as one task sees it: with the task's head, with the task's weights, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["AsTask", "Heard", "wearing"]


class AsTask:
    """A model that takes the task, as a function of the inputs alone; its attributes are the model's."""

    def __init__(self, model: nn.Module, task: int) -> None:
        self._model, self._task = model, task

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._model(*inputs, self._task, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Heard:
    """A model whose answers are noted while somebody calls it; its attributes are the model's."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self.answers: list[Any] = []

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self.answers.append(self._model(*inputs, **named))
        return self.answers[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextmanager
def wearing(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
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
