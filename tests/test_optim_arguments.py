"""Which weights get α, parameter groups, and arguments that are refused."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import powerprop as pp
from nets import net, same, train, weights, wrap
from sparse import METHODS


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


@pytest.mark.parametrize("bad", [0.5, float("nan"), -2, None, "2", [2.0], "two"])
def test_a_bad_alpha(bad: Any) -> None:
    for refuse in (lambda: wrap(net(), alpha=bad), lambda: pp.reparametrize(net(), bad)):
        with pytest.raises((TypeError, ValueError)) as error:
            refuse()
        assert f"alpha must be a finite number >= 1, got {bad!r}" in str(error.value)


@pytest.mark.parametrize(("bad", "shown"), [(3, "3"), ([3], r"\[3\]"), (2.5, "2.5"), (["0.weight", None], r".*None\]")])
def test_a_where_that_chooses_nothing_anyone_could_mean(bad: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=rf"where must be a name pattern, several, or a predicate of .*, got {shown}$"):
        wrap(net(), where=bad)


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


# --- α is a hyperparameter ------------------------------------------------------------------------------------------


def test_alpha_stands_in_every_group_and_may_change_at_any_step() -> None:
    model, other = net(), net()
    optimizer = wrap(model, "sgd", 2.0)
    assert [group["alpha"] for group in optimizer.param_groups] == [2.0]
    optimizer.param_groups[0]["alpha"] = 3.0
    train(model, optimizer, 3)
    train(other, wrap(other, "sgd", 3.0), 3)
    assert same(model, other)
    before = weights(model)
    optimizer.set_alpha(1.0)
    assert all(torch.equal(model.state_dict()[n], w) for n, w in before.items())
    train(model, optimizer, 3)
    train(other, torch.optim.SGD(other.parameters(), lr=optimizer.param_groups[0]["lr"]), 3)
    assert same(model, other)


@pytest.mark.parametrize("bad", [0.5, float("nan"), "2", None])
def test_a_bad_alpha_later_is_refused_and_changes_nothing(bad: Any) -> None:
    model = net()
    optimizer = wrap(model, "momentum", 2.0)
    train(model, optimizer, 1)
    before = weights(model)
    with pytest.raises((TypeError, ValueError), match="alpha must be a finite number >= 1, got"):
        optimizer.set_alpha(bad)
    assert optimizer.param_groups[0]["alpha"] == 2.0
    optimizer.param_groups[0]["alpha"] = bad
    with pytest.raises((TypeError, ValueError), match="alpha must be a finite number >= 1, got .* for 'group 0'"):
        train(model, optimizer, 1)
    assert all(torch.equal(model.state_dict()[n], w) for n, w in before.items())


def test_a_layer_of_zeros_when_alpha_leaves_one_is_an_error_that_names_it() -> None:
    model = net()
    nn.init.zeros_(model[4].weight)  # type: ignore[arg-type]
    optimizer = wrap(model, alpha=1.0)
    with pytest.raises(ValueError, match=r"'4\.weight' is all zero: φ = 0 is a fixed point for alpha = 2 > 1"):
        optimizer.set_alpha(2.0)
    assert optimizer.param_groups[0]["alpha"] == optimizer.alpha == 1.0
    before = weights(model)
    optimizer.param_groups[0]["alpha"] = 2.0
    with pytest.raises(ValueError, match=r"'4\.weight' is all zero"):
        train(model, optimizer, 1)
    assert all(torch.equal(model.state_dict()[n], w) for n, w in before.items())
    optimizer.param_groups[0]["alpha"] = 1.0
    train(model, optimizer, 2)
    optimizer.set_alpha(2.0)
    train(model, optimizer, 1)


@pytest.mark.parametrize("base", ["sgd", "momentum", "adam"])
def test_a_schedule_of_alpha_goes_on_where_it_was_saved(base: str) -> None:
    def scheduled(model: nn.Module, optimizer: pp.Powerprop, start: int, stop: int) -> None:
        for step in range(start, stop):
            optimizer.param_groups[0]["alpha"] = 1 + step / 10
            train(model, optimizer, 1, start=step)

    straight = net()
    scheduled(straight, wrap(straight, base, 1.0), 0, 20)
    model = net()
    optimizer = wrap(model, base, 1.0)
    scheduled(model, optimizer, 0, 11)
    again = net()
    resumed = wrap(again, base, 3.0)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["alpha"] == 2.0
    scheduled(again, resumed, 11, 20)
    assert same(straight, again)


def test_what_grew_at_zero_moves_when_alpha_leaves_one() -> None:
    model = net(hidden=20)
    optimizer = wrap(model, "sgd", 1.0, sparsify=pp.RigL(sparsity=0.8, steps=100, interval=5))
    train(model, optimizer, 5)  # the fifth step is a mask update
    grown = {n: mask & (model.get_parameter(n) == 0) for n, mask in optimizer.active.items()}
    assert all(mask.any() for mask in grown.values())
    optimizer.set_alpha(2.0)
    train(model, optimizer, 1, start=5)
    assert not any((model.get_parameter(n)[mask] == 0).any() for n, mask in grown.items())
    assert optimizer.active.count() == sum((p != 0).sum() for n, p in model.named_parameters() if n in grown)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 3.0])
def test_slope_is_the_derivative_of_psi(alpha: float) -> None:
    model = net()
    optimizer = wrap(model, "sgd", alpha)
    train(model, optimizer, 3)
    for name, weight in ((n, model.get_parameter(n).detach()) for n in optimizer.masters):
        wanted = alpha * weight.abs() ** (1 - 1 / alpha)  # α|φ|^(α-1) with |φ| = |w|^(1/α)
        assert torch.allclose(optimizer.slope(name), wanted, rtol=1e-4)
        assert optimizer.slope(name).shape == weight.shape
    with torch.no_grad():
        model[0].weight.mul_(2)  # type: ignore[union-attr,operator]
    assert torch.allclose(optimizer.slope("0.weight"), alpha * model[0].weight.abs() ** (1 - 1 / alpha), rtol=1e-4)  # type: ignore[union-attr,operator]
    with pytest.raises(KeyError, match="no weight 'nope' here; there are 0.weight, 2.weight, 4.weight"):
        optimizer.slope("nope")


# --- refusals leave no trace ----------------------------------------------------------------------------------------


def test_a_layer_of_zeros_leaves_the_other_layers_alone() -> None:
    model = net()
    nn.init.zeros_(model[4].weight)  # type: ignore[arg-type]
    before = weights(model)
    for refuse in (lambda: wrap(model, alpha=1.375), lambda: pp.reparametrize(model, 1.375)):
        with pytest.raises(ValueError, match=r"'4\.weight' is all zero"):
            refuse()
        assert list(model.state_dict()) == list(before)
        assert all(torch.equal(model.state_dict()[n], w) for n, w in before.items())
    assert len(wrap(model, alpha=1.0).masters) == 3


def test_a_mask_that_does_not_fit_leaves_all_weights_and_masks() -> None:
    model = net()
    optimizer = wrap(model)
    masks = dict(pp.magnitude_masks(model, 0.5))
    before, active = weights(model), optimizer.active
    for bad in (masks["4.weight"].float(), masks["4.weight"][:2], [[True]]):
        for given in ({"active": {**masks, "4.weight": bad}}, {"active": masks, "trainable": {"4.weight": bad}}):
            with pytest.raises((ValueError, TypeError), match=r"a mask for '4\.weight' must be a bool tensor"):
                optimizer.set_masks(**given)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match=r"masks for \['7\.weight'\], but the weights here are \['0\.weight'"):
        optimizer.set_masks({"7.weight": masks["0.weight"]})
    assert optimizer.active == active
    assert all(torch.equal(model.state_dict()[n], w) for n, w in before.items())


# --- other people's optimisers --------------------------------------------------------------------------------------


class NoRate(torch.optim.Optimizer):
    """An optimiser that sets its own pace."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("method", [None, *(m for m in METHODS if not m.startswith("topkast"))])
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_an_optimiser_without_a_learning_rate(method: str | None, alpha: float) -> None:
    models = net(hidden=20), net(hidden=20)
    for model, base in zip(models, (NoRate, lambda p: torch.optim.SGD(p, lr=0.1)), strict=True):
        sparsify = None if method is None else METHODS[method](sparsity=0.5, steps=20)
        optimizer = pp.Powerprop(base(model.parameters()), model, alpha, sparsify=sparsify)  # type: ignore[no-untyped-call]
        train(model, optimizer, 15)
        again = pp.Powerprop(
            base(model.parameters()),  # type: ignore[no-untyped-call]
            model,
            alpha,
            sparsify=None if method is None else METHODS[method](sparsity=0.5, steps=20),
        )
        again.load_state_dict(optimizer.state_dict())
    assert same(*models)


