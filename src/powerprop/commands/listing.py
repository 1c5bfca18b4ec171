"""`powerprop list`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable

from powerprop.commands.output import say
from powerprop.experiments import EXPERIMENTS


def list_experiments() -> None:
    """Show the experiments and their presets."""
    console, table = Console(), RichTable.grid(padding=(0, 2))
    table.add_column("name", no_wrap=True, style="bold")
    table.add_column("what", overflow="fold")
    for each in EXPERIMENTS.values():
        table.add_row(each.name, f"{each.title}\n{each.paper}; presets {', '.join(each.presets)}")
    console.print(table, highlight=False)
    say(console, "\npowerprop run NAME --preset PRESET, powerprop run NAME --help")
