"""The price of Powerprop: the time of a training step as a ratio to the plain optimiser's, side by side.

    OMP_NUM_THREADS=1 python benchmarks/step.py [--quick]

"kernel" is `pp.Powerprop` as it comes, "torch" the same without the kernel (as on a machine without a compiler),
"textbook" the `torch.nn.utils.parametrize` form (`pp.reparametrize`), "notebook" the formula as the paper's notebook
writes it, w = v·|v|^(α-1) inside the layer, under autograd. LeNet-300-100 at batch 60 is the worst
case: the weights outweigh the activations. In the other networks the passes take hundreds of times longer than what is
measured and vary by more than it, so that what differs (the optimiser's step, and for the last two ways the weight's
computation and its gradient) is timed apart and set against a whole plain step. The exit code is 1 if a limit is
exceeded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import lru_cache

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import powerprop as pp
from parts import Part
from powerprop import kernel
from powerprop_paper.models import conv6, lenet_300_100, mlp, resnet20, resnet50
from timing import best_times

INTEGER, FRACTIONAL = (2.0, 3.0, 4.0, 5.0), (1.125, 1.25, 1.375, 1.5, 1.75)
FEW = (2.0, 1.375)
WAYS = ("kernel", "torch", "textbook", "notebook")
BASES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3),
    "SGD fused": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, fused=True),
    "SGD momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9),
    "Nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-5),
    "Adam fused": lambda m: torch.optim.Adam(m.parameters(), lr=1e-5, fused=True),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-5),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-5),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-5),
}
LIMITS = {"kernel": (1.10, 1.20), "torch": (1.3, 1.8)}
"""Of a step on a perceptron, for α = 2 and for other powers."""


class Transformer(nn.Module):
    """Four layers of an encoder, classified by the mean of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x).mean(1))


