"""What an optimiser remembers of single weights: it is cleared where a weight is dropped or grown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.weight import sharded

__all__ = ["MOMENTS", "change_moments", "moments_of"]

MOMENTS = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "ax", "prev", "step_size", "sum"),
    }
)
"""Names that the optimisers of torch give to one number for each weight."""


def moments_of(base: Optimizer, name: str, param: nn.Parameter, names: Iterable[str] | None) -> Iterator[Tensor]:
    """The tensors with an entry for each entry of a weight, by their names; names: others than torch's."""
    return (value for _, value in _named(base, name, param, names))


def change_moments(
    base: Optimizer, name: str, param: nn.Parameter, names: Iterable[str] | None, change: Callable[[Tensor], Tensor]
) -> None:
    """Put others in the place of these tensors; all of them are found before the first one is changed."""
    entry = _state_of(base).get(param, {})
    entry.update({key: change(value) for key, value in list(_named(base, name, param, names))})


def _named(
    base: Optimizer, name: str, param: nn.Parameter, names: Iterable[str] | None
) -> Iterator[tuple[str, Tensor]]:
    """What has one number for each entry of a weight, by its key.

    What has the weight's shape under a name that nobody vouches for may mean anything (the statistics of a
    preconditioner are of that shape for a square weight), so it is an error.
    """
    known = MOMENTS if names is None else frozenset(names)
    for key, value in _state_of(base).get(param, {}).items():
        if not isinstance(value, Tensor) or value.shape != param.shape or value.dim() == 0:
            continue
        if key in known:
            if type(value) not in (Tensor, nn.Parameter) and not sharded(value):
                raise TypeError(
                    f"{key!r} of {name!r} is a {type(value).__name__}, whose entries cannot be cleared one by one: "
                    f"masks that move need an optimiser that keeps plain tensors, {type(base).__name__} does not"
                )
            yield key, value
        elif names is None and value.dtype != torch.bool:
            raise ValueError(
                f"{type(base).__name__} keeps {key!r} for {name!r}, and nothing says whether it has one number for "
                f"each weight, to be cleared where masks change: name all that have by Powerprop(..., moments=[...])"
            )


def _state_of(base: Optimizer) -> MutableMapping[Any, Any]:
    """The state of the optimiser itself, or of the one that it is around (ZeroRedundancyOptimizer, Lookahead)."""
    inner = next((v for k, v in vars(base).items() if k in ("optim", "optimizer") and isinstance(v, Optimizer)), None)
    return base.state if inner is None else _state_of(inner)