def test_a_decay_by_the_learning_rate_needs_one() -> None:
    model = net()
    message = r"TopKAST\(decay=0\.01\) takes lr·decay·θ off at each step, but the base optimiser NoRate has no 'lr'"
    with pytest.raises(ValueError, match=message):
        pp.Powerprop(NoRate(model.parameters()), model, sparsify=pp.TopKAST(0.5, decay=0.01))
    train(model, pp.Powerprop(NoRate(model.parameters()), model, sparsify=pp.TopKAST(0.5, decay=0)), 5)


# --- many layers ----------------------------------------------------------------------------------------------------


def timed(layers: int, method: Callable[[], pp.RigL] | None) -> tuple[float, float]:
    """Seconds of this process to wrap so many layers, one group each, and to take five steps."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers)))
    base = torch.optim.SGD([{"params": [p], "lr": 0.1} for p in model.parameters()], lr=0.1, momentum=0.9)
    start = time.process_time()
    optimizer = pp.Powerprop(base, model, 2.0, sparsify=method and method())
    wrapping = time.process_time() - start
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    start = time.process_time()
    for _ in range(5):
        optimizer.step()
    return wrapping, time.process_time() - start


@pytest.mark.parametrize("method", [None, lambda: pp.RigL(0.5, steps=100, interval=5)])
def test_wrapping_and_stepping_are_linear_in_the_number_of_layers(method: Callable[[], pp.RigL] | None) -> None:
    timed(10, method)
    few, many = (timed(layers, method) for layers in (125, 1000))
    # Eight times as many layers: what is quadratic takes 64 times as long.
    assert many[0] < 24 * few[0] + 0.1
    assert many[1] < 24 * few[1] + 0.1
