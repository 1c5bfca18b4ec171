"""What the sparse-training methods share: the asked sparsity, the first masks, the step count, the random numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from powerprop.allocate import DISTRIBUTIONS, Layers, check_sparsity, overrides
from powerprop.mask_entries import count, places
from powerprop.optim import Powerprop
from powerprop.sparsify.pattern import check_pattern, convolutions, pattern_masks, sparsity_of
from powerprop.sparsify.prune import top_k, top_k_masks, warn_of_empty_layers
from powerprop.weight import WeightState

__all__ = ["Method", "active", "from_places", "refuse_nan", "set_mask", "step_count", "top_among"]


@dataclass(eq=False)
class Method:
    """A sparse-training method, for `Powerprop(..., sparsify=...)`; by itself it holds the random masks of its start.

    sparsity: fraction of the weights that are zero, in [0, 1).
    distribution: "uniform" (every layer alike), "erk" (Erdős-Rényi-Kernel) or "global" (one ranking of all weights).
    steps: the number of optimiser steps in all; schedules are fractions of it.
    layers: exceptions by name pattern, as in `prune`: {"conv1.weight": 0.0, "fc.weight": at_most(0.8)}.
    seed: of the method's random choices, if it makes any; the same on every rank of a distributed run.
    pattern: "n:m", such as "2:4": exactly n of every m weights along the inputs; `sparsity` must be 1 - n/m.
    """

    label: ClassVar[str] = "Random masks"
    """Its name in tables."""
    look: ClassVar[tuple[str, str]] = ("grey", ".")
    """Colour and marker in figures."""
    redistributes: ClassVar[bool] = False
    """Layers may exchange weights: what was asked holds for all of them together."""
    grows_at_random: ClassVar[bool] = False
    """Weights are tried at random, not chosen by gradients."""
    explores: ClassVar[bool] = False
    """Weights are trained that the forward pass does not use."""
    grows_by_momentum: ClassVar[bool] = False
    """Weights are chosen by the base optimiser's momentum, which must see the gradients of all of them."""

    CHOICES: ClassVar[tuple[str, ...]] = ("sparsity", "distribution", "pattern")
    """Arguments that a saved state must have been made with."""
    STATE: ClassVar[tuple[str, ...]] = ("step", "generator")
    """Attributes that change in training: numbers, generators, tensors by name."""

    sparsity: float
    _: KW_ONLY
    distribution: str = "uniform"
    steps: int | None = None
    layers: Layers | None = None
    seed: int = 0
    pattern: str | None = None

    def __post_init__(self) -> None:
        self.sparsity = check_sparsity(self.sparsity)
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got {self.distribution!r}")
        if self.pattern is not None and not math.isclose(sparsity_of(self.pattern), self.sparsity):
            raise ValueError(
                f"pattern={self.pattern!r} has sparsity {sparsity_of(self.pattern):g}, got sparsity={self.sparsity:g}"
            )
        self.steps = None if self.steps is None else step_count(self.steps, "steps")
        self.step = 0
        self.generator = torch.Generator("cpu").manual_seed(self.seed)
        self.groups: list[list[str]] | None = None

    def step_flops(self, active: float, trainable: float, dense: float) -> float:
        """A training step, given a forward pass with the active, the trainable and all weights.

        Forward and back through the layers with the active weights, then the gradient of the trainable ones.
        """
        return 2 * active + trainable

    @classmethod
    def kinds(cls) -> dict[str, type[Method]]:
        """All methods there are, by their labels."""
        found = {cls.label: cls}
        for kind in cls.__subclasses__():
            found = kind.kinds() | found
        return found

    # --- the life of a method, as the optimiser calls it ----------------------------------------------------------

    def attach(self, optimizer: Powerprop) -> None:
        """Set the first masks. Layers with a rule of their own keep their own count; the rest share one budget."""
        if self.groups is not None:
            raise ValueError(f"this {type(self).__name__} already belongs to an optimiser; make a new one for each")
        weights = {n: m.param for n, m in optimizer.masters.items()}
        warn_of_empty_layers(weights, self.sparsity, self.distribution, self.layers, stacklevel=3)
        if self.pattern is not None:
            check_pattern(weights, self.pattern, self.layers, convolutions(optimizer.model))
        shapes = {n: w.shape for n, w in weights.items()}
        own = overrides(shapes, self.sparsity, self.layers)
        self.groups = [[n] for n in own] + [[n for n in shapes if n not in own]]
        self.begin(optimizer)

    def begin(self, optimizer: Powerprop) -> None:
        """Random masks with exact counts."""
        scores = {n: self.random(m.param) for n, m in optimizer.masters.items()}
        for name, mask in self.top(scores).items():
            set_mask(optimizer, name, mask)

    @property
    def due(self) -> bool:
        """True if the next step may move masks; these stay."""
        return False

    def needs_gradients(self, optimizer: Powerprop) -> bool:
        """Masks that stay need none."""
        return False

    def before_step(self, optimizer: Powerprop) -> bool:
        """Count the step; the masks stay."""
        self.step += 1
        return False

    def after_step(self, optimizer: Powerprop) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        """The choices, and what is in `STATE`; the masks are saved with the weights."""
        return {**self.choices(), **{name: _saved(getattr(self, name)) for name in self.STATE}}

    def choices(self) -> dict[str, Any]:
        """What must be the same for a saved state to fit; `steps` may differ, to train on for longer."""
        found = {name: value for name in self.CHOICES if (value := getattr(self, name)) is not None}
        return {"method": type(self).__name__, **found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the same choices; a state that does not fit changes nothing."""
        if missing := sorted({*self.choices(), *self.STATE} - state.keys()):
            raise ValueError(f"the state of {type(self).__name__} lacks {', '.join(missing)}")
        for key, mine in self.choices().items():
            if state[key] != mine:
                raise ValueError(f"the state was saved with {key}={state[key]!r}, not {mine!r}")
        vars(self).update({name: _loaded(state[name], getattr(self, name)) for name in self.STATE})

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """A mask update that fails leaves no trace: its step does not count, and its random numbers come again."""
        before, random = dict(vars(self)), self.generator.get_state()
        try:
            yield
        except BaseException:
            vars(self).update(before)
            self.generator.set_state(random)
            raise

    # --- tools ----------------------------------------------------------------------------------------------------

    def top(self, scores: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Masks of the highest scores, with the counts that were asked for."""
        try:
            if self.pattern is not None:
                return pattern_masks(scores, self.pattern, self.layers)
            return top_k_masks(scores, self.sparsity, self.distribution, self.layers)
        except FloatingPointError:
            for name, score in scores.items():
                refuse_nan(name, score, "scores")
            raise

    def random(self, like: Tensor, low: float = 0.0) -> Tensor:
        """Uniform numbers in [low, 1), drawn on the CPU so that every device and every rank gets the same."""
        numbers = torch.empty(like.shape, dtype=torch.float32, device="cpu")
        return numbers.uniform_(low, 1.0, generator=self.generator).to(like.device)


def _saved(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return dict(value) if isinstance(value, Mapping) else value


def _loaded(saved: Any, mine: Any) -> Any:
    if isinstance(mine, torch.Generator):
        generator = torch.Generator("cpu")
        generator.set_state(saved.cpu())
        return generator
    return {n: t.clone() for n, t in saved.items()} if isinstance(mine, Mapping) else type(mine)(saved)


def step_count(steps: int, name: str) -> int:
    """A number of steps as an int, from any kind of whole number; else an error that repeats it."""
    try:
        value = operator.index(steps)
    except TypeError:
        value = 0
    if value < 1:
        raise ValueError(f"{name} must be a positive whole number of optimiser steps, got {steps!r}")
    return value


def refuse_nan(name: str, values: Tensor, kind: str) -> None:
    """An error that names the layer if there is a NaN, which no ranking can place."""
    if nans := count(values != values):  # isnan is slower
        raise FloatingPointError(
            f"{name!r} has {nans} NaN among its {kind}, so that no mask can be chosen; all stay as they were. A lower "
            "learning rate or optimizer.clip_grad_norm_ before each step may help"
        )


def active(master: WeightState) -> Tensor:
    """The weights that the forward pass uses; all of them if there is no mask."""
    return torch.ones_like(master.param, dtype=torch.bool) if master.active is None else master.active


def set_mask(optimizer: Powerprop, name: str, mask: Tensor) -> None:
    """Use and train these weights alone; the others become zero for good. A layer that keeps all needs no mask."""
    master = optimizer.masters[name]
    changed = active(master) ^ mask
    wanted = None if count(mask) == mask.numel() else mask
    master.set_masks(wanted, wanted, keep=False)
    optimizer.reset_state(name, changed)


def top_among(values: Tensor, where: Tensor, k: int) -> Tensor:
    """A mask of the k largest magnitudes among some of the entries; the others take no part in the ranking."""
    if 2 * count(where) > where.numel():
        size = values.abs().flatten().index_fill_(0, places(~where), -1)
        return top_k(size, k).view(where.shape)
    candidates = places(where)
    chosen = top_k(values.flatten().index_select(0, candidates).abs_(), k)
    return from_places(candidates.index_select(0, places(chosen)), where)


def from_places(indices: Tensor, like: Tensor) -> Tensor:
    """The mask with these flat indices, in the shape of another."""
    mask = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    mask[indices] = True
    return mask.view(like.shape)
