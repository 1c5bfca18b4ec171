"""The textbook form, and its agreement with the wrapper."""

import copy

import pytest
import torch
from torch import nn

import powerprop as pp
from nets import batch, net, train, weights


@pytest.mark.parametrize("alpha", [1.0, 1.125, 1.5, 2.0, 3.0, 4.0])
def test_function_is_kept_and_fold_restores_plain_weights(alpha: float) -> None:
    model = net()
    x, _ = batch(0)
    before, keys = model(x), list(model.state_dict())
    pp.reparametrize(model, alpha)
    assert torch.allclose(model(x), before, atol=1e-5)
    assert "0.parametrizations.weight.original" in model.state_dict()
    pp.fold(model)
    assert sorted(model.state_dict()) == sorted(keys)
    assert torch.allclose(model(x), before, atol=1e-5)


@pytest.mark.parametrize("alpha", [1.0, 1.125, 1.3, 1.5, 2.0, 3.0])
def test_equals_the_wrapper_for_plain_sgd_over_100_steps(alpha: float) -> None:
    textbook, wrapped = net().double(), net().double()
    pp.reparametrize(textbook, alpha)
    for model, optimizer in (
        (textbook, torch.optim.SGD(textbook.parameters(), lr=0.05)),
        (wrapped, pp.Powerprop(torch.optim.SGD(wrapped.parameters(), lr=0.05), wrapped, alpha=alpha, rate="paper")),
    ):
        for step in range(100):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.double()), y).backward()
            optimizer.step()
    pp.fold(textbook)
    for name, weight in weights(wrapped).items():
        assert torch.allclose(weights(textbook)[name], weight, rtol=1e-6, atol=1e-9), name


def test_gradients_at_zero_are_finite() -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[0].zero_()  # type: ignore[index,union-attr,operator]
    pp.reparametrize(model, 1.5)
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), 5)
    assert all(loss == loss for loss in losses)
    pp.fold(model)
    assert not model[0].weight[0].any()  # type: ignore[index,union-attr,operator]


@pytest.mark.filterwarnings("ignore:not chosen as weights")
def test_other_parametrisations_are_left_alone_by_fold() -> None:
    model = net()
    nn.utils.parametrizations.weight_norm(model[0])
    pp.reparametrize(model, 2.0)
    pp.fold(model)
    assert nn.utils.parametrize.is_parametrized(model[0])
    assert not nn.utils.parametrize.is_parametrized(model[2])


def test_deepcopy() -> None:
    model = pp.reparametrize(net(), 2.0)
    x, _ = batch(0)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"alpha must be a finite number >= 1, got 0\.9"):
        pp.reparametrize(net(), 0.9)
    model = net()
    nn.init.zeros_(model[4].weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'4\.weight' is all zero"):
        pp.reparametrize(model, 2.0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"'1\.weight' and '0\.weight' are one weight: use Powerprop"):
        pp.reparametrize(model, 2.0)
    assert "Power" in repr(pp.reparametrize(net(), 2.0))
