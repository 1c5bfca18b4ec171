"""Which method for a model and a goal: the settings, what was measured with them, and the lines of code.

    powerprop advise model.py:build --goal "faster inference"

What is said to be expected was measured by the experiments of `powerprop_paper`; each sentence names the page of its
numbers, where a test finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from powerprop.checks import nothing_chosen
from powerprop.select import select

__all__ = ["GOALS", "Advice", "advise"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
SMALL = 100_000
"""Weights of a layer below which sparse products gain little: Python's part outweighs them."""


class Shape(NamedTuple):
    """What of a model decides."""

    weights: int
    convolutional: float
    attention: bool
    norms: bool
    large: float

    def __str__(self) -> str:
        kind = "a transformer" if self.attention else "convolutional" if self.convolutional > 0.5 else "linear layers"
        return f"{self.weights:,} weights, {kind}{', batch norm' if self.norms else ''}"


@dataclass(frozen=True)
class Advice:
    """What to do with a model, and what to expect of it.

    method: in a few words. why: the reasons. expect: what was measured, where. code: lines to paste.
    """

    goal: str
    model: str
    method: str
    why: tuple[str, ...]
    expect: tuple[str, ...]
    code: str

    def __str__(self) -> str:
        lines = [f"{self.model}; goal: {self.goal}", "", f"Take {self.method}.", ""]
        lines += [f"- {reason}" for reason in self.why]
        lines += ["", "Measured:", *(f"- {each}" for each in self.expect), "", self.code]
        return "\n".join(lines)


def shape_of(model: nn.Module) -> Shape:
    """Count the weights, by the layers that hold them."""
    chosen = select(model, None)
    if not chosen:
        raise ValueError(nothing_chosen(model, None))
    modules = dict(model.named_modules())
    holders = {name: modules[name.rpartition(".")[0]] for name in chosen}
    count = sum(p.numel() for p in chosen.values())
    of = {name: p.numel() / count for name, p in chosen.items()}
    attention = any(isinstance(m, nn.MultiheadAttention) or "attn" in n.lower() for n, m in modules.items())
    return Shape(
        weights=count,
        convolutional=sum(of[name] for name, layer in holders.items() if isinstance(layer, CONVOLUTIONS)),
        attention=attention or any("attention" in type(m).__name__.lower() for m in modules.values()),
        norms=any(isinstance(m, NORMS) for m in modules.values()),
        large=sum(of[n] for n, p in chosen.items() if isinstance(holders[n], nn.Linear) and p.numel() >= SMALL),
    )


def advise(model: nn.Module, goal: str) -> Advice:
    """The method for a model and a goal, with its settings and what was measured with them.

    model: its layers decide about powers and sparsities; nothing is trained.
    goal: one of `GOALS`.
    """
    if goal not in GOALS:
        raise ValueError(f"goal must be one of {', '.join(map(repr, GOALS))}, got {goal!r}")
    shape = shape_of(model)
    method, why, expect, code = GOALS[goal](shape)
    return Advice(goal, str(shape), method, why, expect, code.strip("\n"))


Parts = tuple[str, tuple[str, ...], tuple[str, ...], str]


def _power(shape: Shape) -> float:
    return 1.5 if shape.convolutional > 0.5 else 2.0


def _training(shape: Shape, sparsify: str = "") -> str:
    arguments = f"model, alpha={_power(shape)}" + (f", sparsify={sparsify}" if sparsify else "")
    return (
        "import torch, powerprop as pp\n\n"
        "base = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)   # yours, at its own learning rate\n"
        f"optimizer = pp.Powerprop(base, {arguments})\n"
        "train(model, optimizer)                                            # your loop\n"
    )


