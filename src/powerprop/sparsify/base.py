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

__all__ = ["Method", "active", "from_places", "refuse_nan", "set_mask", "share", "step_count", "top_among"]


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
    redistributes: ClassVar[bool] = False
    """Layers may exchange weights: what was asked holds for all of them together."""
    grows_at_random: ClassVar[bool] = False
    """Weights are tried at random, not chosen by gradients."""
    explores: ClassVar[bool] = False
    """Weights are trained that the forward pass does not use."""
    grows_by_momentum: ClassVar[bool] = False
    """Weights are chosen by the base optimiser's momentum, which must see the gradients of all of them."""

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

    # --- the life of a method, as the optimiser calls it ----------------------------------------------------------

    def attach(self, optimizer: Powerprop) -> None:
        """Set the first masks. Layers with a rule of their own keep their own count; the rest share one budget."""
        if self.groups is not None:
            raise ValueError(f"this {type(self).__name__} already belongs to an optimiser; make a new one for each")
        if getattr(self, "decay", 0) > 0 and any("lr" not in group for group in optimizer.param_groups):
            raise ValueError(
                f"{type(self).__name__}(decay={self.decay!r}) takes lr·decay·θ off at each step, "  # type: ignore[attr-defined]
                f"but the base optimiser {type(optimizer.base).__name__} has no 'lr' in its groups; use decay=0"
            )
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
        """The step and the random numbers' state; the masks are saved with the weights."""
        return {**self.choices(), "step": self.step, "generator": self.generator.get_state()}

    def choices(self) -> dict[str, Any]:
        """What must be the same for a saved state to fit; `steps` may differ, to train on for longer."""
        pattern = {} if self.pattern is None else {"pattern": self.pattern}
        return {"method": type(self).__name__, "sparsity": self.sparsity, "distribution": self.distribution, **pattern}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the same choices; a state that does not fit changes nothing."""
        if missing := sorted(Method.state_dict(self).keys() - state.keys()):
            raise ValueError(f"the state of {type(self).__name__} lacks {', '.join(missing)}")
        for key, mine in self.choices().items():
            if state[key] != mine:
                raise ValueError(f"the state was saved with {key}={state[key]!r}, not {mine!r}")
        generator = torch.Generator("cpu")
        generator.set_state(state["generator"].cpu())
        self.step, self.generator = int(state["step"]), generator

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


def share(total: int, weights: Mapping[str, float], room: Mapping[str, int]) -> dict[str, int]:
    """Whole numbers that sum to total, in proportion to the weights as far as there is room.

    What a full layer cannot take goes to the others, in proportion again; weights that are all zero mean the room.
    """
    if total > sum(room.values()):
        raise ValueError(f"{total} weights to place, but there is room for {sum(room.values())}")
    if not math.isfinite(sum(weights.values())):
        raise FloatingPointError(f"shares must be finite numbers, got {dict(weights)}")
    exact = _fill(total, weights, room)
    counts = {n: min(room[n], int(x + 1e-9)) for n, x in exact.items()}
    missing = total - sum(counts.values())
    for name in sorted(counts, key=lambda n: counts[n] - exact[n]):
        more = min(room[name] - counts[name], 1, missing)
        counts[name] += more
        missing -= more
    return counts


def _fill(total: int, weights: Mapping[str, float], room: Mapping[str, int]) -> dict[str, float]:
    full: set[str] = set()
    while True:
        free = total - sum(room[n] for n in full)
        rest = {n: w for n, w in weights.items() if n not in full}
        rest = rest if sum(rest.values()) > 0 else {n: float(room[n]) for n in rest}
        scale = sum(rest.values()) or 1.0
        exact = {n: free * w / scale for n, w in rest.items()}
        over = {n for n in rest if exact[n] > room[n]}
        if not over:
            return {n: exact.get(n, float(room[n])) for n in weights}
        full |= over
