"""`powerprop compare`: two finished runs of an experiment side by side."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tyro
from rich.console import Console

from powerprop.commands.differences import Pair, difference_figure, pairs_of
from powerprop.commands.output import print_table, say
from powerprop.experiments import EXPERIMENTS
from powerprop.experiments.harness.experiment import Experiment, Findings, RunError
from powerprop.experiments.harness.folder import all_results, describe, open_run
from powerprop.report import Image, Page, Section, Table, write_page

SPREAD = "The spread of a difference is √(s² + s²) of both standard deviations; runs of one seed have none."


def compare(first: tyro.conf.Positional[Path], second: tyro.conf.Positional[Path], out: Path | None = None) -> None:
    """Show two finished runs of an experiment side by side: every value, its difference and the spread of it.

    Args:
        first: folder of a run.
        second: folder of the run to compare it with.
        out: folder for the page and its pictures, runs/compare-FIRST-SECOND by default.
    """
    runs = [open_run(folder, EXPERIMENTS) for folder in (first, second)]
    if runs[0][0] is not runs[1][0]:
        raise RunError(f"{first} is a run of {runs[0][0].name} and {second} of {runs[1][0].name}; expected the same")
    out = out or Path("runs") / f"compare-{first.name}-{second.name}"
    if (out / "config.json").exists():
        raise RunError(f"{out} is the folder of a run; choose another --out for the comparison")
    names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
    before, after = (findings_of(folder, *run) for folder, run in zip((first, second), runs, strict=True))
    changed = changed_settings(names, *(describe(*run) for run in runs))
    pairs = pairs_of(before.page, after.page)
    console, table = Console(), pairs_table(names, pairs)
    for each in (*changed, table):
        print_table(console, each.to_rich())
    page = Page(
        title=f"{before.page.title}: {names[0]} and {names[1]}",
        intro=f"Differences are those of {names[1]} from {names[0]}. {SPREAD}",
        sections=[
            Section("Settings", "" if changed else "Both runs have the same settings.", tables=changed),
            Section("Results", figures=pictures(names, pairs, out / "figures"), tables=[table]),
        ],
    )
    say(console, f"Comparison: {write_page(page, out)}")


def changed_settings(names: tuple[str, str], first: dict[str, Any], second: dict[str, Any]) -> list[Table]:
    """A table of the settings that differ; none if all are the same."""
    settings = [{"preset": each["preset"], **each["config"]} for each in (first, second)]
    differ = [name for name in settings[0] if settings[0][name] != settings[1][name]]
    rows = [[name, *(str(each[name]) for each in settings)] for name in differ]
    return [Table("Settings that differ", ["", *names], rows)] if rows else []


def pairs_table(names: tuple[str, str], pairs: list[Pair]) -> Table:
    """One row for every value that one of the runs has."""
    rows = [[pair.row, pair.column, *pair.texts()] for pair in pairs]
    return Table("Values", ["", "value", *names, "difference"], rows, SPREAD)


def pictures(names: tuple[str, str], pairs: list[Pair], folder: Path) -> list[Image]:
    """One picture of differences per table of the report."""
    images = []
    for number, title in enumerate(dict.fromkeys(pair.table for pair in pairs)):
        shown = [pair for pair in pairs if pair.table == title and pair.difference is not None]
        if shown:
            images.append(difference_figure(shown, title, names, folder / f"differences-{number}.svg"))
    return images


def findings_of(out: Path, experiment: Experiment, preset: str, config: Any) -> Findings:
    """What a finished run says; the pictures are drawn elsewhere and thrown away, so that the run stays as it is."""
    results = all_results(out, experiment, config)
    with TemporaryDirectory() as folder:
        for name in ("jobs", "config.json", "versions.json"):
            (Path(folder) / name).symlink_to((out / name).resolve())
        return experiment.report(config, results, Path(folder))
