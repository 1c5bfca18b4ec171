"""A mask over weights that are frozen: how a task is learned when no weight is free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.hooks import RemovableHandle

from powerprop.continual.moments import Moments
from powerprop.continual.ongoing import below
from powerprop.continual.packing.subnets import Subnetworks
from powerprop.masks import Masks
from powerprop.weight import WeightState

__all__ = ["Supermask", "straight_through"]

BEGUN_WITH = 0.1
"""The fraction of the frozen weights that take part before the first step."""
RATE = 0.01
"""Adam's learning rate of the scores, which begin evenly in an interval of length 2."""


class Supermask:
    """Scores s of the frozen weights θ, learned in the place of weights (Wortsman et al. 2020, *SupSup*):

        w = θ ⊙ M(s),    M(s) = 1 where s > 0,    ∂L/∂s := ∂L/∂w ⊙ θ

    The gradient goes straight through the choice of the mask. The scores have an Adam of their own, which does not ask
    how large the weights of a network are; every step of the learner's optimiser is one of theirs and a new mask.

    nets: from now on they hold θ ⊙ M(s), until `let_go`.
    among: the weights to choose from; no other takes part.
    """

    def __init__(self, nets: Subnetworks, among: Masks, generator: torch.Generator) -> None:
        self.nets, self.among = nets, among
        self.scores = {n: self._drawn(among[n], generator) for n in nets.masters}
        fused = all(score.device.type in ("cpu", "cuda") for score in self.scores.values())  # one pass over the scores
        self._adam = Adam(list(self.scores.values()), lr=RATE, fused=fused)
        self._wear()
        self._handles = [straight_through(m, self.scores[n], among[n]) for n, m in nets.masters.items()]
        self._handles.append(nets.optimizer.register_step_post_hook(self._step))

    def chosen(self) -> Masks:
        """M(s)."""
        return Masks({n: score.detach() > 0 for n, score in self.scores.items()})

    def state(self) -> dict[str, Tensor]:
        """The scores, and what their Adam remembers of each."""
        moments = Moments(self.scores, self._adam).state()[0]
        return {n: s.detach() for n, s in self.scores.items()} | {f"adam/{n}": t for n, t in moments.items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """What `state` gave."""
        for name, score in self.scores.items():
            score.copy_(tensors[name])
        Moments(self.scores, self._adam).load_state(below("adam", tensors), {})
        self._wear()

    def let_go(self) -> None:
        """Steps of the learner's optimiser are no longer steps of the scores."""
        for handle in self._handles:
            handle.remove()

    def _drawn(self, among: Tensor, generator: torch.Generator) -> nn.Parameter:
        drawn = torch.empty(among.shape, dtype=torch.float32).uniform_(
            2 * BEGUN_WITH - 2, 2 * BEGUN_WITH, generator=generator
        )
        return nn.Parameter(drawn.to(among.device).masked_fill_(~among, -1.0))

    def _step(self, *_: Any) -> None:
        self._adam.step()
        self._adam.zero_grad()
        self._wear()

    def _wear(self) -> None:
        self.nets.optimizer.set_masks(self.chosen(), None)


def straight_through(master: WeightState, score: nn.Parameter, among: Tensor | None = None) -> RemovableHandle:
    """Every gradient of a weight makes one of its score, ∂L/∂s := ∂L/∂w ⊙ θ, until the handle is removed.

    The weight is frozen: its θ of this moment is the one that counts. Scores of weights that are not among those to
    choose from get none, and stay.
    """
    theta = master.theta() if among is None else master.theta() * among

    def hook(weight: Tensor) -> None:
        assert weight.grad is not None
        score.grad = weight.grad * theta

    handle: RemovableHandle = master.param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle
