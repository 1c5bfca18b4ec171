"""Parameters and buffers that an optimiser holds, whatever its step does and whoever calls it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from powerprop import Powerprop
from tasks import OPTIMIZERS


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def trained(model: nn.Module, optimizer: Powerprop, closure: bool = False, steps: int = 3) -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 1.375, 2.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_frozen_stays_to_the_bit(name: str, alpha: float, closure: bool) -> None:
    model = net()
    optimizer = Powerprop(OPTIMIZERS[name](list(model.parameters())), model, alpha)
    trained(model, optimizer, closure)  # momentum is there, and statistics
    held = {"0.bias", "1.weight", "3.weight"}
    before = {n: t.clone() for n, t in model.state_dict().items()}
    optimizer.freeze([p for n, p in model.named_parameters() if n in held], model.buffers())
    trained(model, optimizer, closure)
    for key, value in model.state_dict().items():
        frozen = key in held or key.startswith("1.running") or key.endswith("tracked")
        assert torch.equal(value, before[key]) == frozen, key


def test_what_is_thawed_moves_again_and_gradients_stay_for_others() -> None:
    model = net()
    optimizer = Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model, 2.0)
    optimizer.freeze([model[3].bias])
    trained(model, optimizer)
    assert model[3].bias.grad is not None
    before = model[3].bias.clone()
    optimizer.freeze()
    trained(model, optimizer)
    assert not torch.equal(model[3].bias, before)


def test_frozen_parameters_take_no_part_in_clipping() -> None:
    model, other = net(), net()
    first, second = (Powerprop(torch.optim.SGD(m.parameters(), lr=0.0), m, 1.0) for m in (model, other))
    first.freeze(p for n, p in model.named_parameters() if n.startswith("0"))
    for m, optimizer in ((model, first), (other, second)):
        trained(m, optimizer, steps=1)
    expected = torch.stack([p.grad.norm() for n, p in other.named_parameters() if not n.startswith("0")]).norm()  # type: ignore[union-attr]
    assert torch.allclose(first.clip_grad_norm_(1e9), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_wear_other_weights(kind: Callable[..., nn.RNNBase]) -> None:
    from powerprop.continual.layers import swapped_parameters

    torch.manual_seed(0)
    layer, other = kind(3, 4), kind(3, 4)
    x = torch.randn(5, 2, 3)
    own = layer(x)[0]
    with swapped_parameters(layer, {n: p.detach() for n, p in other.named_parameters()}):
        assert torch.equal(layer(x)[0], other(x)[0])
    assert torch.equal(layer(x)[0], own)
