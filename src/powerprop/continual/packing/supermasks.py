"""SupSup: the weights are random and stay so; a task learns which of them to use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.hooks import RemovableHandle

from powerprop.continual.data import Source
from powerprop.continual.packing.subnetworks import Subnetworks
from powerprop.continual.packing.task_inference import SubnetworkStrategy
from powerprop.continual.saving import Moments, below
from powerprop.continual.strategy import OptimizerFactory, Progress, check_among, refuse_alpha
from powerprop.masks import Masks
from powerprop.sparsify.prune import top_k_masks

__all__ = ["FrozenSupermask", "SupSup", "Supermask"]

BEGUN_WITH = 0.1
"""The fraction of the frozen weights that take part before the first step."""
RATE = 0.01
"""Adam's learning rate of the scores, which begin evenly in an interval of length 2."""


class Supermask:
    """Scores s of weights θ that are frozen, learned in the place of weights (Wortsman et al. 2020, *SupSup*):

        w = θ ⊙ M(s),    ∂L/∂s := ∂L/∂w ⊙ θ

    The gradient goes straight through the choice of the mask; every step of the learner's optimiser makes a new one.

    nets: from now on they hold θ ⊙ M(s), until `let_go`.
    chosen: M of the scores as they are; by default those above zero.
    among: the weights to choose from; scores of others get no gradient, and stay.
    """

    def __init__(
        self, nets: Subnetworks, scores: Mapping[str, nn.Parameter], chosen: Callable[[], Masks] | None = None,
        among: Masks | None = None,
    ) -> None:  # fmt: skip
        self.nets, self.scores, self.among = nets, dict(scores), among
        self.chosen = chosen or (lambda: Masks({n: score.detach() > 0 for n, score in self.scores.items()}))
        self.put_on()
        thetas = {n: m.theta() if among is None else m.theta() * among[n] for n, m in nets.masters.items()}
        self._handles = [_straight_through(m.param, scores[n], thetas[n]) for n, m in nets.masters.items()]
        self._handles.append(nets.optimizer.register_step_post_hook(self.after_step))

    def put_on(self) -> None:
        """The mask of the scores as they are, in the model."""
        self.nets.optimizer.set_masks(self.chosen(), None)

    def after_step(self, *_: Any) -> None:
        """The optimiser has moved the scores."""
        self.put_on()

    def let_go(self) -> None:
        """Steps of the learner's optimiser are no longer steps of the scores."""
        for handle in self._handles:
            handle.remove()


