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

from powerprop.cli import main
from powerprop_paper import data
from powerprop_paper.cli import find
from powerprop_paper.data import Images
from powerprop_paper.experiments import world

PRESET = "tiny"
FAMILIES = {
    "oneshot": "mnist-oneshot",
    "sparse": "sparse-training",
    "imagenet": "imagenet",
    "continual": "permuted-mnist",
    "strategies": "split-mnist-strategies",
    "generative": "generative",
    "boundaries": "unknown-boundaries",
    "inference": "task-inference",
    "world": "continual-world",
}
"""The experiment that stands for each family."""
TINY: dict[str, dict[str, Any]] = {
    "mnist-oneshot": {"seeds": 1, "steps": 12, "checkpoint_every": 4, "train": 300, "validation": 100, "test": 100},
    "sparse-training": {
        "methods": ("dense", "pp-topkast-50", "rigl"), "sparsities": ("uniform 0.9",), "seeds": 1, "steps": 8,
        "checkpoint_every": 3, "cycles": (), "extended": (), "train": 300, "validation": 100, "test": 100, "batch": 20,
    },
    "imagenet": {"cells": ("dense",), "steps": 4, "checkpoint_every": 2, "crop": 16, "resize": 16, "points": 2},
    "permuted-mnist": {"tasks": 2, "width": 16, "images": 500, "validation": 100, "steps": 6},
    "split-mnist-strategies": {
        "strategies": ("Naive", "SI"), "powerprop": (), "si_strengths": (1.0,), "images": 500, "validation": 100,
        "epochs": 0.2,
    },
    "generative": {"tasks": 2, "images": 400, "validation": 50, "steps": 4, "retrain_steps": 2, "strengths": (1.0,)},
    "unknown-boundaries": {"tasks": 2, "width": 16, "images": 500, "shortest": 45, "longest": 50},
    "task-inference": {
        "streams": ("permuted",), "superfluous": (0,), "tasks": 2, "steps": 4, "retrain_steps": 2, "pruning_steps": 1,
        "width": 16, "images": 400, "validation": 100, "probe_images": 16, "inputs": ("plain",),
    },
    "continual-world": {
        "tasks": ("left", "right"), "steps": 40, "retrain_steps": 2, "random_steps": 10, "evaluate_every": 20,
        "start": 10, "width": 16, "examples": 16, "checkpoint_every": 15,
    },
}  # fmt: skip
"""What differs from the preset `smoke`."""


class Arm:
    """Stands in for the simulated arm: a point on a line that must come to one of its ends; 25 steps."""

    def __init__(self, name: str, reward: str, observation: str) -> None:
        self.name, self.goal = name, {"left": -0.8, "right": 0.8}[name]
        self.draw, self.place, self.steps = np.random.default_rng(0), 0.0, 0

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.draw = self.draw if seed is None else np.random.default_rng(seed)
        self.place, self.steps = self.draw.uniform(-1, 1), 0
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place, self.steps = float(np.clip(self.place + 0.2 * action[0], -1, 1)), self.steps + 1
        away = abs(self.place - self.goal)
        return self.seen(), -away, False, self.steps == 25, {"success": float(away < 0.1)}

    def seen(self) -> Any:
        return np.linspace(self.place, self.goal, 39, dtype=np.float32)

    def state(self) -> dict[str, Any]:
        return {"place": self.place, "steps": self.steps, "draw": self.draw.bit_generator.state}

    def load_state(self, state: dict[str, Any]) -> None:
        self.place, self.steps, self.draw.bit_generator.state = state["place"], state["steps"], state["draw"]

    def frame(self) -> Any:
        return np.full((8, 8, 3), int(100 + 100 * self.place), np.uint8)

    def close(self) -> None:
        pass


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
        presets: Any = find(name).presets
        setitem(presets, PRESET, replace(presets["smoke"], **changes))


def stand_in(setattr: Callable[[Any, str, Any], None]) -> None:
    """The made-up images, and the stand-in of the arm."""
    setattr(data, "load", made_up)
    setattr(world, "MetaWorld", Arm)
    setattr(world, "task_name", str)


def install(root: Path) -> None:
    """Give this process the made-up data, pictures that take no time, and the preset `tiny` of every family."""
    stand_in(setattr)
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
