"""Networks of eight weights a layer, for sparse-training methods worked out by hand."""

import pytest
import torch
from torch import Tensor, nn

import powerprop as pp
from powerprop.sparsify import Method

every_alpha = pytest.mark.parametrize("alpha", [1.0, 2.0])
KAST = [0.1, -0.8, 0.2, 0.7, -0.3, 0.6, 0.4, -0.5]  # top two: 1, 3; top four: 1, 3, 5, 7


class Rows(nn.Module):
    """Layers of eight weights each, named a, b, ..."""

    def __init__(self, **rows: list[float]) -> None:
        super().__init__()
        for name, row in rows.items():
            layer = nn.Linear(8, 1, bias=False)
            with torch.no_grad():
                layer.weight.copy_(torch.tensor([row]))
            self.add_module(name, layer)

    def __getitem__(self, name: str) -> Tensor:
        return self.get_parameter(f"{name}.weight")


def sgd(model: nn.Module, method: Method, alpha: float = 1.0, momentum: float = 0.0) -> pp.Powerprop:
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return pp.Powerprop(base, model, alpha, sparsify=method, rate="paper")


def put(model: Rows, optimizer: pp.Powerprop, **rows: list[float]) -> None:
    """Choose weights, and make those that are not zero the mask."""
    optimizer.set_masks()
    with torch.no_grad():
        for name, row in rows.items():
            model[name].copy_(torch.tensor([row]))
    masks = {f"{n}.weight": torch.tensor([row]) != 0 for n, row in rows.items()}
    optimizer.set_masks(masks, masks, keep=False)


def push(model: Rows, optimizer: pp.Powerprop, **grads: list[float]) -> None:
    """One step with these gradients."""
    for name, grad in grads.items():
        model[name].grad = torch.tensor([grad])
    optimizer.step()


def on(optimizer: pp.Powerprop, name: str = "a") -> list[int]:
    """Which weights are active."""
    return optimizer.active[f"{name}.weight"].flatten().nonzero().flatten().tolist()
