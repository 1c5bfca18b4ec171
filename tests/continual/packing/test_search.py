"""The search for the sparsest sub-network: by hand, against each other, and on a network whose answer is known."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from powerprop.continual import GRID, EfficientPackNet, make_task, sparsest
from powerprop.continual.packing.efficient import around, binary, check_grid, linear, loss_increase, removal_costs
from tasks import Scored, learner, toy_model, toy_task


def counted(last: int) -> tuple[Callable[[int], bool], list[int]]:
    asked: list[int] = []

    def passes(i: int) -> bool:
        asked.append(i)
        return i <= last

    return passes, asked


def test_the_grid_is_the_papers() -> None:
    assert GRID[:8] == (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25)
    assert GRID[8:12] == (0.2, 0.15, 0.14, 0.13)
    assert GRID[-2:] == (0.02, 0.01)
    assert len(check_grid(GRID)) == 24


@given(count=st.integers(1, 60), last=st.integers(-1, 59), guess=st.integers(-5, 70))
def test_searches_agree_where_performance_falls_steadily(count: int, last: int, guess: int) -> None:
    expected = min(last, count - 1)
    passes, asked = counted(last)
    assert linear(passes, count) == expected
    assert asked == list(range(min(expected + 2, count)))
    passes, asked = counted(last)
    assert binary(passes, count) == expected
    assert len(asked) <= count.bit_length()
    passes, asked = counted(last)
    assert around(passes, count, guess) == expected
    assert len(asked) == len(set(asked))


def test_a_good_guess_takes_two_evaluations() -> None:
    for guess in (10, 11):
        passes, asked = counted(10)
        assert around(passes, 24, guess) == 10
        assert len(asked) == 2


class FewWeights(nn.Module):
    """10 of 100 weights decide the class; the rest is small."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(50, 2, bias=False)
        with torch.no_grad():
            self.fc.weight.fill_(1e-4)
            self.fc.weight[0, :5] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
            self.fc.weight[1, :5] = -self.fc.weight[0, :5]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


@pytest.mark.parametrize("search", ["linear", "binary", "taylor"])
@pytest.mark.parametrize("distribution", ["global", "uniform"])
def test_finds_the_right_sparsity(search: str, distribution: str) -> None:
    # One-hot inputs: input i is classified correctly only if weight (0, i) or (1, i) is kept. Every fifth of the
    # pairs (weights 5, 4, 3, 2, 1) is needed for 100%; with γ = 0.79 four of five inputs must be right.
    x = torch.eye(50)[:5].repeat(40, 1)
    y = torch.zeros(200, dtype=torch.long)
    grid = tuple(k / 100 for k in (50, 30, 20, 10, 8, 6, 4, 2))
    for gamma, kept in ((0.99, 10), (0.79, 8), (0.59, 6)):
        ours = EfficientPackNet(
            FewWeights(), lambda p: torch.optim.SGD(p, lr=1e-9), gamma=gamma, search=search, grid=grid,  # type: ignore[arg-type]
            distribution=distribution, steps=1, retrain_steps=0, objective=Scored(_right_side),  # type: ignore[arg-type]
        )  # fmt: skip
        ours.learn(make_task((x, y), (x, y)))
        assert ours.nets.masks.mask(0).count() == kept


def _right_side(logits: torch.Tensor, y: torch.Tensor) -> float:
    return float((logits[:, 0] > logits[:, 1] + 0.1).double().mean())


@pytest.mark.parametrize("search", ["binary", "taylor"])
def test_searches_agree_with_linear_on_real_training(search: str) -> None:
    grid = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05)
    first, second = (learner(search=s, grid=grid, steps=100) for s in ("linear", search))
    assert isinstance(second, EfficientPackNet)
    for ours in (first, second):
        ours.learn(toy_task(0))
    assert second.nets.masks.used() == pytest.approx(first.nets.masks.used(), abs=0.05)
    assert second.evaluations <= 5


def test_a_performance_below_zero_may_fall_by_its_own_fraction() -> None:
    # -1 for the dense network, then for 90%, 50% and 10% of the weights; γ = 0.7 allows for more than -1.3. The last
    # is the sub-network that was taken, once more.
    performance = iter((-1.0, -1.0, -1.25, -1.35, -1.25))
    ours = learner(
        search="linear", gamma=0.7, grid=(0.9, 0.5, 0.1), steps=2, retrain_steps=0, score=lambda *_: next(performance)
    )
    ours.learn(toy_task(0))
    assert ours.nets.masks.used() == pytest.approx(0.5, abs=0.01)


def test_removal_costs_of_a_quadratic_by_hand() -> None:
    # L = mean ½(w - y)² with y = ±1 evenly: ∂L/∂w = w - y, of mean w = 2 and variance 1
    w = nn.Parameter(torch.tensor([2.0]))
    generator = torch.Generator().manual_seed(0)
    y = 2 * torch.randint(0, 2, (2000, 8), generator=generator).double() - 1
    costs = removal_costs({"w": w}, ((0.5 * (w - batch).square().mean(), 8) for batch in y))
    assert float(costs["w"]) == pytest.approx(-2 * 2 + 0.5 * 1 * 4, rel=0.05)


def test_the_search_knows_a_performance_and_nothing_else() -> None:
    asked: list[float] = []

    def performance(kept: float) -> float:
        asked.append(kept)
        return {0.9: 0.95, 0.5: 0.91, 0.1: 0.2}[kept]

    assert sparsest(performance, 1.0, (0.9, 0.5, 0.1), 0.9, "linear") == (1, 3)
    assert asked == [0.9, 0.5, 0.1]
    assert sparsest(performance, 1.0, (0.9, 0.5, 0.1), 0.9, "taylor", guess=1).place == 1
    assert sparsest(performance, 1.0, (0.9, 0.5, 0.1), 0.99).place == -1
    with pytest.raises(ValueError, match="search must be one of linear, binary, taylor, got 'guess'"):
        sparsest(performance, 1.0, (0.9,), 0.9, "guess")


def test_loss_increase_sums_the_costs_of_the_smallest() -> None:
    costs = {"a": torch.tensor([1.0, 2.0, 4.0, 8.0]), "b": torch.tensor([16.0, 32.0, 64.0, 128.0])}
    scores = {"a": torch.tensor([1.0, 2.0, 3.0, 4.0]), "b": torch.tensor([0.5, 5.0, 6.0, 7.0])}
    assert loss_increase(costs, scores, (1.0, 0.75, 0.5), layerwise=False) == [0.0, 17.0, 23.0]
    assert loss_increase(costs, scores, (1.0, 0.75, 0.5), layerwise=True) == [0.0, 17.0, 51.0]


def test_layerwise_keeps_the_same_fraction_of_each_layer() -> None:
    ours = learner(distribution="uniform", grid=(0.25,), gamma=0.5, model=toy_model(width=40))
    ours.learn(toy_task(0))
    for mask in ours.nets.masks.mask(0).values():
        assert float(mask.double().mean()) == pytest.approx(0.25, abs=0.01)
