"""How cost grows: time and memory against weights, tasks and layers, with fitted exponents.

    OMP_NUM_THREADS=1 python benchmarks/growth.py [--quick]

An exponent of 1 is linear: it is the slope of a line through the logarithms of the larger half of the sizes, where the
fixed costs of a call no longer count. One layer of n weights, as square as may be; SGD with momentum.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import powerprop as pp
from memory import footprint
from powerprop.continual.packing.task_masks import TaskMasks
from powerprop_paper.report.curve import Curve
from powerprop_paper.report.figures import lines
from timing import best_times
from updates import update_seconds

WEIGHTS = (10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7, 3 * 10**7, 10**8)
LAYERS = (10, 30, 100, 300, 1000, 2000)
TASKS = (1, 3, 10, 30, 100, 300, 1000)
LOOKS: dict[str, dict[str, Any]] = {
    "plain": {"alpha": 1.0},
    "foreach": {"alpha": 1.0},
    "step, α = 2": {"alpha": 2.0},
    "with RigL": {"method": "RigL"},
    "RigL": {"method": "RigL"},
    "Top-KAST": {"method": "Top-KAST, 50% backward"},
    "wrapping": {"alpha": 3.0},
}
"""How a curve is drawn, by how its label begins; one alone needs none."""


@dataclass(frozen=True)
class Growth:
    """A curve of costs, and its exponent."""

    label: str
    against: str
    unit: str
    sizes: Sequence[int]
    costs: Sequence[float]

    @property
    def exponent(self) -> float:
        half = len(self.sizes) // 2
        x, y = ([math.log(v) for v in values[half:]] for values in (self.sizes, self.costs))
        mx, my = sum(x) / len(x), sum(y) / len(y)
        return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def layer(weights: int) -> nn.Linear:
    """Weights and gradients at random, without the slow default initialisation."""
    rows = 2 ** round(math.log2(math.sqrt(weights)))
    made = nn.utils.skip_init(nn.Linear, weights // rows, rows, bias=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        made.weight.uniform_(-0.1, 0.1, generator=generator)
    made.weight.grad = torch.empty_like(made.weight).uniform_(-1e-3, 1e-3, generator=generator)
    return made


def wrapped(model: nn.Module, **options: object) -> pp.Powerprop:
    base = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return pp.Powerprop(base, model, **options)  # type: ignore[arg-type]


def trained(size: int, ours: bool) -> list[object]:
    """A layer after two steps, plainly or with α = 2 and the masks of RigL."""
    model = layer(size)
    plain = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = wrapped(model, alpha=2.0, sparsify=pp.RigL(0.9, steps=1000)) if ours else plain
    optimizer.step()
    optimizer.step()
    return [model, optimizer]


def against_weights(sizes: Sequence[int]) -> list[Growth]:
    """Plain step, ours, a mask update of RigL and of Top-KAST."""
    found: dict[str, list[float]] = {}
    for size in sizes:
        calls = max(1, 10**6 // size)
        plain, dense = layer(size), layer(size)
        steps = {
            "plain step": torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9).step,
            "step, α = 2": wrapped(dense, alpha=2.0).step,
        }
        for name, seconds in best_times(steps, 5 if size > 10**7 else 30, calls).items():
            found.setdefault(name, []).append(seconds)
        del plain, dense, steps
        for name, method in {
            "RigL update": pp.RigL(0.9, interval=2, stop=1 << 40),
            "Top-KAST update": pp.TopKAST(0.9, backward_sparsity=0.8, interval=2),
        }.items():
            found.setdefault(name, []).append(update_seconds(layer(size), method, 2.0, 2 if size > 10**7 else 8))
    return [Growth(name, "weights", "s", sizes, costs) for name, costs in found.items()]


def memory_against_weights(sizes: Sequence[int]) -> list[Growth]:
    """Weights, gradients, momentum, φ and masks of a layer in training."""
    named = {"plain": False, "with RigL, α = 2": True}
    found = {name: [float(footprint(lambda s=s, o=ours: trained(s, o))) for s in sizes] for name, ours in named.items()}  # type: ignore[misc]
    return [Growth(name, "weights", "bytes", sizes, costs) for name, costs in found.items()]


def against_layers(sizes: Sequence[int]) -> list[Growth]:
    """Wrapping and stepping; layers of 32·32 weights."""
    wrap, step, plain = [], [], []
    for size in sizes:
        model = nn.ModuleList([layer(1024) for _ in range(size)])
        base = torch.optim.Adam(model.parameters(), foreach=True)
        start = time.perf_counter()
        optimizer = pp.Powerprop(base, model, alpha=2.0)
        wrap.append(time.perf_counter() - start)
        twin = nn.ModuleList([layer(1024) for _ in range(size)])
        times = best_times(
            {"ours": optimizer.step, "plain": torch.optim.Adam(twin.parameters(), foreach=True).step}, 5, 2
        )
        step.append(times["ours"])
        plain.append(times["plain"])
    named = {"wrapping": wrap, "step, α = 2": step, "foreach Adam": plain}
    return [Growth(name, "layers", "s", sizes, costs) for name, costs in named.items()]


def against_tasks(sizes: Sequence[int], weights: int = 2 * 10**6) -> list[Growth]:
    """The masks of many tasks on one network: memory, and the switch to one of them."""
    memory, switch = [], []
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        masks = TaskMasks({"w": torch.rand(1000, weights // 1000, generator=generator)})
        masks.owner["w"] = torch.randint(-1, size, (1000, weights // 1000), generator=generator).to(torch.int16)
        masks.threshold["w"], masks.tasks = torch.rand(size, generator=generator).tolist(), size
        memory.append(float(masks.owner["w"].nbytes + 32 * size))
        last = size - 1
        switch.append(best_times({"mask": lambda m=masks, t=last: m.mask(t)}, 5, 2)["mask"])  # type: ignore[misc]
    named = {"memory of the masks": (memory, "bytes"), "switch of task": (switch, "s")}
    return [Growth(name, "tasks", unit, sizes, costs) for name, (costs, unit) in named.items()]


def all_growth(quick: bool = False) -> list[Growth]:
    """All curves."""
    torch.set_num_threads(1)
    return [curve for measure in MEASURES.values() for curve in measure(quick)]


MEASURES: dict[str, Callable[[bool], list[Growth]]] = {
    "growth in weights": lambda quick: against_weights(WEIGHTS[:4] if quick else WEIGHTS),
    "memory in weights": lambda quick: memory_against_weights(WEIGHTS[:4] if quick else WEIGHTS),
    "growth in layers": lambda quick: against_layers(LAYERS[:4] if quick else LAYERS),
    "growth in tasks": lambda quick: against_tasks(TASKS),
}


def drawn(curve: Growth) -> Curve:
    look = next((how for start, how in LOOKS.items() if curve.label.startswith(start)), {})
    return Curve(curve.label, look.get("alpha"), curve.sizes, list(curve.costs), method=look.get("method"))


def markdown(curves: Sequence[Growth], folder: Path) -> str:
    """The section of the page: one picture for each thing that grows, and the exponents."""
    text = ["## How cost grows", "Exponents of the larger half of the sizes; 1 is linear, 0 constant.", ""]
    for against in dict.fromkeys(c.against for c in curves):
        for unit in dict.fromkeys(c.unit for c in curves if c.against == against):
            some = [c for c in curves if c.against == against and c.unit == unit]
            path = folder / f"growth-{against}-{unit}.svg"
            name, shown = ("Time", "seconds") if unit == "s" else ("Memory", unit)
            title = f"{name} against {against}"
            image = lines([*map(drawn, some)], path, title, against, shown, logx=True, logy=True, wide=True)
            text += [f"![{image.alt}]({path.name})", ""]
    text += ["| | against | smallest | largest | exponent |", "|---|---|---:|---:|---:|"]
    for c in curves:
        text.append(
            f"| {c.label} | {c.against}, {c.sizes[0]:,} to {c.sizes[-1]:,} | {c.costs[0]:.3g} {c.unit} | "
            f"{c.costs[-1]:.3g} {c.unit} | {c.exponent:.2f} |"
        )
    return "\n".join(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    for curve in all_growth(parser.parse_args().quick):
        Console().print(curve, f"exponent {curve.exponent:.2f}")
