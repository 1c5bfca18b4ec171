"""Which weights get α, parameter groups, and arguments that are refused."""

from typing import Any

import pytest
import torch
from torch import nn

import powerprop as pp
from nets import net, train, weights, wrap


def test_only_weights_get_alpha_by_default() -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 4),
            "attention": nn.MultiheadAttention(4, 2),
            "conv": nn.Conv2d(2, 3, 3),
            "up": nn.ConvTranspose1d(2, 3, 3),
            "norm": nn.BatchNorm2d(3),
            "out": nn.Linear(4, 2),
        }
    )
    optimizer = wrap(model)
    wanted = {"attention.in_proj_weight", "attention.out_proj.weight", "conv.weight", "up.weight", "out.weight"}
    assert set(optimizer.masters) == wanted


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("2.*", {"2.weight", "2.bias"}),
        (["0.weight", "4.weight"], {"0.weight", "4.weight"}),
        (lambda name, p: p.ndim == 2 and p.shape[0] == 8, {"2.weight"}),
    ],
)
def test_where(where: object, wanted: set[str]) -> None:
    model = net()
    with torch.no_grad():
        model[2].bias.fill_(0.1)  # type: ignore[union-attr,operator]
    assert set(wrap(model, where=where).masters) == wanted


def test_where_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"where='encoder\.\*' matches no parameter; the model has 0\.weight"):
        wrap(net(), where="encoder.*")


@pytest.mark.parametrize(
    ("optimised", "model", "where", "message"),
    [
        (
            net(),
            net(),
            None,
            r"no weight to give alpha to: .*where=None.*: 0\.weight, 0\.bias, .*does it hold this model's",
        ),
        (nn.LSTM(2, 3), nn.LSTM(2, 3), None, r"where=None.*: weight_ih_l0, weight_hh_l0"),
        (nn.Linear(2, 3), nn.Linear(2, 3), "bias", r"where='bias'.*: weight, bias;"),
        (nn.Linear(2, 3), nn.ReLU(), None, r"no weight was chosen: .* ReLU .*; it has none;"),
    ],
)
def test_nothing_to_give_alpha_to(optimised: nn.Module, model: nn.Module, where: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pp.Powerprop(torch.optim.SGD(optimised.parameters(), lr=0.1), model, where=where)


def test_a_layer_of_zeros_is_an_error_that_names_it() -> None:
    model = net()
    nn.init.zeros_(model[4].weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'4\.weight' is all zero: φ = 0 is a fixed point for alpha = 2 > 1"):
        wrap(model)
    assert len(wrap(model, alpha=1.0).masters) == 3


@pytest.mark.parametrize("bad", [0.5, float("nan"), -2])
def test_bad_alpha(bad: float) -> None:
    with pytest.raises(ValueError, match=f"alpha must be a finite number >= 1, got {bad}"):
        wrap(net(), alpha=bad)


def test_not_an_optimizer() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got Sequential"):
        pp.Powerprop(net(), net())  # type: ignore[arg-type]


def test_lazy_layers_are_an_error_that_says_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'1\.weight' has no shape yet: run one forward pass"):
        pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_groups_have_their_own_alpha() -> None:
    model = net()
    groups = [{"params": model[0].parameters(), "alpha": 3.0}, {"params": model[2:].parameters(), "lr": 0.01}]
    optimizer = pp.Powerprop(torch.optim.SGD(groups, lr=0.1), model, alpha=2.0)
    assert {n: m.alpha for n, m in optimizer.masters.items()} == {"0.weight": 3.0, "2.weight": 2.0, "4.weight": 2.0}


def test_a_bad_alpha_names_its_group() -> None:
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2:].parameters(), "alpha": 0.5}]
    with pytest.raises(ValueError, match=r"alpha must be a finite number >= 1, got 0\.5 for 'group 1'"):
        pp.Powerprop(torch.optim.SGD(groups, lr=0.1), model)
    optimizer = pp.Powerprop(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match=r"got 0\.25 for 'group 1'"):
        optimizer.add_param_group({"params": model[4].parameters(), "alpha": 0.25})
    assert len(optimizer.param_groups) == len(optimizer.masters) == 1


def test_group_alpha_does_not_collide_with_rmsprop_s_own() -> None:
    model = net()
    groups = [{"params": list(model.parameters()), "powerprop_alpha": 3.0}]
    optimizer = pp.Powerprop(torch.optim.RMSprop(groups, alpha=0.9), model)
    assert {m.alpha for m in optimizer.masters.values()} == {3.0}
    assert optimizer.param_groups[0]["alpha"] == 0.9


def test_add_param_group() -> None:
    model = net()
    optimizer = pp.Powerprop(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.5, "alpha": 4.0})
    assert {n: m.alpha for n, m in optimizer.masters.items()} == {"0.weight": 2.0, "4.weight": 4.0}
    assert optimizer.param_groups is optimizer.base.param_groups
    assert len(optimizer.param_groups) == 2
    frozen = weights(model)["2.weight"]
    train(model, optimizer, 3)
    assert torch.equal(model[2].weight, frozen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsify": "rigl"}, r"sparsify must be a method such as RigL\(sparsity=0\.9, .*\), got 'rigl'"),
        ({"sparsify": pp.Static}, r"sparsify must be a method such as .*, got <class '.*Static'>"),
        ({"model": [1]}, "model must be a torch.nn.Module, got list"),
    ],
)
def test_arguments_of_another_kind(options: dict[str, Any], message: str) -> None:
    model = net()
    given = {"model": model, **options}
    with pytest.raises(TypeError, match=message):
        pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), **given)


def test_wrapping_twice_is_an_error() -> None:
    model = net()
    with pytest.raises(TypeError, match="this optimizer is a Powerprop already"):
        pp.Powerprop(wrap(model), model)


def test_a_generator_of_patterns_serves_every_group() -> None:
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    base = torch.optim.SGD(groups, lr=0.1)
    optimizer = pp.Powerprop(base, model, where=(n for n in ("0.weight", "2.weight")))
    assert set(optimizer.masters) == {"0.weight", "2.weight"}
