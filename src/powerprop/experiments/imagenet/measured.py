"""The finished trainings of an ImageNet run, cell by cell, and what the reader sees of their names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from powerprop.experiments.harness.experiment import Results
from powerprop.experiments.harness.typed import Diverged, result_of
from powerprop.experiments.imagenet.cells import Cell
from powerprop.experiments.imagenet.results import Trained
from powerprop.experiments.sparse.rows import ROWS
from powerprop.report import Mean

if TYPE_CHECKING:
    from powerprop.experiments.imagenet.config import Config

MARKS = {"topkast-0": "*", "topkast-50": "†"}
"""The paper's marks for backward sparsities of 0% and 50%."""


@dataclass(frozen=True)
class Measured:
    """A cell with the results of its seeds, and what became of those that diverged."""

    cell: Cell
    runs: list[Trained]
    folders: list[Path]
    diverged: list[str]

    @property
    def label(self) -> str:
        """As the tables show its method."""
        if self.cell.oneshot:
            return "Dense" if self.cell.alpha == 1 else f"Powerprop, α = {self.cell.alpha:g}"
        return label(self.cell.row)

    def value(self) -> Mean | str:
        """Accuracy: mean and standard deviation over the seeds."""
        return Mean.of(run.accuracy for run in self.runs) if self.runs else "diverged"

    @property
    def method(self) -> str:
        """As the table of colours calls its method."""
        return ROWS[self.cell.row.removeprefix("pp-")].label

    @property
    def accuracy(self) -> float:
        """The mean over the seeds; at least one must be there."""
        return fmean(run.accuracy for run in self.runs)


def label(row: str) -> str:
    """The name of a row, with the paper's marks for Top-KAST."""
    method = row.removeprefix("pp-")
    name = f"Top-KAST{MARKS[method]}" if method in MARKS else ROWS[method].label
    return f"Powerprop + {name}" if row.startswith("pp-") else name


def column(this: Cell) -> str:
    """Its sparsity, as a column's name."""
    return f"{100 * this.sparsity:g}%" + (" ERK" if this.distribution == "erk" else "")


def collect(config: Config, this: Cell, results: Results, out: Path) -> Measured:
    """The seeds of a cell."""
    keys = [f"{this.key}-seed{seed}" for seed in range(config.seeds)]
    found = {key: result_of(Trained, results, key) for key in keys}
    good = {key: run for key, run in found.items() if isinstance(run, Trained)}
    lost = [
        f"{this.name}, seed {seed}: {run.diverged}"
        for seed, run in enumerate(found.values())
        if isinstance(run, Diverged)
    ]
    return Measured(this, list(good.values()), [out / "jobs" / key for key in good], lost)
