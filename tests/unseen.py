"""Optimisers that move parameters without their version counter: fused ones, and those that write through `.data`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn


class ThroughData(torch.optim.Optimizer):
    """Plain SGD that writes behind the version counter's back, as much third-party code does.

    anew: put the result into fresh memory instead of the parameter's own.
    """

    def __init__(self, params: list[nn.Parameter], anew: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.anew = anew

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if self.anew:
                p.data = p.data - 0.1 * p.grad
            else:
                p.data.add_(p.grad, alpha=-0.1)


Bases = tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], ...]
UNSEEN: dict[str, Bases] = {
    "fused sgd": tuple(partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=f) for f in (True, False)),
    "fused adam": tuple(partial(torch.optim.Adam, lr=1e-2, fused=f) for f in (True, False)),
    "fused adamw": tuple(partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=f) for f in (True, False)),
    "data": (ThroughData, partial(torch.optim.SGD, lr=0.1)),
    "fresh data": (partial(ThroughData, anew=True), partial(torch.optim.SGD, lr=0.1)),
}
"""Each with one that takes the same steps and is seen."""
