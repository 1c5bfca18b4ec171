"""Small task sequences and learners that the tests of continual learning share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powerprop.continual import Classification, EfficientPackNet, Naive, PackNet, Strategy, Task, make_task
from powerprop_paper.models import Heads, mlp

FEATURES, CLASSES = 12, 3

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=1e-1),
}
every_masking = pytest.mark.parametrize("method", ["packnet", "epn"])
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
both_alphas = pytest.mark.parametrize("alpha", [1.0, 1.5])


def clouds(count: int, generator: torch.Generator, centres: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.randint(0, len(centres), (count,), generator=generator)
    return centres[y] + 0.5 * torch.randn(count, centres.shape[1], generator=generator), y


def toy_task(index: int, size: int = 256) -> Task:
    """Three clouds of points at places of the task's own."""
    generator = torch.Generator().manual_seed(300 + index)
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=generator)
    test, held, train = (clouds(n, generator, centres) for n in (128, 128, size))
    first = CLASSES * index
    return make_task(train, held, test, index=index, name=f"toy {index}", classes=range(first, first + CLASSES))


def toy_model(seed: int = 0, heads: int = 0, width: int = 32, outputs: int = CLASSES) -> nn.Module:
    return mlp([FEATURES, width, width, outputs], heads=heads, generator=torch.Generator().manual_seed(seed))


class NormNet(nn.Module):
    """A network with a batch norm that keeps running statistics, a layer norm, biases and heads."""

    def __init__(self, tasks: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.fc1, self.bn = nn.Linear(FEATURES, 24), nn.BatchNorm1d(24)
        self.fc2, self.ln = nn.Linear(24, 24), nn.LayerNorm(24)
        self.out = Heads(24, CLASSES, tasks)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(1, p.shape[-1] ** -0.5, generator=generator).sub_(1 if p.ndim == 2 else 0)

    def forward(self, x: Tensor, task: int) -> Tensor:
        x = torch.relu(self.bn(self.fc1(x)))
        return self.out(nn.functional.dropout(torch.relu(self.ln(self.fc2(x))), 0.1, self.training), task)


class Scored(Classification):
    """Classification with a score of one's own, of (logits, targets)."""

    def __init__(self, function: Callable[[Tensor, Tensor], float]) -> None:
        super().__init__()
        self.function = function

    def score(self, model: Callable[[Tensor], Tensor], data: Iterable[Any], task: int) -> float:
        pairs = [(model(x), self.targets(y, task)) for x, y in data]
        return self.function(*(torch.cat(column) for column in zip(*pairs, strict=True)))


def learner(method: str = "epn", optimizer: str = "sgd", alpha: float = 1.5, seed: int = 0, **options: Any) -> Strategy:
    heads = options.pop("head_count", 0)
    model = options.pop("model", None) or toy_model(heads=heads)
    defaults: dict[str, Any] = {"alpha": alpha, "seed": seed, "steps": 60, "batch_size": 32}
    if heads:
        defaults["heads"] = "heads"
    options = {**defaults, **options}
    if "labels" in options:
        options["objective"] = Classification(options.pop("labels"))
    if "score" in options:
        options["objective"] = Scored(options.pop("score"))
    if method == "naive":
        return Naive(model, OPTIMIZERS[optimizer], **options)
    if method == "packnet":
        return PackNet(model, OPTIMIZERS[optimizer], options.pop("total_tasks", 4), **options)
    return EfficientPackNet(model, OPTIMIZERS[optimizer], **{"gamma": 0.95, **options})
