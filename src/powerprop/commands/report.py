"""`powerprop report`."""

from __future__ import annotations

from pathlib import Path

import tyro
from rich.console import Console

from powerprop.commands.output import say
from powerprop.experiments import EXPERIMENTS
from powerprop.experiments.harness.experiment import RunError
from powerprop.experiments.harness.folder import open_run
from powerprop.experiments.harness.runner import write_report
from powerprop.report import index_page


def report(folders: tyro.conf.Positional[tuple[Path, ...]] = (), combined: Path | None = None) -> None:
    """Draw the reports of finished runs anew.

    Args:
        folders: of the runs.
        combined: also write all of them as one page into this file.
    """
    if not folders:
        raise RunError("report needs the folder of at least one run, got none")
    console, pages = Console(), []
    for folder in folders:
        experiment, preset, config = open_run(folder, EXPERIMENTS)
        pages.append(write_report(experiment, preset, config, folder).page)
        say(console, f"Report: {folder / 'report.html'}")
    if combined is not None:
        index_page(pages, combined.parent, name=combined.name)
        say(console, f"All together: {combined}")
