"""SupSup: the weights are random and stay so; a task learns which of them to use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from powerprop.continual.optimiser import OptimizerFactory, refuse_alpha
from powerprop.continual.packing.bitmasks import BitMasks
from powerprop.continual.packing.inferring import Inferring
from powerprop.continual.packing.signature import Sample, Signatures
from powerprop.continual.packing.subnets import Subnetworks
from powerprop.continual.packing.supermask import straight_through
from powerprop.continual.source import Source
from powerprop.continual.strategy import Progress
from powerprop.masks import Masks
from powerprop.optim import Powerprop
from powerprop.sparsify.prune import top_k_masks

__all__ = ["SupSup", "Supermasks"]

WORTSMAN = "Wortsman et al. 2020, and their code"


class SupSup(Inferring):
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
    """

    once: ClassVar[bool] = True
    fixed_weights: ClassVar[bool] = True
    keeps_answers: ClassVar[bool] = True
    carries: ClassVar[bool] = False
    OPTIONS: ClassVar[tuple[str, ...]] = ("kept", "distribution", "weights")
    PUBLISHED: ClassVar[dict[str, dict[str, Any]]] = {
        "permuted-mnist/domain-incremental": {"kept": None, "steps": 1000, "reference": WORTSMAN},
        "split-cifar100/task-incremental": {"distribution": "erk", "batch_size": 128, "reference": WORTSMAN},
    }
    """250 permutations: RMSprop at 1e-4, width 1024, 500 outputs for ten classes. Split-CIFAR100: 20 tasks, Adam at
    1e-3 for 100 epochs, ResNet-18 without affine norms, at several `kept`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory | Optimizer,
        *,
        kept: float | None = 0.5,
        distribution: Literal["uniform", "erk"] = "uniform",
        weights: Literal["signed", "given"] = "signed",
        **options: Any,
    ) -> None:
        reason = "it acts on weights that are trained, and none is"
        refuse_alpha(type(self), optimizer, options.get("alpha"), reason)
        if kept is not None and not 0 < kept <= 1:
            raise ValueError(f"kept must be in (0, 1], or None for all scores from 0 on, got {kept}")
        if distribution not in ("uniform", "erk"):
            raise ValueError(f"distribution must be 'uniform' or 'erk', got {distribution!r}")
        if weights not in ("signed", "given"):
            raise ValueError(f"weights must be 'signed' or 'given', got {weights!r}")
        super().__init__(model, optimizer, **options)
        refuse_alpha(type(self), self.optimizer, None, reason)  # groups may have an alpha of their own
        self.kept, self.distribution, self.weights = kept, distribution, weights
        self.nets: Supermasks = Supermasks(model, self.optimizer, self.head_of, self.bound)
        self.nets.signatures = Signatures(self.means)
        self.parts["masks"] = self.nets
        if weights == "signed":
            self._sign_weights()
        self.scores = {n: nn.Parameter(torch.zeros_like(m.param)) for n, m in self.nets.masters.items()}
        self.parameters.add(list(self.scores.values()))
        self._handles: list[RemovableHandle] = []

    @torch.no_grad()
    def _sign_weights(self) -> None:
        for master in self.nets.masters.values():
            weight = master.param
            weight.copy_(torch.where(weight < 0, -1.0, 1.0) * math.sqrt(2 / weight[0].numel()))

    # --- the verbs of a strategy --------------------------------------------------------------------------------

    def begin_task(self) -> None:
        """New scores; gradients of weights become those of scores, and every step of the optimiser a new mask."""
        self.nets.open(self.current, self.generator("scores"))
        for score in self.scores.values():
            limit = score[0].numel() ** -0.5
            drawn = torch.empty(score.shape).uniform_(-limit, limit, generator=self.generator("scores"))
            score.detach().copy_(drawn)
        self._wear()
        self._handles = [straight_through(master, self.scores[n]) for n, master in self.nets.masters.items()]
        self._handles.append(self.optimizer.register_step_post_hook(self._wear))

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The scores."""
        return self.scores

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """The mask is kept, the scores are not."""
        self._let_go()
        self.nets.pack(self.chosen(), self._sample(data, validation), self.generator("scores"))

    def give_up(self) -> None:
        """Leave the task in hand; its scores are forgotten."""
        self._let_go()
        super().give_up()

    # --- scores and masks ---------------------------------------------------------------------------------------

    def chosen(self) -> Masks:
        """M(s) of the task in hand."""
        if self.kept is None:
            return Masks({n: s.detach() >= 0 for n, s in self.scores.items()})
        return top_k_masks({n: s.detach() for n, s in self.scores.items()}, 1 - self.kept, self.distribution)

    def _wear(self, *_: Any) -> None:
        self.nets.restrict(self.chosen())

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class Supermasks(Subnetworks):
    """Sub-networks of fixed weights, whose masks have nothing in common: one bit for each weight and task."""

    masks: BitMasks  # type: ignore[assignment]

    def __init__(self, model: nn.Module, optimizer: Powerprop, *options: Any) -> None:
        super().__init__(model, optimizer, *options)
        self.masks = BitMasks({n: m.param.shape for n, m in self.masters.items()})

    def open(self, task: int, generator: torch.Generator, visible: Masks | None = None) -> None:
        """Nothing is trained but the head of the task; running statistics are taken from the first one."""
        self._follow()
        self._holder.hold((), task)
        if task == 0:
            own = [p for n, p in self.model.named_parameters() if self.head_of(n) != 0]
            self.optimizer.freeze(own)

    def restrict(self, masks: Masks) -> None:
        """Only these weights are used."""
        self.optimizer.set_masks(masks, None)

    def pack(self, masks: Masks, sample: Sample | None, generator: torch.Generator) -> None:
        """Keep the mask of a new task."""
        self.signatures.add(sample)
        self.masks.add(masks)
        self.show(self.masks.tasks - 1)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Masks and signatures; the weights themselves are saved by the learner."""
        return {**self.masks.state(), **self.signatures.state()}, {"tasks": self.masks.tasks}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Take up what `state` gave, after the weights."""
        self._seen = ()
        self.signatures.load_state(tensors)
        self.masks.load_state(tensors, data["tasks"])
        if self.masks.tasks:
            self.show(self.masks.tasks - 1)
