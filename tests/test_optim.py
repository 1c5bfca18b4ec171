"""Powerprop around any optimiser: the update by hand, the exact base at α = 1, and every way training loops use it."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp
from nets import BASES, batch, closing, net, same, train, weights
from powerprop.power import psi, psi_inverse
from unseen import UNSEEN

every_unseen = pytest.mark.parametrize("unseen", UNSEEN)
ALPHAS = [1.0, 1.125, 1.3, 1.5, 2.0, 3.0, 5.0]
base_and_alpha = pytest.mark.parametrize("alpha", ALPHAS)
every_base = pytest.mark.parametrize("base", BASES)


def wrap(model: nn.Module, base: str = "momentum", alpha: float = 2.0, **options: object) -> pp.Powerprop:
    return pp.Powerprop(BASES[base](list(model.parameters())), model, alpha=alpha, **options)  # type: ignore[arg-type]


def one_weight(values: list[float]) -> nn.Linear:
    layer = nn.Linear(len(values), 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([values]))
    return layer


def test_one_step_by_hand() -> None:
    # α = 2: φ = (2, -3), Δ = -lr·g = (-0.1, -0.1), φ += 2|φ|Δ = (2 - 0.4, -3 - 0.6), w = φ|φ|
    layer = one_weight([4.0, -9.0])
    optimizer = wrap(layer, "sgd", 2.0)
    layer.weight.grad = torch.ones(1, 2)
    optimizer.step()
    assert layer.weight[0].tolist() == pytest.approx([1.6**2, -(3.6**2)], rel=1e-5)


def reference(base: str, alpha: float, steps: int) -> nn.Module:
    """The update as the paper writes it, with fresh tensors and no shortcuts."""
    model = net()
    optimizer = BASES[base](list(model.parameters()))
    chosen = [m.weight for m in model if isinstance(m, nn.Linear)]
    phis = [psi_inverse(w.detach().double(), alpha) for w in chosen]
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before = [w.detach().clone() for w in chosen]
        optimizer.step()
        with torch.no_grad():
            for i, (w, old) in enumerate(zip(chosen, before, strict=True)):
                phis[i] = phis[i] + (w - old).double() * alpha * phis[i].abs() ** (alpha - 1)
                w.copy_(psi(phis[i], alpha))
    return model


@every_base
@pytest.mark.parametrize("alpha", [1.125, 1.3, 2.0, 4.0])
def test_follows_the_paper_s_update(base: str, alpha: float) -> None:
    model = net()
    train(model, wrap(model, base, alpha), 30)
    wanted = weights(reference(base, alpha, 30))
    for name, weight in weights(model).items():
        assert torch.allclose(weight, wanted[name], rtol=2e-3, atol=2e-4), name


@every_base
def test_alpha_one_is_the_base_optimiser_bit_for_bit(base: str) -> None:
    plain, wrapped = net(), net()
    losses = train(plain, BASES[base](list(plain.parameters())), 40)
    assert train(wrapped, wrap(wrapped, base, 1.0), 40) == losses
    assert same(plain, wrapped)


@every_unseen
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_moves_that_the_version_counter_does_not_show_are_taken_up(unseen: str, alpha: float) -> None:
    models = net(), net()
    for model, make in zip(models, UNSEEN[unseen], strict=True):
        train(model, pp.Powerprop(make(list(model.parameters())), model, alpha), 30)
    behind, seen = (weights(m) for m in models)
    assert all(torch.allclose(behind[n], w, rtol=1e-4, atol=1e-5) for n, w in seen.items())


@every_unseen
def test_alpha_one_is_the_base_also_without_the_version_counter(unseen: str) -> None:
    plain, wrapped = net(), net()
    make, _ = UNSEEN[unseen]
    train(plain, make(list(plain.parameters())), 20)
    train(wrapped, pp.Powerprop(make(list(wrapped.parameters())), wrapped, 1.0), 20)
    assert same(plain, wrapped)


@every_unseen
def test_half_precision_weights_move_also_without_the_version_counter(unseen: str) -> None:
    def run(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Tensor:
        layer = one_weight([4.0, -9.0, 1.0]).bfloat16()
        optimizer = pp.Powerprop(make(list(layer.parameters())), layer, 2.0)
        for step in range(10):
            layer.weight.grad = torch.tensor([[1.0, 2.0, step / 10]]).bfloat16()
            optimizer.step()
        return layer.weight.detach()

    behind, seen = (run(make) for make in UNSEEN[unseen])
    assert torch.allclose(behind, seen, rtol=1e-2)
    assert (behind < torch.tensor([4.0, -9.0, 1.0])).all()


@pytest.mark.parametrize("unseen", ["fused adam", "data", "fresh data"])
def test_grad_scaler_skips_also_without_the_version_counter(unseen: str) -> None:
    model = net()
    optimizer = pp.Powerprop(UNSEEN[unseen][0](list(model.parameters())), model, 2.0)
    train(model, optimizer, 2)
    before = weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(batch(0)[0]).sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert all(torch.equal(model.state_dict()[n], w) for n, w in before.items())


@every_unseen
def test_weights_that_the_base_no_longer_holds_stay(unseen: str) -> None:
    model = net()
    make, _ = UNSEEN[unseen]
    groups = [{"params": model[0].parameters()}, {"params": model[2:].parameters()}]
    optimizer = pp.Powerprop(make(groups), model, 1.3)  # type: ignore[arg-type]
    train(model, optimizer, 5)
    del optimizer.param_groups[1]
    before = weights(model)
    train(model, optimizer, 5, start=5)
    assert not torch.equal(model[0].weight, before["0.weight"])  # type: ignore[arg-type]
    assert all(torch.equal(model.state_dict()[n], w) for n, w in before.items() if not n.startswith("0."))


@base_and_alpha
def test_learns(alpha: float) -> None:
    model = net()
    losses = train(model, wrap(model, "sgd", alpha), 200)
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])


@pytest.mark.parametrize("alpha", [1.25, 2.0, 3.0])
def test_wrapping_keeps_the_function(alpha: float) -> None:
    model = net()
    x, _ = batch(0)
    before = model(x)
    wrap(model, alpha=alpha)
    assert torch.allclose(model(x), before, atol=1e-6)


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
        (nn.Linear(2, 3), nn.ReLU(), None, r"where=None.*: none;"),
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


def test_schedulers_act_on_the_base() -> None:
    model = net()
    optimizer = wrap(model, "sgd")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    train(model, optimizer, 1)
    scheduler.step()
    assert optimizer.base.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_closures(alpha: float) -> None:
    plain, closed = net(), net()
    train(plain, wrap(plain, "adam", alpha), 5)
    optimizer = wrap(closed, "adam", alpha)
    for step in range(5):
        assert optimizer.step(closing(closed, optimizer, *batch(step))).item() > 0
    assert same(plain, closed)


def test_lbfgs_which_calls_its_closure_many_times() -> None:
    model = net()
    optimizer = pp.Powerprop(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4), model, alpha=1.5)
    closure = closing(model, optimizer, *batch(0, 64))
    before = optimizer.step(closure).item()
    assert closure().item() < before


def test_grad_scaler() -> None:
    plain, scaled = net(), net()
    train(plain, wrap(plain, "momentum"), 10)
    optimizer = wrap(scaled, "momentum")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(10):
        x, y = batch(step)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(scaled(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    for name, weight in weights(plain).items():
        assert torch.allclose(weights(scaled)[name], weight, rtol=1e-4, atol=1e-5)


@every_base
@base_and_alpha
def test_resume_is_bit_identical(base: str, alpha: float) -> None:
    model = net()
    optimizer = wrap(model, base, alpha)
    train(model, optimizer, 20)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, 20, start=20)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = net(seed=5)
    resumed = wrap(again, base, alpha)
    resumed.load_state_dict(saved["optimizer"])
    again.load_state_dict(saved["model"])
    train(again, resumed, 20, start=20)
    assert same(model, again)


def test_state_of_a_plain_optimiser_is_taken_up() -> None:
    model = net()
    plain = BASES["momentum"](list(model.parameters()))
    train(model, plain, 5)
    optimizer = wrap(model)
    optimizer.load_state_dict(plain.state_dict())
    assert torch.equal(
        optimizer.state[model[0].weight]["momentum_buffer"],  # type: ignore[index]
        plain.state[model[0].weight]["momentum_buffer"],  # type: ignore[index]
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: wrap(net(), alpha=3.0), r"'0\.weight' was saved with alpha=3\.0, not 2\.0"),
        (lambda: wrap(net(), where="0.weight"), r"the state is of weights \['0\.weight'\], not"),
        (lambda: wrap(net(hidden=13)), r"'0\.weight' was saved with shape \(13, 6\), not \(12, 6\)"),
    ],
)
def test_foreign_state_is_refused(other: Callable[[], pp.Powerprop], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrap(net()).load_state_dict(other().state_dict())


def test_deepcopy_of_model_and_optimiser_trains_on_identically() -> None:
    model = net()
    optimizer = wrap(model, "adam", 1.5)
    train(model, optimizer, 10)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, 10, start=10)
    train(twin, twin_optimizer, 10, start=10)
    assert same(model, twin)
    assert twin_optimizer.param_groups is twin_optimizer.base.param_groups


def test_the_model_stays_plain() -> None:
    model = net()
    keys = list(model.state_dict())
    train(model, wrap(model), 3)
    assert list(model.state_dict()) == keys
    assert list(copy.deepcopy(model).state_dict()) == keys


def test_weights_changed_from_outside_are_respected() -> None:
    model = net()
    optimizer = wrap(model, "sgd")
    train(model, optimizer, 5)
    loaded = net(seed=9)
    model.load_state_dict(loaded.state_dict())
    fresh = wrap(loaded, "sgd")
    train(model, optimizer, 5, start=5)
    train(loaded, fresh, 5, start=5)
    for name, weight in weights(loaded).items():
        assert torch.allclose(weights(model)[name], weight, atol=1e-6), name


def test_pruned_weights_stay_pruned() -> None:
    model = net()
    optimizer = wrap(model, "momentum", 2.0)
    train(model, optimizer, 5)
    masks = pp.prune(model, 0.7)
    train(model, optimizer, 20, start=5)
    assert pp.Masks.nonzero(model) == masks


def test_a_moved_storage_is_followed() -> None:
    model = net()
    optimizer = wrap(model, "sgd")
    train(model, optimizer, 2)
    model[0].weight.data = model[0].weight.data.clone()  # type: ignore[union-attr]
    before = weights(model)["0.weight"]
    train(model, optimizer, 2, start=2)
    assert not torch.equal(model[0].weight, before)
    twin = net()
    train(twin, wrap(twin, "sgd"), 4)
    assert same(model, twin)


def test_parameters_without_gradient_are_left_alone() -> None:
    model = net()
    optimizer = wrap(model, "sgd")
    before = weights(model)
    model[0].weight.grad = torch.ones_like(model[0].weight)  # type: ignore[union-attr,arg-type]
    optimizer.step()
    now = weights(model)
    assert not torch.equal(now["0.weight"], before["0.weight"])
    assert all(torch.equal(now[n], before[n]) for n in before if n != "0.weight")


def test_tied_weights_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.up.weight = self.down.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.up(F.relu(self.down(x)))  # type: ignore[no-any-return]

    model = Tied()
    optimizer = wrap(model, "sgd", 2.0)
    assert list(optimizer.masters) == ["down.weight"]
    phi = psi_inverse(model.down.weight.detach(), 2.0)
    model(torch.ones(2, 4)).square().sum().backward()
    move = -0.1 * model.down.weight.grad  # type: ignore[operator]
    optimizer.step()
    assert torch.allclose(model.up.weight, psi(phi + move * 2 * phi.abs(), 2.0), atol=1e-6)
    assert model.up.weight is model.down.weight


@pytest.mark.parametrize("base", ["momentum", "adam"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_have_float32_masters(base: str, dtype: torch.dtype) -> None:
    wide, narrow = net(), net().to(dtype)
    wide.load_state_dict({n: t.float() for n, t in narrow.state_dict().items()})
    optimizers = [wrap(m, base, 2.0) for m in (wide, narrow)]
    for group in (g for o in optimizers for g in o.param_groups):
        group["lr"] *= 1e-3
    for step in range(60):
        x, y = batch(step)
        optimizers[0].zero_grad()
        F.cross_entropy(wide(x), y).backward()
        for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
            assert a.grad is not None
            b.grad = a.grad.to(dtype)
        for optimizer in optimizers:
            optimizer.step()
    for name, master in optimizers[1].masters.items():
        assert master.phi is not None
        assert master.phi.dtype == torch.float32
        # Had the moves been rounded to the weight's precision, they would have been lost.
        assert torch.allclose(master.theta(), optimizers[0].masters[name].theta(), rtol=5e-3, atol=1e-5)
        assert torch.equal(master.param, master.theta().to(dtype))
    assert all(
        s["exp_avg" if base == "adam" else "momentum_buffer"].dtype in (torch.float32, dtype)
        for s in optimizers[1].state.values()
    )


def test_half_precision_resume_is_bit_identical() -> None:
    def start(seed: int) -> tuple[nn.Module, pp.Powerprop]:
        model = net(seed).to(torch.bfloat16)
        return model, wrap(model, "adam", 1.5)

    def go(model: nn.Module, optimizer: pp.Powerprop, steps: range) -> None:
        for step in steps:
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x.bfloat16()), y).backward()
            optimizer.step()

    model, optimizer = start(0)
    go(model, optimizer, range(10))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    go(model, optimizer, range(10, 20))
    again, resumed = start(1)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    go(again, resumed, range(10, 20))
    assert same(model, again)


def test_channels_last_weights() -> None:
    def run(memory_format: torch.memory_format) -> Tensor:
        torch_model = nn.Conv2d(3, 4, 3)
        with torch.no_grad():
            torch_model.weight.copy_(torch.linspace(-1, 1, 108).view(4, 3, 3, 3))
            torch_model.bias.zero_()  # type: ignore[union-attr]
        torch_model = torch_model.to(memory_format=memory_format)
        optimizer = wrap(torch_model, "momentum", 1.375)
        for _ in range(5):
            optimizer.zero_grad()
            torch_model(torch.linspace(0, 1, 108).view(1, 3, 6, 6)).square().sum().mul(1e-3).backward()
            optimizer.step()
        return torch_model.weight.detach()

    assert torch.allclose(run(torch.channels_last), run(torch.contiguous_format), atol=1e-6)


def test_weights_with_gaps_in_memory() -> None:
    layer, gappy = one_weight([4.0, -9.0, 1.0]), one_weight([4.0, -9.0, 1.0])
    gappy.weight = nn.Parameter(torch.tensor([[4.0, 0, -9.0, 0, 1.0, 0]])[:, ::2])
    for model in (layer, gappy):
        optimizer = wrap(model, "sgd", 2.0)
        model.weight.grad = torch.tensor([[1.0, 2.0, 3.0]])
        optimizer.step()
    assert torch.equal(layer.weight, gappy.weight)


def test_denormals_are_flushed() -> None:
    layer = one_weight([1e-37, 1.0])
    optimizer = pp.Powerprop(torch.optim.SGD(layer.parameters(), lr=0.0, weight_decay=0.0), layer, alpha=2.0)
    master = optimizer.masters["weight"]
    assert master.phi is not None
    with torch.no_grad():
        master.phi[0, 0] = 1e-20
        master.put(torch.zeros(1, 2, dtype=torch.bool), torch.zeros(1, 2))
    layer.weight.grad = torch.ones(1, 2)
    optimizer.step()
    assert layer.weight[0].tolist() == [0.0, 1.0]
    assert master.phi[0, 0] == 0


def test_hooks_and_repr() -> None:
    model = net()
    optimizer = wrap(model)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimizer, 2)
    assert calls == ["post", "post"]
    assert "Powerprop(alpha=2, 3 weights, base=SGD" in repr(optimizer)
