"""Masked training steps and mask updates against `torch.nn.utils.prune` and `torch.ao.pruning`.

    OMP_NUM_THREADS=1 python benchmarks/masks.py [--quick]

SGD with momentum at 90% sparsity. A step between mask updates, as a ratio to the plain optimiser's; and what one mask
update by magnitude takes, layer by layer, in plain steps. Both libraries compute the masked weight anew in every
forward pass, under autograd; ours holds it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from torch import nn
from torch.ao.pruning import WeightNormSparsifier
from torch.nn.utils import prune

import powerprop as pp
from parts import Part
from powerprop_paper.models import lenet_300_100
from sparsifiers import METHODS, NEVER
from step import BASES, stepper
from timing import best_times

SHAPE = (60, 784)
LIMITS = {"Top-KAST, dense backward": 1.15, "Top-KAST, 50% backward": 1.15}


def fresh() -> nn.Module:
    return lenet_300_100(generator=torch.Generator().manual_seed(0))


def layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def pruned() -> tuple[nn.Module, Callable[[], object]]:
    """`torch.nn.utils.prune`: the mask is updated by pruning a dense copy again."""
    model = fresh()
    for layer in layers(model):
        prune.l1_unstructured(layer, "weight", 0.9)

    def update() -> None:
        for layer in layers(model):
            dense = layer.weight_orig
            layer.weight_mask.copy_(prune.L1Unstructured(0.9).compute_mask(dense, torch.ones_like(dense)))

    return model, update


def sparsified() -> tuple[nn.Module, Callable[[], object]]:
    """`torch.ao.pruning`: single weights, by their size."""
    model = fresh()
    sparsifier = WeightNormSparsifier(0.9, sparse_block_shape=(1, 1), zeros_per_block=1)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    sparsifier.prepare(model, [{"tensor_fqn": f"{name}.weight"} for name in names])
    sparsifier.step()
    return model, sparsifier.step


def ours(name: str, alpha: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fresh()
    return model, pp.Powerprop(BASES["SGD momentum"](model), model, alpha, sparsify=METHODS[name](NEVER))


def step_part(quick: bool = False) -> Part:
    """Every sparsifier and the two libraries."""
    base = BASES["SGD momentum"]
    models = {"plain": fresh(), "torch.nn.utils.prune": pruned()[0], "torch.ao.pruning": sparsified()[0]}
    steps = {name: stepper(model, base(model), SHAPE) for name, model in models.items()}
    names = list(METHODS)
    for name in names:
        for alpha in (1.0, 2.0):
            steps[f"{name} {alpha:g}"] = stepper(*ours(name, alpha), SHAPE)
    times = best_times(steps, 40 if quick else 250, calls=1, warm=1)
    ratio = {name: seconds / times["plain"] for name, seconds in times.items()}
    rows = [(name, [ratio[f"{name} 1"], ratio[f"{name} 2"]]) for name in names]
    rows += [(name, [ratio[name], None]) for name in ("torch.nn.utils.prune", "torch.ao.pruning")]
    limits = {f"{name} | {column}": LIMITS.get(name, 1.10) for name in names for column in ("α = 1", "α = 2")}
    text = f"LeNet-300-100, batch 60, SGD with momentum, 90% sparse; a plain step takes {times['plain'] * 1e3:.2f} ms."
    return Part("masked-step", "A masked step", text, ("α = 1", "α = 2"), rows, limits=limits)


def update_part(quick: bool = False) -> Part:
    """One mask update by magnitude."""
    plain = fresh()
    model, optimizer = ours("Top-KAST, dense backward", 1.0)
    assert isinstance(optimizer, pp.Powerprop)
    stepper(model, optimizer, SHAPE)()
    steps = {
        "plain": stepper(plain, BASES["SGD momentum"](plain), SHAPE),
        "ours (Top-KAST)": lambda: optimizer.sparsify.refresh(optimizer),  # type: ignore[union-attr]
        "torch.nn.utils.prune": pruned()[1],
        "torch.ao.pruning": sparsified()[1],
    }
    times = best_times(steps, 5 if quick else 40, calls=1, warm=1)
    rows = [(name, [seconds / times["plain"]]) for name, seconds in times.items() if name != "plain"]
    text = "The largest tenth of each layer of LeNet-300-100, in plain steps at batch 60."
    limits = {"ours (Top-KAST) | plain steps": 2.5}
    return Part("mask-update", "A mask update", text, ("plain steps",), rows, limits=limits, axis="plain steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    for part in (step_part(quick), update_part(quick)):
        Console().print(part.title, part.rows, part.exceeded())
