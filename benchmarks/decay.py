"""Weight decay under matched rates: does λ mean what it means under α = 1?

    OMP_NUM_THREADS=1 python benchmarks/decay.py

Two tables, as Markdown. Ridge regression, ½‖Xw - y‖²/n + λ‖w‖²/2, has a solution that can be computed: how far from it
the weights end. LeNet-300-100 on MNIST at the rate of α = 1: the root mean square of the weights, and accuracy, by λ.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer

import powerprop as pp
from powerprop_paper import data, models
from powerprop_paper.train import evaluate

ALPHAS = (1.0, 2.0, 3.0)
Made = Callable[[list[nn.Parameter], float], Optimizer]
COUPLED: dict[str, Made] = {
    "SGD": lambda p, decay: SGD(p, 0.1, weight_decay=decay),
    "momentum": lambda p, decay: SGD(p, 0.01, momentum=0.9, weight_decay=decay),
    "Adam": lambda p, decay: Adam(p, 1e-3, weight_decay=decay),
}
"""Optimisers that add λw to the gradient, whose weights end at the ridge solution."""


def ridge(made: Made, alpha: float, decay: float, steps: int) -> float:
    """The distance to the solution, as a fraction of its norm; features overlap, all weights are positive."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(400, 20, generator=draw) + torch.randn(400, 1, generator=draw)
    y = x @ torch.linspace(0.2, 2, 20) + 0.1 * torch.randn(400, generator=draw)
    solution = torch.linalg.solve(x.T @ x / 400 + decay * torch.eye(20), x.T @ y / 400)
    layer = nn.Linear(20, 1, bias=False)
    nn.init.uniform_(layer.weight, 0.2, 1.0, generator=draw)
    optimizer = pp.Powerprop(made(list(layer.parameters()), decay), layer, alpha)
    for _ in range(steps):
        layer.weight.grad = ((layer(x)[:, 0] - y) @ x / 400)[None].detach()
        optimizer.step()
    return float((layer.weight[0].detach() - solution).norm() / solution.norm())


def lenet(made: Made, alpha: float, decay: float, steps: int, splits: data.Splits, own: float = 0.0) -> list[float]:
    """Root mean square weight, accuracy dense and with a tenth kept; `own` is the decay of φ."""
    model = models.lenet_300_100(generator=torch.Generator().manual_seed(0))
    optimizer = pp.Powerprop(made(list(model.parameters()), decay), model, alpha, decay=own)
    batches = data.Batches(*splits.train, 60, torch.Generator().manual_seed(0))
    for _ in range(steps):
        x, y = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    weights: list[Tensor] = [m.weight.detach().flatten() for m in model.modules() if isinstance(m, nn.Linear)]
    size = math.sqrt(float(torch.cat(weights).square().mean()))
    dense = evaluate(model, *splits.test).accuracy
    pp.prune(model, 0.9)
    return [size, dense, evaluate(model, *splits.test).accuracy]


def row(*cells: str) -> None:
    print("|", " | ".join(cells), "|", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    row("λ = 0.3", *(f"α = {alpha:g}" for alpha in ALPHAS))
    row("---", *("---:" for _ in ALPHAS))
    for name, made in COUPLED.items():
        row(name, *(f"{ridge(made, alpha, 0.3, 4_000):.0e}" for alpha in ALPHAS))
    print()
    splits = data.load_splits("mnist", "unit", validation=5_000)
    row("LeNet", "decay", *(f"α = {alpha:g}" for alpha in ALPHAS))
    row("---", "---", *("---" for _ in ALPHAS))
    sgd: Made = lambda p, decay: SGD(p, 0.3, weight_decay=decay)  # noqa: E731
    adamw: Made = lambda p, decay: AdamW(p, 1e-3, weight_decay=decay)  # noqa: E731
    for name, made, decays in (("SGD", sgd, (0.0, 3e-4, 3e-3)), ("AdamW", adamw, (0.0, 0.1, 1.0))):
        for decay in decays:
            found = [lenet(made, alpha, decay, 600, splits) for alpha in ALPHAS]
            row(name, f"{decay:g}", *(f"{s:.4f}, {100 * d:.1f} ({100 * p:.0f})" for s, d, p in found))
    for own in (3e-4, 3e-3):
        found = [lenet(sgd, alpha, 0.0, 600, splits, own) for alpha in ALPHAS[1:]]
        row("SGD", f"of φ {own:g}", "", *(f"{s:.4f}, {100 * d:.1f} ({100 * p:.0f})" for s, d, p in found))


if __name__ == "__main__":
    main()
