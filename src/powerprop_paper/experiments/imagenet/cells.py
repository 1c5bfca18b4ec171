"""What the paper trains on ImageNet: every cell of its tables with the value printed there, settings and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from powerprop.allocate import Layers, at_most
from powerprop.flops import count_flops, layer_densities
from powerprop.reparam import check_alpha
from powerprop_paper.sparse_methods import DENSE, METHODS, ONESHOT, parse, training_cost

ALPHA = 1.375
"""The power of every Powerprop row (appendix, hyper-parameters for ImageNet)."""
BASE_RATES = {"pp-iterative": 0.4}
"""η_b of the methods whose best base learning rate is not the usual 0.1 (same table)."""
ONESHOT_ALPHAS = (1.125, 1.25, 1.375, 1.5)
"""The powers considered for one-shot pruning (same table)."""
STEPS = 32_000
"""Of a cycle."""
RULES: Layers = {"conv1.weight": 0.0, "fc.weight": at_most(0.8)}
"""Uniform sparsity leaves the first convolution dense and prunes the last layer to at most 80% (appendix C)."""
NOT_ZERO = ("topkast", "snip")
"""Methods whose last layer must not start at zero even with α = 1: Top-KAST as in the paper; SNIP because the gradient
of all other layers would be zero, and with it every score."""
MARKS = {"topkast-0": "*", "topkast-50": "†"}
"""The paper's marks for backward sparsities of 0% and 50%."""

TABLE_1 = {
    "dense": "76.8 ± 0.09",
    "static uniform 0.8": "70.6 ± 0.06", "static uniform 0.9": "65.8 ± 0.04", "static uniform 0.95": "59.5 ± 0.11",
    "static erk 0.8": "72.1 ± 0.04", "static erk 0.9": "67.7 ± 0.12",
    "dsr uniform 0.8": "73.3", "dsr uniform 0.9": "71.6",
    "snfs uniform 0.8": "74.2", "snfs uniform 0.9": "72.3", "snfs erk 0.8": "75.2 ± 0.11",
    "snfs erk 0.9": "72.9 ± 0.06",
    "snip uniform 0.8": "72.0 ± 0.10", "snip uniform 0.9": "67.2 ± 0.12", "snip uniform 0.95": "57.8 ± 0.40",
    "rigl uniform 0.8": "74.6 ± 0.06", "rigl uniform 0.9": "72.0 ± 0.05", "rigl uniform 0.95": "67.5 ± 0.10",
    "rigl erk 0.8": "75.1 ± 0.05", "rigl erk 0.9": "73.0 ± 0.04",
    "iterative uniform 0.8": "75.3 ± 0.07", "iterative uniform 0.9": "73.7 ± 0.14",
    "iterative uniform 0.95": "70.6 ± 0.05",
    "pp-iterative uniform 0.8": "75.7 ± 0.05", "pp-iterative uniform 0.9": "74.4 ± 0.02",
    "pp-iterative uniform 0.95": "72.1 ± 0.00",
    "topkast-50 uniform 0.8": "75.47 ± 0.03", "topkast-50 uniform 0.9": "74.65 ± 0.03",
    "topkast-50 uniform 0.95": "72.73 ± 0.10", "topkast-50 erk 0.8": "75.71 ± 0.06",
    "topkast-50 erk 0.9": "74.79 ± 0.05",
    "pp-topkast-50 uniform 0.8": "75.75 ± 0.05", "pp-topkast-50 uniform 0.9": "74.74 ± 0.04",
    "pp-topkast-50 uniform 0.95": "72.89 ± 0.10", "pp-topkast-50 erk 0.8": "75.84 ± 0.01",
    "pp-topkast-50 erk 0.9": "74.98 ± 0.09",
    "topkast-0 uniform 0.8": "76.08 ± 0.02", "topkast-0 uniform 0.9": "75.13 ± 0.03",
    "topkast-0 uniform 0.95": "73.19 ± 0.02", "topkast-0 erk 0.8": "76.42 ± 0.03", "topkast-0 erk 0.9": "75.51 ± 0.05",
    "pp-topkast-0 uniform 0.8": "76.24 ± 0.07", "pp-topkast-0 uniform 0.9": "75.23 ± 0.02",
    "pp-topkast-0 uniform 0.95": "73.25 ± 0.02", "pp-topkast-0 erk 0.8": "76.76 ± 0.08",
    "pp-topkast-0 erk 0.9": "75.74 ± 0.08",
}  # fmt: skip
"""Top-1 accuracy of ResNet-50 in percent; "iterative" is the paper's own implementation."""

TABLE_2 = {
    "iterative uniform 0.8 x1.5": ("76.5", 0.84), "iterative uniform 0.9 x1.5": ("75.2", 0.76),
    "rigl uniform 0.8 x5": ("76.6 ± 0.06", 1.14), "rigl uniform 0.9 x5": ("75.7 ± 0.06", 0.52),
    "rigl erk 0.8 x5": ("77.1 ± 0.06", 2.09), "rigl erk 0.9 x5": ("76.4 ± 0.05", 1.23),
    "pp-topkast-0 erk 0.8 x2": ("77.51 ± 0.03", 1.21), "pp-topkast-0 erk 0.9 x2": ("76.94 ± 0.10", 0.97),
    "pp-topkast-0 erk 0.8 x3": ("77.64 ± 0.05", 1.81), "pp-topkast-0 erk 0.9 x3": ("77.16 ± 0.19", 1.46),
}  # fmt: skip
"""Extended training: accuracy, and training FLOPs relative to a dense model for a single cycle."""

