"""Runs of experiments inside a test."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import standin
from powerprop_paper import data
from powerprop_paper.pages import write
from powerprop_paper.run import Experiment, Row, Rows, Run

PRESET = "smoke"


def run_smoke(experiment: Experiment, out: Path, config: Any = None) -> dict[str, Any]:
    """The preset `smoke`, or other settings, in this process; what summary.json says."""
    config = config or experiment.presets[PRESET]
    with Run(experiment, PRESET, config, out, workers=1, console=Console(file=io.StringIO())) as run:
        write(experiment.main(config, run), run)
        assert not run.failures
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def rows_of(rows: Iterable[Mapping[str, Any]]) -> Rows:
    """Rows that no job wrote."""
    return Rows(Row(row, Path()) for row in rows)


def table(summary: Mapping[str, Any], title: str) -> list[dict[str, Any]]:
    """The rows of a table of summary.json, by the names of its columns; those without one by their number."""
    every = [each for section in summary["sections"] for each in section["tables"]]
    (found,) = (each for each in every if each["title"].startswith(title))
    names = [column["name"] or str(i) for i, column in enumerate(found["columns"])]
    return [dict(zip(names, row, strict=True)) for row in found["rows"]]


def digits(name: str) -> data.Images:
    """The stand-in images under any name, small."""
    images = standin.load("mnist")
    x, y, test_x, test_y = images.train_x[:3000], images.train_y[:3000], images.test_x[:600], images.test_y[:600]
    return replace(images, name=name, train_x=x, train_y=y, test_x=test_x, test_y=test_y)


def digits_or_hundred(name: str) -> data.Images:
    """The same; CIFAR-100 is made up of ten patterns in a hundred classes."""
    if name != "cifar100":
        return digits(name)
    images = standin.made_up("cifar10", 2000, 400)
    more = [10 * (torch.arange(len(labels)) % 10) for labels in (images.train_y, images.test_y)]
    return replace(
        images, name=name, train_y=images.train_y + more[0], test_y=images.test_y + more[1], note="half of it",
        class_names=tuple(map(str, range(100))),
    )  # fmt: skip
