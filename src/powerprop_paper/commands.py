"""The commands besides `run`: list, show, results, compare; each a dataclass of options that does its work if called.

`compare` puts two finished runs of an experiment side by side, value by value, as their summary.json have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from rich.console import Console
from rich.table import Table as RichTable

from powerprop.files import FileError, content_of, write_atomically
from powerprop_paper.cli import FAMILIES, PRESET, Options, find, own_folder, preset_of, run_experiment
from powerprop_paper.display import print_table, say
from powerprop_paper.folder import read_json
from powerprop_paper.pages import Figure, Page, Section, write_page
from powerprop_paper.report import Bars, Column, Mean, Table, bars
from powerprop_paper.report.page import index, write_docs
from powerprop_paper.run import RunError

BENCHMARKS = "benchmarks"
"""A page beside those of the experiments, which `make bench` writes."""
SPREAD = "The spread of a difference is √(s² + s²) of both standard deviations; runs of one seed have none."


@dataclass(frozen=True)
class List:
    """Show the experiments and their presets."""

    def __call__(self) -> None:
        console, table = Console(), RichTable.grid(padding=(0, 2))
        table.add_column("name", no_wrap=True, style="bold")
        table.add_column("what", overflow="fold")
        for each in map(find, FAMILIES):
            table.add_row(each.name, f"{each.title}\n{each.paper}; presets {', '.join(each.presets)}")
        console.print(table, highlight=False)
        say(console, "\npowerprop run NAME --preset PRESET, powerprop run NAME --help")


@dataclass(frozen=True)
class Show:
    """Show the numbers and tables of finished runs."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """of the runs"""

    def __call__(self) -> None:
        if not self.folders:
            raise RunError("show needs the folder of at least one run, got none")
        console, found = Console(), {folder: summary_of(folder) for folder in self.folders}
        for folder, summary in found.items():
            with content_of(folder / "summary.json", "what a finished run says"):
                _show(summary, console)
            say(console, f"Report: {folder / 'report.html'}\n")


def _show(summary: dict[str, Any], console: Console) -> None:
    say(console, f"{summary['title']}\n{summary['command']}\n", "bold")
    for stat in summary["stats"]:
        say(console, f"{stat['label']}: {stat['value']} {stat['note'] and '(' + stat['note'] + ')'}".rstrip())
    for table in (each for section in summary["sections"] for each in section["tables"]):
        print_table(console, Table.from_data(table).to_rich())


def summary_of(folder: Path) -> dict[str, Any]:
    """What the summary.json of a finished run says."""
    path = folder / "summary.json"
    if not path.is_file():
        begun = (folder / "config.json").is_file()
        why = "is not finished: the same command goes on" if begun else "is not the folder of a run"
        raise RunError(f"{folder} {why}; it has no summary.json")
    found = read_json(path)
    if not isinstance(found, dict) or not {"experiment", "title", "command", "config", "sections"} <= found.keys():
        raise FileError(f"{path} is not of a run of this powerprop; run it again in another folder")
    return found


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


class Pair(NamedTuple):
    """A value that both reports have, or one of them (the other's is None)."""

    table: str
    row: str
    column: str
    percent: bool
    digits: int
    first: Mean | None
    second: Mean | None

    @property
    def difference(self) -> Mean | None:
        """The second less the first; its spread is √(s₁² + s₂²)."""
        if self.first is None or self.second is None:
            return None
        spread = math.hypot(self.first.std, self.second.std)
        return Mean(self.second.mean - self.first.mean, spread, min(self.first.n, self.second.n))

    def texts(self) -> list[str]:
        """Both values and their difference, as they are shown."""
        first, second = ("" if each is None else each.format(self.digits) for each in (self.first, self.second))
        moved = "" if self.difference is None else self.difference.format(self.digits)
        return [first, second, moved if not moved or moved.startswith("-") else f"+{moved}"]


@dataclass(frozen=True)
class Compare:
    """Show two finished runs of an experiment side by side: every value, its difference and the spread of it."""

    first: tyro.conf.Positional[Path]
    """folder of a run"""
    second: tyro.conf.Positional[Path]
    """folder of the run to compare it with"""
    out: Path | None = None
    """folder for the page and its pictures, runs/compare-FIRST-SECOND by default"""

    def __call__(self) -> None:
        first, second = self.first, self.second
        there, here = summary_of(first), summary_of(second)
        if (one := there["experiment"]) != (other := here["experiment"]):
            raise RunError(f"{first} is a run of {one} and {second} of {other}; expected the same")
        out = self.out or Path("runs") / f"compare-{first.name}-{second.name}"
        if (out / "config.json").exists():
            raise RunError(f"{out} is the folder of a run; choose another --out for the comparison")
        names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
        with content_of(f"{first} or {second}", "what a finished run says"):
            changed, pairs = changed_settings(names, there, here), pairs_of(there, here)
        rows = [[pair.row, pair.column, *pair.texts()] for pair in pairs]
        table, console = Table("Values", ["", "value", *names, "difference"], rows, SPREAD), Console()
        for each in (*changed, table):
            print_table(console, each.to_rich())
        page = Page(
            f"{there['title']}: {names[0]} and {names[1]}",
            f"Differences are those of {names[1]} from {names[0]}. {SPREAD}",
            [
                Section("Settings", "" if changed else "Both runs have the same settings.", tables=changed),
                Section("Results", figures=pictures(names, pairs), tables=[table]),
            ],
        )
        write_page(page, out, {"compared": [str(first), str(second)]})
        say(console, f"Comparison: {out / 'report.html'}")


def changed_settings(names: tuple[str, str], first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Table]:
    """A table of the settings that differ; none if all are the same."""
    there, here = ({"preset": each["preset"], **each["config"]} for each in (first, second))
    differ = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    rows = [[name, *(str(each.get(name, "")) for each in (there, here))] for name in differ]
    return [Table("Settings that differ", ["", *names], rows)] if rows else []


def pairs_of(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Pair]:
    """Every number of the tables of two summaries, matched by table, row and column; the paper's are left out."""
    tables = [[table for section in each["sections"] for table in section["tables"]] for each in (first, second)]
    found = [{key: value for table in each for key, value in _numbers(Table.from_data(table))} for each in tables]
    pairs = []
    for key in dict.fromkeys((*found[0], *found[1])):
        there, here = found[0].get(key), found[1].get(key)
        column = (there or here)[0]  # type: ignore[index]
        means = [None if each is None else each[1] for each in (there, here)]
        pairs.append(Pair(*key, column.percent, _digits(column, means), *means))
    return pairs


def _numbers(table: Table) -> Iterator[tuple[tuple[str, str, str], tuple[Column, Mean]]]:
    columns = [each if isinstance(each, Column) else Column(each) for each in table.columns]
    for label, row in zip(_row_labels(table), table.rows, strict=True):
        for column, value in zip(columns, row, strict=True):
            if value is not None and not isinstance(value, str) and not column.paper:
                mean = value if isinstance(value, Mean) else Mean(value, math.nan, 1)
                yield (table.title, label, column.name), (column, mean.scaled(100.0 if column.percent else 1.0))


def _row_labels(table: Table) -> list[str]:
    """The first text of every row, with those that follow it where rows would be called the same."""
    texts = [[value for value in row if isinstance(value, str)] for row in table.rows]
    for count in range(1, len(table.columns) + 1):
        labels = [", ".join(part for part in row[:count] if part) for row in texts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"row {number}" for number in range(len(table.rows))]


def _digits(column: Column, means: Sequence[Mean | None]) -> int:
    """Decimals of the column, or two digits of the smallest spread, or four of the largest value."""
    if column.digits is not None:
        return column.digits
    known = [mean for mean in means if mean is not None]
    spread = [mean for mean in known if mean.std > 0]
    return min(spread, key=lambda mean: mean.std).digits if spread else min(mean.digits for mean in known)


def pictures(names: tuple[str, str], pairs: Sequence[Pair]) -> list[Figure]:
    """The differences of each table as dots with their spread; of percentages alone where there are any."""
    figures = []
    for number, title in enumerate(dict.fromkeys(pair.table for pair in pairs)):
        every = [pair for pair in pairs if pair.table == title and pair.difference is not None]
        if shown := [pair for pair in every if pair.percent] or every:
            labels = [f"{pair.row}, {pair.column}" for pair in shown]
            series = [Bars("difference", 2.0, [pair.difference for pair in shown])]
            what = f"{names[1]} less {names[0]}{', percentage points' if shown[0].percent else ''}"
            figures.append(Figure(f"differences-{number}", bars, labels, series, title=title, xlabel=what, zoom=True))
    return figures


COMMANDS = {"list": List, "results": Results, "compare": Compare, "show": Show}
