"""Weights as they lie in memory: half precision, layouts, changes from outside, the version counter or none."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp
from nets import batch, net, one_weight, same, train, weights, wrap
from powerprop.reparam import psi, psi_inverse
from unseen import UNSEEN

every_unseen = pytest.mark.parametrize("unseen", UNSEEN)


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
        optimizer = pp.Powerprop(make(list(layer.parameters())), layer, 2.0, rate="paper")
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


def test_tied_weights_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.up.weight = self.down.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.up(F.relu(self.down(x)))  # type: ignore[no-any-return]

    model = Tied()
    optimizer = wrap(model, "sgd", 2.0, rate="paper")
    assert list(optimizer.masters) == ["down.weight"]
    phi = psi_inverse(model.down.weight.detach(), 2.0)
    model(torch.ones(2, 4)).square().sum().backward()
    move = -0.1 * model.down.weight.grad  # type: ignore[operator]
    optimizer.step()
    assert torch.allclose(model.up.weight, psi(phi + move * 2 * phi.abs(), 2.0), atol=1e-6)
    assert model.up.weight is model.down.weight


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
    torch.testing.assert_close(layer.weight, gappy.weight)  # the kernel leaves gaps to torch, which rounds otherwise


def test_denormals_are_flushed() -> None:
    layer = one_weight([1e-37, 1.0])
    optimizer = pp.Powerprop(torch.optim.SGD(layer.parameters(), lr=0.0, weight_decay=0.0), layer, alpha=2.0)
    master = optimizer.masters["weight"]
    with torch.no_grad():
        layer.weight[0, 0] = 1e-40
    layer.weight.grad = torch.ones(1, 2)
    optimizer.step()
    assert layer.weight[0].tolist() == [0.0, 1.0]
    assert master.theta()[0, 0] == 0


@pytest.mark.parametrize("alpha", [1.125, 1.3, 1.5, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("masked", [False, True])
def test_how_far_rounding_moves_a_weight_whose_gradient_is_zero(alpha: float, masked: bool) -> None:
    layer = nn.Linear(50, 40, bias=False)
    with torch.no_grad():
        layer.weight.normal_(0, 2, generator=torch.Generator().manual_seed(0))
    optimizer = wrap(layer, "sgd", alpha)
    if masked:
        optimizer.set_masks(pp.magnitude_masks(layer, 0.5))
    for _ in range(10):
        before, bound = layer.weight.detach().clone(), optimizer.slope("weight").square() + 2 * alpha
        layer.weight.grad = torch.zeros_like(layer.weight)
        optimizer.step()
        moved = (layer.weight.detach().view(torch.int32) - before.view(torch.int32)).abs()
        assert (moved <= (0 if masked else bound)).all()
