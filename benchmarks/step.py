"""The price of Powerprop: the time of a training step as a ratio to the plain optimiser's, side by side.

    OMP_NUM_THREADS=1 python benchmarks/step.py [--quick] [--net Conv-6]

Each row is an α. "wrapper" is `pp.Powerprop` around the optimiser, "textbook" the `torch.nn.utils.parametrize` form
(`pp.reparametrize`), "notebook" the formula as the paper's notebook writes it, w = v·|v|^(α-1) inside the layer, under
autograd. LeNet-300-100 at batch 60 is the worst case: the weights outweigh the activations. The limits are those the
project holds itself to; the exit code is 1 if one is exceeded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import powerprop as pp
from powerprop.models import conv6, lenet_300_100
from timing import best_times

INTEGER, FRACTIONAL = (2.0, 3.0, 4.0, 5.0), (1.125, 1.25, 1.375, 1.5, 1.75)
BASES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3),
    "SGD momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-5),
}


class Notebook(nn.Module):
    """w = v·|v|^(α-1), left to autograd."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, v: Tensor) -> Tensor:
        return v * torch.pow(torch.abs(v), self.alpha - 1)

    def right_inverse(self, w: Tensor) -> Tensor:
        return torch.sign(w) * torch.pow(torch.abs(w), 1 / self.alpha)


def notebook(model: nn.Module, alpha: float) -> None:
    for module in list(model.modules()):
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            parametrize.register_parametrization(module, "weight", Notebook(alpha))


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...]) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    y = torch.randint(10, shape[:1], generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def variants(
    make: Callable[[], nn.Module], base: str, shape: tuple[int, ...], alphas: tuple[float, ...], twins: bool
) -> dict[str, Callable[[], object]]:
    """Every way to take a step, by name."""
    plain = make()
    steps = {"plain": stepper(plain, BASES[base](plain), shape)}
    for alpha in alphas:
        model = make()
        steps[f"wrapper {alpha:g}"] = stepper(model, pp.Powerprop(BASES[base](model), model, alpha=alpha), shape)
        if twins:
            model = make()
            pp.reparametrize(model, alpha)
            steps[f"textbook {alpha:g}"] = stepper(model, BASES[base](model), shape)
            model = make()
            notebook(model, alpha)
            steps[f"notebook {alpha:g}"] = stepper(model, BASES[base](model), shape)
    return steps


def extra_copies(alpha: float) -> float:
    """Memory that the wrapper keeps for a weight, in copies of it."""
    model = lenet_300_100(generator=torch.Generator().manual_seed(0))
    optimizer = pp.Powerprop(BASES["SGD"](model), model, alpha=alpha)
    stepper(model, optimizer, (60, 784))()
    masters = optimizer.masters.values()
    kept = sum(b.untyped_storage().nbytes() for m in masters for b in (m.phi, m.factor) if b is not None)
    return kept / sum(m.param.untyped_storage().nbytes() for m in masters)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, LeNet under SGD alone")
    parser.add_argument("--net", choices=["LeNet-300-100", "Conv-6"], help="one network alone")
    arguments = parser.parse_args()
    quick = arguments.quick
    alphas = INTEGER + FRACTIONAL
    failures = 0
    cases = [("LeNet-300-100", base, (60, 784), 1.35, 1.75) for base in (("SGD",) if quick else BASES)]
    if not quick:
        cases.append(("Conv-6", "SGD", (60, 3, 32, 32), 1.03, 1.03))
    for net, base, shape, integer_limit, fractional_limit in cases:
        if arguments.net not in (None, net):
            continue
        lenet = net.startswith("LeNet")
        seed = torch.Generator().manual_seed(0)
        make = (lambda: lenet_300_100(generator=seed)) if lenet else (lambda: conv6(generator=seed))  # noqa: B023
        rounds, calls = (15 if quick else 25, 30) if lenet else (12, 1)
        times = best_times(variants(make, base, shape, alphas, twins=lenet and base == "SGD"), rounds, calls)
        table = Table(
            title=f"{net}, batch 60, {base}: {times['plain'] * 1e3:.2f} ms a plain step", title_justify="left"
        )
        for column in ("α", "wrapper", "limit", "textbook", "notebook"):
            table.add_column(column, justify="right")
        for alpha in alphas:
            limit = integer_limit if alpha in INTEGER else fractional_limit
            ratios = {k: times.get(f"{k} {alpha:g}", 0) / times["plain"] for k in ("wrapper", "textbook", "notebook")}
            failures += ratios["wrapper"] > limit
            shown = {k: f"{r:.3f}x" if r else "" for k, r in ratios.items()}
            table.add_row(f"{alpha:g}", shown["wrapper"], f"{limit:.2f}x", shown["textbook"], shown["notebook"])
        Console().print(table)
    Console().print(f"memory kept by the wrapper: {max(map(extra_copies, alphas)):.2f} copies of the weights (limit 2)")
    Console().print("all within the limits" if not failures else f"{failures} ratios above the limit")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
