"""Mask updates at scale: ResNet-50 and a hundred million weights, against a training step and against sorting.

    OMP_NUM_THREADS=1 python benchmarks/updates.py [--quick]

A mask update with all that follows from it (scores, masks, weights dropped and grown, momentum cleared) of all layers,
exact, one thread. Beside it what one would write: `torch.nn.utils.prune` layer by layer, and one sort of all weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from torch import nn
from torch.nn.utils import prune

import powerprop as pp
from parts import Part
from powerprop.sparsify import Method
from powerprop_paper.models import resnet50
from step import plain_step

LIMIT = 0.10
"""Of a training step of ResNet-50 at a batch of 32."""
METHODS: dict[str, Callable[[], Method]] = {
    "RigL": lambda: pp.RigL(0.9, interval=2, stop=1 << 40),
    "Top-KAST": lambda: pp.TopKAST(0.9, interval=2),
    "Top-KAST, 50% backward": lambda: pp.TopKAST(0.9, backward_sparsity=0.5, interval=2),
}


def large() -> nn.Module:
    """A hundred million weights in 24 layers of 2,048·2,048, without the slow default initialisation."""
    layers = [nn.utils.skip_init(nn.Linear, 2048, 2048, bias=False) for _ in range(24)]
    for number, layer in enumerate(layers):
        nn.init.uniform_(layer.weight, -0.1, 0.1, generator=torch.Generator().manual_seed(number))
    return nn.ModuleList(layers)


NETS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50": lambda: resnet50(generator=torch.Generator().manual_seed(0)),
    "100 million": large,
}


def with_gradients(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.grad = torch.empty_like(p).uniform_(-1e-3, 1e-3, generator=torch.Generator().manual_seed(1))
    return model


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def update_seconds(model: nn.Module, method: Method, alpha: float, repeats: int) -> float:
    """What an update takes: all of RigL's, which takes the place of a step, and what Top-KAST's adds to one."""
    base = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    optimizer = pp.Powerprop(base, model, alpha, sparsify=method)
    optimizer.step()
    optimizer.step()
    pairs = [(seconds(optimizer.step), seconds(optimizer.step)) for _ in range(repeats)]
    between, update = (min(column) for column in zip(*pairs, strict=True))
    return update - between if isinstance(method, pp.TopKAST) else update


def by_prune(model: nn.Module) -> None:
    for p in model.parameters():
        if p.ndim > 1:
            prune.L1Unstructured(0.9).compute_mask(p.detach(), torch.ones_like(p))


def by_sort(model: nn.Module) -> None:
    for p in model.parameters():
        if p.ndim > 1:
            p.detach().abs().flatten().sort()


def of_network(net: str, repeats: int) -> list[tuple[str, list[float | None]]]:
    """Seconds for α = 1 and 2 of every method, and of what one would write instead."""
    make = NETS[net]
    rows: list[tuple[str, list[float | None]]] = []
    for name, method in METHODS.items():
        each = [update_seconds(with_gradients(make()), method(), alpha, repeats) for alpha in (1.0, 2.0)]
        rows.append((f"{net}, {name}", [*each]))
    model = make()
    for name, way in {"torch.nn.utils.prune": by_prune, "sorting": by_sort}.items():
        rows.append((f"{net}, {name}", [min(seconds(partial(way, model)) for _ in range(2)), None]))
    return rows


def part(quick: bool = False) -> Part:
    """Seconds, and for ResNet-50 the share of a training step."""
    torch.set_num_threads(1)
    step, rows = plain_step("ResNet-50", "SGD momentum"), []
    for net in [*NETS][: 1 if quick else 2]:
        for label, values in of_network(net, 1 if quick else 2):
            shares = [None if v is None or net != "ResNet-50" else 100 * v / step for v in values]
            rows.append((label, [*values, *shares]))
    in_percent = ("α = 1, % of a step", "α = 2, % of a step")
    limits = {f"ResNet-50, {name} | {column}": 100 * LIMIT for name in METHODS for column in in_percent}
    text = (
        f"One update of the masks of all layers, 90% sparse; a training step of ResNet-50 (25.6 million weights) at a "
        f"batch of 32 takes {step:.2f} s here. The limit is one of percent. `torch.nn.utils.prune` and sorting give "
        f"masks by magnitude and nothing else."
    )
    columns = ("α = 1, s", "α = 2, s", *in_percent)
    return Part("updates", "Mask updates at scale", text, columns, rows, "seconds", limits, pictured=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    found = part(parser.parse_args().quick)
    Console().print(found.text, found.rows, found.exceeded())
