"""An experiment without networks, for tests of the harness: its jobs do as the environment says.

As a script it is a command with the options of `powerprop run`.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from powerprop_paper.cli import script
from powerprop_paper.pages import Figure, Headline, Page, Percent, Section, Stat, Table
from powerprop_paper.report import Curve, lines
from powerprop_paper.run import Experiment, Progress, Rows, Run
from powerprop_paper.settings import Count, Seeds, Settings
from powerprop_paper.train import MetricsLog

BREAK = "TOY_BREAKS"
"""`crash=1`: the job of seed 1 crashes; see `breaks`."""
ran: list[tuple[str, Any]] = []
"""What was done in this process."""


@dataclass(frozen=True)
class Config(Settings):
    """Settings of the toy."""

    seeds: Seeds = 2
    """runs of each power"""
    alphas: tuple[float, ...] = (1.0, 2.0)
    """powers"""
    steps: Count = 3
    """how long it takes"""
    distributed: bool = False
    """jobs may be trained by all ranks together"""


def breaks(seed: int, folder: Path) -> None:
    """What the environment wants to happen to the job of a seed."""
    kind, _, which = os.environ.get(BREAK, "").partition("=")
    if which != str(seed):
        return
    if kind == "crash":
        raise KeyError("by hand")
    if kind == "kill":
        os.kill(os.getpid(), 9)
    if kind == "nan":
        raise FloatingPointError("the loss is nan at step 2")
    if kind == "full":
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "checkpoint.pt"))


def train(cfg: Config, folder: Path, progress: Progress, alpha: float, seed: int) -> dict[str, Any]:
    ran.append(("train", (alpha, seed)))
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.rewind(0)
        for step in range(1, cfg.steps + 1):
            log.write(step, loss=1 / step)
            progress(step / cfg.steps, {"step": step})
            time.sleep(float(os.environ.get("TOY_SECONDS", "0")))
    breaks(seed, folder)
    world = dist.get_world_size() if dist.is_initialized() else 1
    curve = [round(alpha / 10 + seed / 100, 2), round(alpha / 5 + seed / 100, 2)]
    return {"accuracy": curve[-1], "curve": curve, "world": world, "threads": torch.get_num_threads()}


def count(cfg: Config, folder: Path, progress: Progress, words: str) -> dict[str, Any]:
    ran.append(("count", words))
    return {"letters": len(words)}


def jobs(cfg: Config) -> list[dict[str, Any]]:
    return [{"alpha": alpha, "seed": seed} for alpha in cfg.alphas for seed in range(cfg.seeds)]


def main(cfg: Config, run: Run) -> Page:
    rows = run.map(train, jobs(cfg), distributed=False if cfg.distributed else None)
    curves = [
        Curve(f"α = {alpha:g}", alpha, [1, 2], found.values("curve"))
        for alpha, found in rows.finished.by("alpha").items()
    ]
    table = Table(
        "Accuracy", ["", Percent("accuracy", "max", 2), "processes"],
        [[f"α = {a:g}", found.mean("accuracy"), found.mean("world")] for a, found in rows.finished.by("alpha").items()],
    )  # fmt: skip
    picture = Figure("accuracy", lines, curves, title="Accuracy", xlabel="step", ylabel="accuracy", caption="Of `it`.")
    return Page(
        "Toy", "A toy that claims `much`.\n\nReally.", [Section("Accuracy", "One.", [picture], [table])], "Nowhere.",
        [Stat("best", "40%", "of all")], Headline("α = 2 | best", "40%", "39%"), {"rows": len(rows)},
    )  # fmt: skip


EXPERIMENT = Experiment("toy", "a toy", "nowhere", {"smoke": Config(), "cpu": Config(seeds=3)}, main)


def run_of(out: Path, config: Config | None = None, *, preset: str = "smoke", workers: int = 1, **options: Any) -> Run:
    """A run of the toy in a folder, which says nothing."""
    console = options.pop("console", Console(quiet=True))
    return Run(EXPERIMENT, preset, config or Config(), out, workers=workers, console=console, **options)


def rows_of(out: Path, config: Config | None = None, **options: Any) -> Rows:
    """The rows of such a run; `ran` says what was done for them."""
    ran.clear()
    with run_of(out, config, **options) as run:
        return run.map(train, jobs(config or Config()))


def files(out: Path) -> dict[str, bytes]:
    """Everything in a run's folder that does not depend on the clock."""
    found = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if name not in ("times.jsonl", ".lock")}


if __name__ == "__main__":
    script(EXPERIMENT)
