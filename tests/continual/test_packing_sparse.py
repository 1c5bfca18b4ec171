"""Retraining with the weights of the task alone: the same sub-networks and weights, in a fraction of the work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import powerprop as pp
from powerprop.sparse.linear import SparseLinear


def task(number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(200, 20, generator=torch.Generator().manual_seed(number))
    return x, (x[:, number : number + 3].sum(1) > 0).long()


class Watched(nn.Module):
    """Notes which kinds of layers it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 2))
        self.seen: set[type] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(type(self.layers[0]))
        return self.layers(x)  # type: ignore[no-any-return]


def learned(sparse: bool, prunings: int) -> tuple[Watched, pp.EfficientPackNet, list[Tensor]]:
    torch.manual_seed(0)
    model = Watched()
    learner = pp.EfficientPackNet(
        model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), alpha=1.5, gamma=0.9, steps=40, retrain_steps=30,
        prunings=prunings, pruning_steps=10, sparse=sparse,
    )  # fmt: skip
    answers = []
    for number in range(3):
        learner.learn(task(number))
        answers.append(learner.predict(task(0)[0], task=0).entropy)
    return model, learner, answers


@pytest.mark.parametrize("prunings", [0, 2])
def test_the_same_sub_networks_and_weights(prunings: int) -> None:
    dense, mine, _ = learned(False, prunings)
    sparse, other, answers = learned(True, prunings)
    assert (dense.seen, sparse.seen) == ({nn.Linear}, {nn.Linear, SparseLinear})
    assert {type(layer) for layer in sparse.layers} == {nn.Linear, nn.ReLU}
    for number in range(3):
        assert all(
            torch.equal(a, b)
            for a, b in zip(*(each.nets.masks.mask(number).values() for each in (mine, other)), strict=True)
        )
    for a, b in zip(dense.parameters(), sparse.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(answers[0], each) for each in answers)
