"""The rows of the paper's table 1: each sparse-training method as its authors set it up, with and without Powerprop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

import powerprop as pp
from powerprop.allocate import Layers, check_sparsity, layer_counts
from powerprop.flops import Density, Flops
from powerprop.sparsify.base import Method as Sparsifier
from powerprop.sparsify.iterative import IterativePruning

UPDATES_EVERY = 100
"""Steps between mask updates in the papers of all methods."""
UNPRUNED = "uniform 0"
"""The target of a dense network."""
DENSE: Final = "dense"
ONESHOT: Final = "oneshot"

TABLE = (pp.Static, pp.SNIP, pp.SET, pp.DSR, pp.SNFS, pp.RigL, pp.IterativePruning, pp.TopKAST)
"""The paper's table; whatever else the library has follows."""


def key(kind: type[Sparsifier]) -> str:
    """A method's name in commands and files."""
    return kind.__name__.lower().removesuffix("pruning")


SPARSIFIERS: dict[str, type[Sparsifier]] = {
    key(kind): kind for kind in dict.fromkeys([*TABLE, *Sparsifier.kinds().values()]) if kind is not Sparsifier
}


class Method(NamedTuple):
    """One row of the table.

    label: as shown.
    kind: one of SPARSIFIERS, or DENSE, or ONESHOT.
    powerprop: with α > 1.
    backward: backward sparsity of Top-KAST.
    """

    label: str
    kind: str
    powerprop: bool = False
    backward: float = 0.0

    @property
    def dense(self) -> bool:
        """True if nothing is pruned."""
        return self.kind == DENSE

    def make(
        self, sparsity: float, distribution: str, steps: int, layers: Layers, seed: int, topkast_every: int = 100,
        regrow_every: int = UPDATES_EVERY, topkast_decay: float = 1e-4,
    ) -> Sparsifier | None:  # fmt: skip
        """The `sparsify=` object; None for the dense network and for one-shot pruning after training."""
        if self.kind in (DENSE, ONESHOT):
            return None
        kind: Any = SPARSIFIERS[self.kind]
        options: dict[str, Any] = {"distribution": distribution, "steps": steps, "layers": layers, "seed": seed}
        if kind.grows_at_random or issubclass(kind, pp.SET):
            interval = regrow_every if kind.grows_at_random else UPDATES_EVERY
            options["interval"] = min(interval, max(1, steps // 3))  # a short run moves its masks too
        if kind.explores:
            backward = min(self.backward, sparsity)
            options |= {"backward_sparsity": backward, "interval": topkast_every, "decay": topkast_decay}
        made: Sparsifier = kind(sparsity, **options)
        return made


_LABELS = {name: kind.label for name, kind in SPARSIFIERS.items() if not kind.explores}
METHODS: dict[str, Method] = {
    "dense": Method("Dense", DENSE),
    "pp-dense": Method("Powerprop, dense", DENSE, True),
    **{name: Method(label, name) for name, label in _LABELS.items()},
    "topkast-50": Method("Top-KAST, 50% backward", "topkast", False, 0.5),
    "topkast-0": Method("Top-KAST, 0% backward", "topkast", False, 0.0),
    "one-shot": Method("One-shot pruning", ONESHOT),
    **{f"pp-{name}": Method(f"Powerprop + {label}", name, True) for name, label in _LABELS.items()},
    "pp-topkast-50": Method("Powerprop + Top-KAST, 50% backward", "topkast", True, 0.5),
    "pp-topkast-0": Method("Powerprop + Top-KAST, 0% backward", "topkast", True, 0.0),
    "pp-one-shot": Method("Powerprop + One-shot pruning", ONESHOT, True),
}


def add(kind: type[Sparsifier]) -> None:
    """Two more rows: a method of one's own, without Powerprop and with it."""
    SPARSIFIERS[key(kind)] = kind
    METHODS[key(kind)] = Method(kind.label, key(kind))
    METHODS[f"pp-{key(kind)}"] = Method(f"Powerprop + {kind.label}", key(kind), True)


def parse(target: str) -> tuple[str, float]:
    """The distribution and the sparsity of a target such as "erk 0.9"."""
    distribution, _, number = target.partition(" ")
    try:
        sparsity = check_sparsity(float(number))
    except ValueError:
        sparsity = -1.0
    if sparsity < 0 or distribution not in ("uniform", "erk"):
        raise ValueError(f"a sparsity must look like 'uniform 0.95' or 'erk 0.9', got {target!r}")
    return distribution, sparsity


def training_cost(flops: Flops, method: object, density: Density, backward: Density | None = None) -> float:
    """FLOPs of a whole training, relative to a dense one of the same length: the mean over all steps.

    method: the `sparsify=` object; None is dense training, whatever is pruned after it.
    density: of the weights in use, at the end; a method that prunes gradually is dense at first.
    backward: of those that get a gradient, where a method tells these apart.
    """
    if not isinstance(method, Sparsifier):
        return 1.0
    if isinstance(method, IterativePruning):
        return flops.gradual(density)
    return flops.training(method, density, backward if method.explores else None)


def asked(weights: Mapping[str, Tensor], method: Method, target: str, layers: Layers) -> dict[str, int] | int:
    """What was asked: kept weights per layer, or in all where the method may move them between layers.

    Layers round each for itself, so that the sum is that of the layers and not of the sparsity of all weights.
    """
    distribution, sparsity = parse(target)
    layerwise = layer_counts({n: w.shape for n, w in weights.items()}, sparsity, distribution, layers)
    kind = SPARSIFIERS.get(method.kind)
    return sum(layerwise.values()) if kind is not None and kind.redistributes else layerwise
