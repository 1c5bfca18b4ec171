"""Every family of experiments at its smallest, on made-up data; as a script, the command line with them.

`python families.py FOLDER run mnist-oneshot --preset tiny …`: the folder gets the made-up pictures.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

from powerprop import data
from powerprop.cli import main
from powerprop.data import Images
from powerprop.experiments import EXPERIMENTS

PRESET = "tiny"
FAMILIES = {
    "oneshot": "mnist-oneshot",
    "sparse": "sparse-training",
    "imagenet": "imagenet",
    "continual": "permuted-mnist",
    "boundaries": "unknown-boundaries",
}
"""The experiment that stands for each family."""
TINY: dict[str, dict[str, Any]] = {
    "mnist-oneshot": {"seeds": 1, "steps": 12, "every": 4, "lrs": (0.2, 0.5), "train": 300, "validation": 100},
    "sparse-training": {
        "rows": ("dense", "pp-topkast-50", "rigl"), "columns": ("uniform 0.9",), "seeds": 1, "steps": 8, "every": 3,
        "multipliers": (), "extended": (), "train": 300, "validation": 100, "test": 100, "batch": 20,
    },
    "imagenet": {"cells": ("dense",), "steps": 4, "every": 2, "crop": 16, "resize": 16, "points": 2},
    "permuted-mnist": {"tasks": 2, "width": 16, "images": 500, "validation": 100, "steps": 6},
    "unknown-boundaries": {"tasks": 2, "width": 16, "images": 500, "shortest": 45, "longest": 50},
}  # fmt: skip
"""What differs from the preset `smoke`."""


def made_up(name: str, *, download: bool = True) -> Images:
    """Ten fixed patterns with noise, easy to learn."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 1, 28, 28, generator=generator)
    y = torch.randint(10, (900,), generator=generator)
    x = (127 * (patterns[y] + torch.rand(len(y), 1, 28, 28, generator=generator))).byte()
    return Images(name, x[:700], y[:700], x[700:], y[700:], tuple("0123456789"))


def write_pictures(root: Path) -> None:
    """A small set in Tiny ImageNet's place."""
    random = np.random.default_rng(0)
    for split, count in (("train", 3), ("val", 1)):
        for label in range(10):
            place = root / "tiny-imagenet-10" / split / f"n{label:08d}"
            place.mkdir(parents=True, exist_ok=True)
            for row in range(count):
                file = io.BytesIO()
                Image.fromarray(random.integers(0, 256, (20, 20, 3), np.uint8)).save(file, "JPEG")
                (place / f"{row}.JPEG").write_bytes(file.getvalue())


def blank(figure: Figure, file: Any, **options: Any) -> None:
    """Stands in for drawing, which takes most of the time of a small run: a picture without content."""
    file.write('<svg xmlns="http://www.w3.org/2000/svg" width="200" height="100" viewBox="0 0 200 100"></svg>\n')


def add_presets(setitem: Callable[[dict[str, Any], str, Any], None]) -> None:
    """Give every family the preset `tiny`."""
    for name, changes in TINY.items():
        presets = EXPERIMENTS[name].presets
        setitem(presets, PRESET, replace(presets["smoke"], **changes))


def install(root: Path) -> None:
    """Give this process the made-up data, pictures that take no time, and the preset `tiny` of every family."""
    data.load = made_up  # type: ignore[assignment]
    Figure.savefig = blank  # type: ignore[method-assign]
    os.environ["POWERPROP_DATA"] = str(root)
    add_presets(dict.__setitem__)


def command(family: str, out: Path, workers: int = 1) -> list[str]:
    """The arguments that run a family's experiment."""
    return ["run", FAMILIES[family], "--preset", PRESET, "--workers", str(workers), "--out", str(out)]


# At import, because worker processes import this file again as their main module.
if __name__ in ("__main__", "__mp_main__"):
    install(Path(sys.argv[1]))

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
