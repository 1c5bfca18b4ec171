"""The page of a run: what every report shows besides its own results, put together in one place."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from powerprop.experiments.harness.experiment import RunError
from powerprop.experiments.harness.folder import plain
from powerprop.files import CHECKSUM, read_json
from powerprop.report import Headline, Page, Section, Stat

SMOKE = "smoke"
PROVES = (
    "This is the preset `smoke`, a run of seconds: it proves that it runs. Its numbers claim nothing about any method."
)


def run_page(
    out: Path, config: Any, title: str, intro: str, paper: str, sections: Sequence[Section],
    stats: Sequence[Stat] = (), headline: Headline | None = None,
) -> Page:  # fmt: skip
    """The page with the command, settings and versions of the run in `out`; a smoke run's page claims nothing.

    Args:
        paper: where the paper reports the same.
        stats: the numbers at the top.
        headline: the one number that the index of all results shows.
    """
    saved = _object(out / "config.json")
    name, preset = (_text(out / "config.json", saved, key) for key in ("experiment", "preset"))
    if preset == SMOKE:
        intro, stats, headline = f"{PROVES}\n\n{intro}", (), None
        sections = [replace(each, tables=[table.unmarked() for table in each.tables]) for each in sections]
    return Page(
        title=title,
        intro=intro,
        sections=sections,
        config={"preset": preset, **plain(asdict(config))},
        versions={name: value for name, value in _object(out / "versions.json").items() if name != CHECKSUM},
        paper_reference=paper,
        stats=stats,
        headline=headline,
        command=command(name, preset, config),
    )


def command(name: str, preset: str, config: Any) -> str:
    """What makes the run again: the preset and every setting that is not the preset's."""
    from powerprop.experiments import EXPERIMENTS  # which imports the reports, and they this

    words = ["powerprop", "run", name, "--preset", preset]
    start = EXPERIMENTS[name].presets.get(preset) if name in EXPERIMENTS else None
    if isinstance(start, type(config)):
        for each in fields(config):
            if (value := getattr(config, each.name)) != getattr(start, each.name):
                words += option(each.name, value)
    return shlex.join(words)


def option(name: str, value: object) -> list[str]:
    """A setting as it is typed: `--retrain-steps 10`, `--alphas 1 2`, `--no-matrix`."""
    typed = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{typed}" if value else f"--no-{typed}"]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{typed}", *(f"{each:g}" if isinstance(each, float) else str(each) for each in values)]


def _object(file: Path) -> dict[str, Any]:
    found = read_json(file)
    if not isinstance(found, dict):
        raise RunError(
            f"{file} must hold an object, got {repr(found)[:60]}; undo what was edited, or run it again elsewhere"
        )
    return found


def _text(file: Path, saved: dict[str, Any], key: str) -> str:
    value = saved.get(key)
    if not isinstance(value, str):
        raise RunError(f"{file}: {key!r} must be a text, got {repr(value)[:60]}; undo what was edited")
    return value