def _smaller(shape: Shape) -> Parts:
    expect = (
        "LeNet-300-100 on MNIST, 70 kB for 1,067 kB: 89.6% accuracy, 64.3% without Powerprop (docs/evidence.md)",
        "a CIFAR-10 network, 3-10% of the weights kept, batch norms recalibrated: 84.0% (α = 1.5, decay of φ), 62.5% "
        "without (docs/results/cifar-oneshot)",
    )
    code = _training(shape) + "pp.prune(model, 0.9, 'global')\n"
    if shape.norms:
        code += "pp.recalibrate(model, batches)                # batch norms see other activations now\n"
    why = (
        "What training makes sparse can be removed afterwards without retraining: try 0.8, 0.9 and 0.95.",
        "`pp.save` writes what is not zero: 6.3% of the dense bytes at 95% sparsity.",
    )
    return "Powerprop while you train, then prune once", why, expect, code + "pp.save(model, 'small.safetensors')\n"


def _faster(shape: Shape) -> Parts:
    why = (
        "Gradual pruning keeps the most accuracy where a given sparsity must be reached.",
        "Sparse products begin to pay at 80 to 95% sparsity; a layer stays dense where that is faster, as measured.",
    )
    expect = (
        "LeNet-300-100 on MNIST at 99% sparsity: 97.87% with Powerprop, 97.64% without (docs/results/sparse-training)",
        "784-1000-1000-10 at 95%: see docs/benchmarks.md for times by batch and sparsity; `powerprop bench-model` "
        "measures yours",
    )
    sparsify = "pp.IterativePruning(0.95, distribution='uniform', steps=10_000)"
    code = _training(shape, sparsify) + "fast = pp.export.sparse(model.eval(), example)\nprint(fast.plan)\n"
    return "gradual pruning under Powerprop, then `pp.export.sparse`", why, expect, code


def _memory(shape: Shape) -> Parts:
    if shape.large < 0.5:
        why = (
            f"Only {shape.large:.0%} of the weights are in linear layers that are large enough to be held sparsely.",
            "Sparse training keeps the count of weights fixed from the first step; the tensors stay dense.",
        )
        expect = ("RigL at 95% on CIFAR-10, five epochs: 77.2%, dense 86.2% (docs/results/sparse-training-cifar)",)
        return "RigL", why, expect, _training(shape, "pp.RigL(0.9, distribution='erk', steps=10_000)")
    why = (
        f"{shape.large:.0%} of the weights are in linear layers that can hold their active weights alone.",
        "Weights, gradients and optimiser state then have the size of what is active.",
    )
    expect = ("LeNet-300-100 on MNIST at 98%: RigL 97.5%, SET 97.8%, dense 98.5% (docs/results/sparse-training)",)
    code = _training(shape, "pp.RigL(0.95, steps=10_000)")
    at = code.index("train(model")
    held = "print(pp.sparse_compute(model, optimizer, batch=64))                 # what each layer gains\n"
    return "RigL with sparse compute", why, expect, code[:at] + held + code[at:]


def _many(shape: Shape) -> Parts:
    why = (
        "Each task gets a sub-network of its own and is answered bit for bit as it was learned.",
        "α of 1.25 to 1.5 leaves more weights to later tasks; `gamma` says how much accuracy a task may give for that.",
    )
    expect = (
        "300 permuted tasks in 784-1000-1000-10: 94.48% in 42.2% of the weights (docs/results/long-permuted-mnist-300)",
        "five tasks of Split-MNIST, task inferred from 128 images: 99.75% in 5.7% (docs/results/split-mnist)",
    )
    code = """
import torch, powerprop as pp

make = lambda params: torch.optim.SGD(params, lr=0.1)
learner = pp.EfficientPackNet(model, make, alpha=1.375, gamma=0.99, steps=1_000)
for task in tasks:                                  # (x, y), a Dataset or a DataLoader each
    learner.learn(task)
learner.predict(x, task=0).label                    # the task is known; without it, it is inferred
"""
    return "EfficientPackNet", why, expect, code


GOALS: dict[str, Callable[[Shape], Parts]] = {
    "smaller file": _smaller, "faster inference": _faster, "train within memory": _memory, "many tasks": _many,
}  # fmt: skip
