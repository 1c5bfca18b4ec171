"""Powerprop's state: exact resume, state of other optimisers, copies."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import powerprop as pp
from nets import ALPHAS, BASES, batch, net, one_weight, same, train, wrap

every_alpha = pytest.mark.parametrize("alpha", ALPHAS)
every_base = pytest.mark.parametrize("base", BASES)


@every_base
@every_alpha
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


def test_a_copy_with_a_scheduler_steps_itself_alone() -> None:
    model = net()
    optimizer = wrap(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    copied, other = copy.deepcopy((model, optimizer))
    before = copy.deepcopy(model)
    train(copied, other, 1)
    assert same(model, before)
    assert not same(copied, before)


def test_a_refused_state_changes_nothing() -> None:
    models = net(), net()
    saved, ours = (wrap(m, sparsify=pp.RigL(s, steps=1000)) for m, s in zip(models, (0.9, 0.5), strict=True))
    train(models[0], saved, 3)
    masks = ours.active
    with pytest.raises(ValueError, match=r"saved with sparsity=0\.9, not 0\.5"):
        ours.load_state_dict(saved.state_dict())
    assert ours.active == masks
    plain = wrap(net())
    state = plain.state_dict()
    state["param_groups"] = []
    with pytest.raises(ValueError, match=r"the state is of groups with \[\] parameters, not \[8\]"):
        plain.load_state_dict(state)


def test_a_half_precision_state_from_before_the_masks() -> None:
    layer = one_weight([4.0, -9.0, 1.0]).bfloat16()
    optimizer = wrap(layer, "sgd", 1.0)
    state = optimizer.state_dict()
    optimizer.set_masks(pp.prune(layer, 0.5))
    optimizer.load_state_dict(state)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert not torch.equal(layer.weight, before)