PERCEPTRONS = ("LeNet-300-100", "784-1000-1000-10")
NETS: dict[str, tuple[Callable[[torch.Generator], nn.Module], tuple[int, ...]]] = {
    "LeNet-300-100": (lambda g: lenet_300_100(generator=g), (60, 784)),
    "784-1000-1000-10": (lambda g: mlp((784, 1000, 1000, 10), generator=g), (64, 784)),
    "Conv-6": (lambda g: conv6(generator=g), (60, 3, 32, 32)),
    "ResNet-20": (lambda g: resnet20(generator=g), (60, 3, 32, 32)),
    "transformer": (lambda g: Transformer(), (32, 64, 128)),
    "ResNet-50": (lambda g: resnet50(generator=g), (32, 3, 224, 224)),
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


def optimizer_of(model: nn.Module, base: str, way: str, alpha: float) -> torch.optim.Optimizer:
    """Plain, or one of the ways to train with α; the last two change the model."""
    if way == "textbook":
        pp.reparametrize(model, alpha)
    elif way == "notebook":
        notebook(model, alpha)
    elif way in ("kernel", "torch"):
        optimizer = pp.Powerprop(BASES[base](model), model, alpha=alpha)
        return optimizer if way == "kernel" else without_kernel(optimizer)
    return BASES[base](model)


def without_kernel(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimiser, whose steps find no kernel."""
    take = optimizer.step

    def step() -> None:
        found, kernel._loaded = kernel._loaded, lambda: (None, "torch: for comparison")  # type: ignore[assignment]
        try:
            take()
        finally:
            kernel._loaded = found

    optimizer.step = step  # type: ignore[assignment,method-assign]
    return optimizer


def variants(net: str, base: str, ways: tuple[str, ...], alphas: tuple[float, ...]) -> dict[str, Callable[[], object]]:
    """Every way to take a step, by name."""
    make, shape = NETS[net]
    found = {}
    for name, way, alpha in [("plain", "plain", 1.0), *((f"{w} {a:g}", w, a) for a in alphas for w in ways)]:
        model = make(torch.Generator().manual_seed(0))
        found[name] = stepper(model, optimizer_of(model, base, way, alpha), shape)
    return found


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """What a step does besides the passes, on gradients of the plain weights that stay the same.

    Where the weight is computed from a parameter, that and the way back are part of it.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.empty_like(like).normal_(0, 1e-3, generator=generator)

    computed = [m for m in model.modules() if parametrize.is_parametrized(m, "weight")]
    grads = [noise(m.weight.detach()) for m in computed]  # type: ignore[union-attr,arg-type]
    for p in model.parameters():
        p.grad = noise(p)

    def step() -> None:
        if computed:
            optimizer.zero_grad()
            torch.autograd.backward([m.weight for m in computed], grads)  # type: ignore[misc]
        optimizer.step()

    return step


def apart(net: str, base: str, alphas: tuple[float, ...], rounds: int) -> dict[str, float]:
    """Seconds of a whole plain step, and of steps with the differences of the updates added to it."""
    make, _ = NETS[net]
    steps = {}
    for name, way, alpha in [("plain", "plain", 1.0), *((f"{w} {a:g}", w, a) for a in alphas for w in WAYS)]:
        model = make(torch.Generator().manual_seed(0))
        steps[name] = update(model, optimizer_of(model, base, way, alpha))
    times = best_times(steps, rounds, calls=1, warm=1)
    plain = plain_step(net, base)
    return {name: plain + seconds - times["plain"] for name, seconds in times.items()}


@lru_cache
def plain_step(net: str, base: str) -> float:
    """Seconds of a whole step of the plain optimiser; the passes of ResNet-50 take so long that two must do."""
    calls = {"plain": variants(net, base, (), ())["plain"]}
    return best_times(calls, 1 if net == "ResNet-50" else 4, calls=1)["plain"]


def perceptron_part(net: str, base: str, quick: bool = False) -> Part:
    """A perceptron: all ways, all of the paper's α."""
    alphas = INTEGER + FRACTIONAL
    times = best_times(variants(net, base, WAYS, alphas), 30 if quick else 150, calls=1, warm=1)
    rows = [(f"α = {a:g}", [times[f"{way} {a:g}"] / times["plain"] for way in WAYS]) for a in alphas]
    limits = {f"α = {a:g} | {way}": both[a != 2] for way, both in LIMITS.items() for a in alphas if a <= 3}
    title = f"A step of {net}, batch {NETS[net][1][0]}, {base}"
    text = f"Times the plain optimiser's step of {times['plain'] * 1e3:.2f} ms."
    return Part(f"{net.split('-')[0].lower()}-{base.lower().replace(' ', '-')}", title, text, WAYS, rows, limits=limits)


def networks_part(quick: bool = False) -> Part:
    """Networks whose activations outweigh the weights."""
    rows, limits, said = [], {}, []
    for net in ("transformer",) if quick else ("Conv-6", "ResNet-20", "transformer", "ResNet-50"):
        for base in ("SGD", "SGD momentum", "AdamW") if net != "ResNet-50" else ("SGD momentum",):
            times = apart(net, base, FEW, 3 if quick or net == "ResNet-50" else 15)
            said.append(f"{net} with {base} {times['plain'] * 1e3:,.0f} ms")
            for alpha in FEW:
                label = f"{net}, {base}, α = {alpha:g}"
                rows.append((label, [times[f"{way} {alpha:g}"] / times["plain"] for way in WAYS]))
                limits[f"{label} | kernel"] = 1.03
    text = (
        "Batches of 60 (transformer and ResNet-50: 32). Updates timed apart and set against a whole plain step: "
        + "; ".join(said)
        + "."
    )
    return Part("networks", "A step of other networks", text, WAYS, rows, limits=limits, zoom=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, LeNet under SGD and the transformer alone")
    failures: list[str] = []
    quick = parser.parse_args().quick
    bases = ("SGD",) if quick else BASES
    perceptrons = [perceptron_part(net, base, quick) for net in PERCEPTRONS for base in bases]
    for part in [*perceptrons, networks_part(quick)]:
        Console().print(f"{part.title}: {part.text}")
        for label, values in part.rows:
            shown = "  ".join(f"{c} {v:.3f}x" for c, v in zip(part.columns, values, strict=True) if v is not None)
            Console().print(f"  {label:32} {shown}")
        failures += part.exceeded()
    Console().print("all within the limits" if not failures else "\n".join(failures))
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