class FrozenSupermask(Supermask):
    """A supermask over the weights of earlier tasks, for a task that comes when none is free.

    The scores have an Adam of their own, which does not ask how large the weights of a network are.

    among: the weights to choose from; no other takes part.
    """

    def __init__(self, nets: Subnetworks, among: Masks, generator: torch.Generator) -> None:
        scores = {n: _drawn(among[n], generator) for n in nets.masters}
        fused = all(score.device.type in ("cpu", "cuda") for score in scores.values())  # one pass over the scores
        self._adam = Adam(list(scores.values()), lr=RATE, fused=fused)
        self._moments = Moments(scores, self._adam)
        super().__init__(nets, scores, among=among)

    def after_step(self, *_: Any) -> None:
        """A step of the scores too."""
        self._adam.step()
        self._adam.zero_grad()
        self.put_on()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The scores, and what their Adam remembers of each."""
        moments = {f"adam/{n}": t for n, t in self._moments.state()[0].items()}
        return {n: s.detach() for n, s in self.scores.items()} | moments, {}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """What `state` gave."""
        for name, score in self.scores.items():
            score.copy_(tensors[name])
        self._moments.load_state(below("adam", tensors), {})
        self.put_on()


def _drawn(among: Tensor, generator: torch.Generator) -> nn.Parameter:
    drawn = torch.empty(among.shape, dtype=torch.float32)
    drawn = drawn.uniform_(2 * BEGUN_WITH - 2, 2 * BEGUN_WITH, generator=generator)
    return nn.Parameter(drawn.to(among.device).masked_fill_(~among, -1.0))


def _straight_through(weight: nn.Parameter, score: nn.Parameter, theta: Tensor) -> RemovableHandle:
    """Every gradient of a weight makes one of its score, until the handle is removed."""

    def hook(weight: Tensor) -> None:
        assert weight.grad is not None
        score.grad = weight.grad * theta

    handle: RemovableHandle = weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


class SupSup(SubnetworkStrategy):
    """Supermasks in superposition (Wortsman et al. 2020): fixed random weights θ, a score s for each in every task.

        w = θ ⊙ M(s),    M(s) = 1 for the largest scores of a layer, or for s ≥ 0,    ∂L/∂s := ∂L/∂w ⊙ θ

    The gradient goes straight through the choice of the mask. After a task its mask is kept, one bit for each weight,
    and the scores are drawn anew. Nothing that is shared is ever trained: biases and norms stay as they are, running
    statistics are those of the first task, every head is trained with its own. Earlier tasks answer as before, to the
    bit. Without a task, `predict` infers it; superfluous outputs help `oneshot` and `binary`.

    The model always holds θ ⊙ M(s), also in a loop of one's own; the optimiser steps the scores, whoever calls it.

    kept: the fraction of every layer's weights that a task uses; None takes those with s ≥ 0, however many.
    distribution: "uniform" keeps the same fraction of each layer, "erk" more of small ones.
    weights: "signed" makes them ±√(2 / inputs) with the signs that they have; "given" leaves the model's as they are.
    Further arguments are those of `Strategy`. α > 1 is refused: no weight is trained.

    Examples:
        >>> learner = continual.SupSup(model, sgd, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    traits: ClassVar[tuple[str, ...]] = ("once", "trains no weight", "keeps answers", "starts anew")
    owned: ClassVar[bool] = False

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, kept: float | None = 0.5,
        distribution: Literal["uniform", "erk"] = "uniform", weights: Literal["signed", "given"] = "signed",
        **options: Any,
    ) -> None:  # fmt: skip
        reason = "it acts on weights that are trained, and none is"
        refuse_alpha(type(self), optimizer, options.get("alpha"), reason)
        if kept is not None and not 0 < kept <= 1:
            raise ValueError(f"kept must be in (0, 1], or None for all scores from 0 on, got {kept}")
        check_among(distribution=(distribution, ("uniform", "erk")), weights=(weights, ("signed", "given")))
        super().__init__(model, optimizer, **options)
        refuse_alpha(type(self), self.optimizer, None, reason)  # groups may have an alpha of their own
        self.kept, self.distribution, self.weights = kept, distribution, weights
        if weights == "signed":
            self._sign_weights()
        self.scores = {n: nn.Parameter(torch.zeros_like(m.param)) for n, m in self.nets.masters.items()}
        self.add_parameters(list(self.scores.values()))

    @torch.no_grad()
    def _sign_weights(self) -> None:
        for master in self.nets.masters.values():
            weight = master.param
            weight.copy_(torch.where(weight < 0, -1.0, 1.0) * math.sqrt(2 / weight[0].numel()))

    # --- the hooks ----------------------------------------------------------------------------------------------

    def begin_task(self) -> None:
        """New scores; gradients of weights become those of scores, and every step of the optimiser a new mask."""
        self.nets.open_frozen(self.current)
        if self.current == 0:  # running statistics are taken from the first task, but no weight is trained
            self.optimizer.freeze([p for n, p in self.model.named_parameters() if self.head_of(n) != 0])
        for score in self.scores.values():
            limit = score[0].numel() ** -0.5
            drawn = torch.empty(score.shape).uniform_(-limit, limit, generator=self.generator("scores"))
            score.detach().copy_(drawn)
        self._supermask = Supermask(self.nets, self.scores, self.chosen)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The scores."""
        return self.scores

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """The mask is kept, the scores are not."""
        self._end_supermask()
        self.nets.pack_chosen(self.chosen(), self._sample(data, validation))

    def chosen(self) -> Masks:
        """M(s) of the task in hand."""
        if self.kept is None:
            return Masks({n: s.detach() >= 0 for n, s in self.scores.items()})
        return top_k_masks({n: s.detach() for n, s in self.scores.items()}, 1 - self.kept, self.distribution)
