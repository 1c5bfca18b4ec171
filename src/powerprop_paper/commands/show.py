"""`powerprop list` and `powerprop show`: the experiments, and what finished runs say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table as RichTable

from powerprop.files import FileError, read_json
from powerprop_paper.experiments.catalogue import FAMILIES, find
from powerprop_paper.output import print_table, say
from powerprop_paper.report import Table
from powerprop_paper.run import RunError


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
            say(console, f"{summary['title']}\n{summary['command']}\n", "bold")
            for stat in summary["stats"]:
                say(console, f"{stat['label']}: {stat['value']} {stat['note'] and '(' + stat['note'] + ')'}".rstrip())
            for table in (each for section in summary["sections"] for each in section["tables"]):
                print_table(console, Table.from_data(table).to_rich())
            say(console, f"Report: {folder / 'report.html'}\n")


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
