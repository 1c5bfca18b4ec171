"""How a model is called: the example of an export, and what its outputs have in common with another model's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["Call", "same"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of the largest output: what other orders of summation change; in half precision 5%."""


@dataclass(frozen=True)
class Call:
    """model(*args, **kwargs). Tensors are the inputs; every other argument is part of what is exported."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, example: Any) -> Call:
        """An input, a tuple of arguments, or a dict of named ones; at least one of them is a tensor."""
        call = cls(kwargs=dict(example)) if isinstance(example, Mapping) else cls(_tuple(example))
        if not call.tensors():
            raise TypeError(
                f"example must be a tensor, a tuple of arguments or a dict of named ones that holds a tensor, "
                f"got {type(example).__name__}"
            )
        return call

    def __call__(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    def tensors(self) -> list[Tensor]:
        """The inputs."""
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    def batch(self) -> int:
        """The length of the first input."""
        first = self.tensors()[0]
        return len(first) if first.dim() else 1

    def half(self) -> Call | None:
        """The same call with half as many inputs, if they all have the same length."""
        n = self.batch()
        if n < 2 or any(x.dim() == 0 or len(x) != n for x in self.tensors()):
            return None
        cut = {k: v[: n // 2] if isinstance(v, Tensor) else v for k, v in self.kwargs.items()}
        return Call(tuple(v[: n // 2] if isinstance(v, Tensor) else v for v in self.args), cut)

    def named(self, model: nn.Module) -> dict[str, Any]:
        """The arguments by the names that the model's `forward` gives them, defaults included."""
        bound = inspect.signature(model.forward).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def inputs(self, model: nn.Module) -> list[Tensor]:
        """The arguments that are tensors, in the order of the model's `forward`."""
        return [v for v in self.named(model).values() if isinstance(v, Tensor)]


def _tuple(example: Any) -> tuple[Any, ...]:
    return tuple(example) if isinstance(example, (tuple, list)) else (example,)


def same(outputs: Any, wanted: Any) -> bool:
    """True if all tensors of two outputs agree up to the rounding of their type."""
    mine, theirs = ([x for x in tree_leaves(o) if isinstance(x, Tensor)] for o in (outputs, wanted))
    return len(mine) == len(theirs) and all(map(_close, mine, theirs))


def _close(mine: Tensor, wanted: Tensor) -> bool:
    if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point() or not wanted.numel():
        return torch.equal(mine, wanted)
    finite = wanted[wanted.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(mine, wanted, rtol=0, atol=TOLERANCE.get(wanted.dtype, 5e-2) * scale, equal_nan=True)
