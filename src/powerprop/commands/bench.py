"""powerprop bench-model: latency, dense against sparse, on this machine."""

from __future__ import annotations

from pathlib import Path

import tyro
from rich.console import Console

import powerprop.export as exporting
from powerprop.commands.checkpoint import CommandError, example, filled, read_state
from powerprop.commands.show import grid
from powerprop.export import Plan
from powerprop.report import Bars, Mean, bars

__all__ = ["bench_model"]


def bench_model(
    file: tyro.conf.Positional[Path],
    model: str,
    shape: tuple[int, ...],
    batches: tuple[int, ...] = (1, 64),
    picture: Path | None = None,
) -> None:
    """Measure a network of this machine, as it is and exported: a table, and a picture if asked for.

    Args:
        file: safetensors or a torch checkpoint (.pt) of tensors alone.
        model: package.module:function that makes the network.
        shape: of one input, without the batch: 784, or 3 32 32.
        batches: how many inputs at a time.
        picture: an .svg to draw.
    """
    if not batches:
        raise CommandError("--batches needs at least one number, got none")
    if picture is not None and picture.suffix != ".svg":
        raise CommandError(f"--picture is written as .svg, got {picture}")
    network, console = filled(model, read_state(file)), Console()
    plans = {n: exporting.sparse(network, example(network, shape, n)).plan for n in batches}
    threads = next(iter(plans.values())).threads
    table = grid(f"{file.name}, {threads} threads, microseconds", ["batch", "dense", "exported", "faster", "how"], 0)
    for n, plan in plans.items():
        table.add_row(str(n), *_times(plan), f"{plan.speedup:.2f}x", _how(plan))
    console.print(table)
    if picture is not None:
        _draw(plans, picture, file.name)
        console.print(f"Picture: {picture}", highlight=False, soft_wrap=True)


def _times(plan: Plan) -> list[str]:
    return [f"{plan.times[n] * 1e6:,.0f}" for n in ("dense", plan.network)]


def _how(plan: Plan) -> str:
    layers = sum(c.form == "sparse" for c in plan.choices)
    return f"{plan.network}, {layers} of {len(plan.choices)} layers sparse, {sum(plan.removed.values())} units gone"


def _draw(plans: dict[int, Plan], picture: Path, name: str) -> None:
    def means(kind: str | None) -> list[Mean]:
        return [Mean.of([1e6 * plan.times[kind or plan.network]]) for plan in plans.values()]

    series = [Bars("dense", 1.0, means("dense")), Bars("exported", 2.0, means(None))]
    bars([f"batch {n}" for n in plans], series, picture, f"Latency of {name}", "microseconds a call")
