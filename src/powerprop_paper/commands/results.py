"""`powerprop results`: experiments, and their pages in the documentation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from powerprop.files import write_atomically
from powerprop_paper.cli import PRESET, Options, own_folder, preset_of, run_experiment
from powerprop_paper.experiments.catalogue import FAMILIES, find
from powerprop_paper.output import say
from powerprop_paper.report.page import index, write_docs

BENCHMARKS = "benchmarks"
"""A page beside those of the experiments, which `make bench` writes."""


@dataclass(frozen=True)
class Results:
    """Run experiments and put their figures and tables into the documentation."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """of the experiments; all of them by default"""
    preset: str = PRESET
    """of all experiments"""
    out: Path = Path("runs")
    """folder that has, or gets, the folder NAME-PRESET of every experiment, as `powerprop run` makes it"""
    docs: Path = Path("docs/results")
    """folder for the Markdown pages and their pictures"""
    workers: int | None = None
    """processes side by side, one thread each; by default all cores"""

    def __call__(self) -> None:
        experiments = [find(name) for name in self.names or FAMILIES]
        configs = {each.name: preset_of(each, self.preset) for each in experiments}
        for each in experiments:
            folder = own_folder(self.out, each, self.preset)
            run_experiment(each, Options(self.preset, folder, self.workers), configs[each.name])
            write_docs(folder, self.docs / each.name)
        path = self.docs / "README.md"
        write_atomically(path, index(self.docs, [*FAMILIES, BENCHMARKS], self.preset).encode())
        say(Console(), f"Results: {path}")