EXTREME = tuple(
    f"{row} uniform {sparsity}"
    for sparsity in (0.95, 0.965, 0.98, 0.99)
    for row in ("rigl", "iterative", "pp-iterative", "topkast-0", "pp-topkast-0")
)
"""The extreme-sparsity figure, 95% to 99%; the paper prints no values."""
ALL_CELLS = (*TABLE_1, *TABLE_2, *EXTREME)


class Cell(NamedTuple):
    """One training: `name` is "dense", "powerprop 1.375" (dense, for one-shot pruning) or "rigl erk 0.9 x5"."""

    name: str
    method: str
    alpha: float
    distribution: str = "uniform"
    sparsity: float = 0.0
    times: float = 1.0

    @property
    def dense(self) -> bool:
        """True if it is trained densely and pruned afterwards."""
        return METHODS[self.method].dense

    @property
    def rate(self) -> float:
        """η_b."""
        return BASE_RATES.get(self.method, 0.1)

    @property
    def rules(self) -> Layers:
        """The exceptions of the first and the last layer."""
        return RULES if self.distribution == "uniform" else {}

    @property
    def zero_last(self) -> bool:
        """Whether the last layer starts at zero."""
        return self.alpha == 1 and METHODS[self.method].kind not in NOT_ZERO

    @property
    def label(self) -> str:
        """Its method as the tables show it, with the paper's marks for Top-KAST."""
        if self.dense:
            return "Dense" if self.alpha == 1 else f"Powerprop, α = {self.alpha:g}"
        alone = self.method.removeprefix("pp-")
        name = f"Top-KAST{MARKS[alone]}" if alone in MARKS else METHODS[alone].label
        return f"Powerprop + {name}" if METHODS[self.method].powerprop else name

    @property
    def family(self) -> str:
        """What the table of colours calls its method."""
        return METHODS[self.method.removeprefix("pp-")].label

    @property
    def column(self) -> str:
        """Its sparsity as a column's name."""
        return f"{100 * self.sparsity:g}%" + (" ERK" if self.distribution == "erk" else "")

    @property
    def printed(self) -> str | None:
        """The paper's accuracy."""
        return TABLE_1.get(self.name) or TABLE_2.get(self.name, (None,))[0]


def read_cell(name: str) -> Cell:
    """Read a cell's name; an error repeats it and says what was expected."""
    method, _, rest = name.partition(" ")
    if name == "dense":
        return Cell(name, "dense", 1.0)
    if method == "powerprop":
        return Cell(name, "pp-dense", check_alpha(_number(rest, name), name))
    sparse = [key for key, each in METHODS.items() if each.kind not in (DENSE, ONESHOT)]
    if method not in sparse:
        raise ValueError(f"a cell must begin with dense, powerprop, {', '.join(sparse)}, got {name!r}")
    target, _, times = rest.partition(" x")
    length = _number(times, name) if times else 1.0
    if length <= 0:
        raise ValueError(f"training must be longer than nothing, got x{length:g} in {name!r}")
    return Cell(name, method, ALPHA if METHODS[method].powerprop else 1.0, *parse(target), length)


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text!r} in {name!r}") from None


def chosen(cells: Sequence[str], alphas: Sequence[float], only: Sequence[str]) -> list[Cell]:
    """The cells, and the dense trainings with these powers, that fit one of the patterns (all if there is none)."""
    names = dict.fromkeys([*cells, *(f"powerprop {alpha:g}" for alpha in alphas)])
    return [read_cell(name) for name in names if not only or any(fnmatchcase(name, pattern) for pattern in only)]


class Costs:
    """FLOPs of a network that sees `size` x `size` pictures, relative to dense training of a single length."""

    def __init__(self, model: nn.Module, size: int) -> None:
        self.model, self.flops = model, count_flops(model, (3, size, size))

    def densities(self, this: Cell, sparsity: float) -> dict[str, float]:
        """The fraction kept of each layer at this sparsity, by the cell's distribution and exceptions."""
        return layer_densities(self.model, sparsity, this.distribution, this.rules)

    def training(self, this: Cell, kept: Mapping[str, float] | None = None, sparse_stem: bool = False) -> float:
        """The whole training of a cell.

        kept: the measured fractions; by default those that its distribution gives.
        sparse_stem: count the first convolution as if it were pruned like the others.
        """
        one = METHODS[this.method]
        density = dict(kept or self.densities(this, this.sparsity))
        if sparse_stem:
            density["conv1.weight"] = 1 - this.sparsity
        method = one.make(this.sparsity, this.distribution, STEPS, this.rules, seed=0)
        explores = method is not None and method.explores
        backward = self.densities(this, min(one.backward, this.sparsity)) if explores else None
        return this.times * training_cost(self.flops, method, density, backward)
