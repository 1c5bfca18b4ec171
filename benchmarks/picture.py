"""The picture of the README: accuracy against latency and against file size, with and without Powerprop.

    python benchmarks/picture.py [--steps 15000] [--seeds 2] [--out docs/images/smaller-faster.svg]

LeNet-300-100 on real MNIST, plain SGD, batches of 60, the learning rates that `mnist-oneshot` chose on validation
images. Each network is pruned once by magnitude, never retrained, exported for batches of 64 and measured with one
thread. Fewer steps show less: the networks grow apart as they train.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import powerprop as pp
from powerprop.export.measure import best_times
from powerprop_paper import data
from powerprop_paper.data import Batches
from powerprop_paper.folder import write_json
from powerprop_paper.models import lenet_300_100
from powerprop_paper.report import Curve, style
from powerprop_paper.report.curve import draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATES = {1.0: 0.2, 2.0: 0.5}
SPARSITIES = (0.0, 0.5, 0.8, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99)
BATCH = 64


@dataclass(frozen=True)
class Point:
    """A pruned network: its test accuracy, microseconds a batch, kilobytes on disk."""

    accuracy: float
    latency: float
    size: float


def train(images: data.Images, alpha: float, seed: int, steps: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    net = lenet_300_100(init="truncated_fan_in", generator=generator)
    optimizer = pp.Powerprop(torch.optim.SGD(net.parameters(), lr=RATES[alpha]), net, alpha=alpha)
    batches = Batches(images.train_x.float().div(255), images.train_y, 60, generator)
    for _ in range(steps):
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.eval().requires_grad_(False)


def twice(sparsity: float) -> float:
    """The output layer keeps twice the fraction of the others, as in `mnist-oneshot`."""
    return max(0.0, 1 - 2 * (1 - sparsity))


def measure(net: nn.Module, images: data.Images, sparsity: float) -> Point:
    pruned = lenet_300_100()
    pruned.load_state_dict(net.state_dict())
    pruned.eval().requires_grad_(False)
    pp.prune(pruned, sparsity, layers={"fc3.weight": twice})
    x = images.test_x.float().div(255)
    fast = pp.export.sparse(pruned, x[:BATCH])
    with torch.no_grad(), TemporaryDirectory() as folder:
        accuracy = float((fast(x).argmax(1) == images.test_y).float().mean())
        seconds = best_times({"fast": lambda: fast(x[:BATCH])}, x.device, seconds=0.5)["fast"]
        return Point(accuracy, seconds * 1e6, pp.save(pruned, Path(folder) / "net.safetensors").file_bytes / 1000)


def picture(points: dict[float, list[list[Point]]], out: Path) -> Path:
    figure = style.figure(9.6, 4.0)
    left, right = figure.subplots(1, 2, sharey=True)
    labels = panel(left, points, "latency", f"microseconds for {BATCH} images (log scale)", "Accuracy against latency")
    panel(right, points, "size", "kilobytes on disk (log scale)", "Accuracy against file size")
    left.set_ylabel("test accuracy")
    left.legend(left.get_lines(), labels, loc="lower right", frameon=False, fontsize=9)
    return style.save(figure, out)


def panel(axes: Axes, points: dict[float, list[list[Point]]], what: str, xlabel: str, title: str) -> list[str]:
    """Draw one panel; the labels of its lines."""
    style.dress(axes, title, xlabel)
    curves = []
    for alpha, seeds in points.items():
        x = np.median([[getattr(p, what) for p in seed] for seed in seeds], axis=0)
        label = "ordinary training, pruned" if alpha == 1 else f"Powerprop (α = {alpha:g}), pruned"
        curves.append(Curve(label, alpha, x, [[p.accuracy for p in seed] for seed in seeds]))
    draw(axes, curves, (0.0, 1.0), 100.0)
    axes.set_xscale("log")
    low, high = min(c.positions[0] for c in curves), max(c.positions[-1] for c in curves)
    ticks = [t for t in (10, 20, 50, 100, 200, 500, 1000) if low <= t <= high]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 102)
    axes.yaxis.set_major_formatter("{x:g}%")
    return [curve.label for curve in curves]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("docs/images/smaller-faster.svg"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images = data.load("mnist")
    points = {}
    for alpha in RATES:
        nets = [train(images, alpha, seed, arguments.steps) for seed in range(arguments.seeds)]
        points[alpha] = [[measure(net, images, s) for s in SPARSITIES] for net in nets]
    table = Table("α", "zero", "accuracy", "microseconds", "kB")
    for alpha, seeds in points.items():
        for i, sparsity in enumerate(SPARSITIES):
            row = np.mean([[p[i].accuracy * 100, p[i].latency, p[i].size] for p in seeds], axis=0)
            table.add_row(f"{alpha:g}", f"{sparsity:.0%}", f"{row[0]:.2f}", f"{row[1]:.0f}", f"{row[2]:.1f}")
    Console().print(table)
    raw = {f"{alpha:g}": [[asdict(p) for p in seed] for seed in seeds] for alpha, seeds in points.items()}
    write_json(arguments.out.with_suffix(".json"), {"steps": arguments.steps, "sparsities": SPARSITIES, "alpha": raw})
    print(picture(points, arguments.out))


if __name__ == "__main__":
    main()
