"""Models and optimisers as others hand them over: frozen layers, adapters, experts, odd states, averaged weights."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import powerprop as pp
from nets import batch, net, train, weights


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
@pytest.mark.parametrize("method", [pp.RigL(0.8, steps=50, interval=5), pp.IterativePruning(0.8, steps=20)])
def test_what_does_not_train_is_neither_masked_nor_moved(method: Any, alpha: float) -> None:
    model = net(hidden=20)
    model[0].requires_grad_(False)  # type: ignore[union-attr]
    before = weights(model)["0.weight"]
    optimizer = pp.Powerprop(sgd(model), model, alpha, sparsify=copy.deepcopy(method))
    assert "0.weight" not in optimizer.masters
    train(model, optimizer, 20)
    assert torch.equal(model[0].weight, before)  # type: ignore[union-attr,arg-type]
    assert optimizer.active.sparsity() == pytest.approx(0.8, abs=0.01)


def test_a_frozen_weight_that_is_asked_for_is_taken() -> None:
    model = net()
    model[0].requires_grad_(False)  # type: ignore[union-attr]
    assert set(pp.Powerprop(sgd(model), model, where=["0.weight", "2.weight"]).masters) == {"0.weight", "2.weight"}


def test_a_model_that_does_not_train_at_all_is_an_error() -> None:
    model = net().requires_grad_(False)
    with pytest.raises(ValueError, match=r"no weight to give alpha to: .* and do they train \(requires_grad\)\?"):
        pp.Powerprop(sgd(model), model)


def test_a_parameter_that_was_replaced_is_an_error_and_not_silence() -> None:
    model = net()
    optimizer = pp.Powerprop(sgd(model), model)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())  # type: ignore[union-attr]
    x, y = batch(0)
    for module in (model[0], model[4]):
        module.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"'2\.weight' of the model is no longer the parameter that was wrapped"):
        optimizer.step()


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_sharded_weights_train_if_wrapped_after_and_are_an_error_if_before() -> None:
    mesh = init_device_mesh("cpu", (1,))
    late, plain, early = (net(hidden=20) for _ in range(3))
    ours = pp.Powerprop(sgd(plain), plain)
    before = pp.Powerprop(sgd(early), early)
    fully_shard(late, mesh=mesh)
    after = pp.Powerprop(sgd(late), late)
    train(plain, ours, 5)
    train(late, after, 5)
    pairs = zip(late.parameters(), plain.parameters(), strict=True)
    for p, q in pairs:  # ρ is of sums that are added in another order
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-5, atol=1e-7)  # type: ignore[attr-defined]
    fully_shard(early, mesh=mesh)
    with pytest.raises(RuntimeError, match="fully_shard, to_empty and their like replace parameters; wrap .* after"):
        train(early, before, 1)


# --- what the base optimiser remembers ------------------------------------------------------------------------------


class Preconditioned(torch.optim.SGD):
    """Keeps a matrix beside the momentum that has the shape of a square weight, as Shampoo and SOAP do."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim == 2:
                    self.state[p].setdefault("GG", torch.eye(p.shape[0]))
        return loss


def square(optimizer: type[torch.optim.Optimizer] = Preconditioned, **options: Any) -> tuple[nn.Module, pp.Powerprop]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    base = optimizer(model.parameters(), lr=0.1, momentum=0.9)  # type: ignore[call-arg]
    return model, pp.Powerprop(base, model, sparsify=pp.RigL(0.5, steps=50, interval=4), **options)


def steps(model: nn.Module, optimizer: pp.Powerprop, count: int) -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(16) % 3).backward()
        optimizer.step()


def test_a_state_that_may_be_no_moment_is_an_error_after_the_first_step() -> None:
    model, optimizer = square()
    with pytest.raises(ValueError, match=r"Preconditioned keeps 'GG' for '0\.weight', and nothing says .*moments="):
        steps(model, optimizer, 1)


def test_moments_that_are_named_are_cleared_and_no_others() -> None:
    model, optimizer = square(moments=["momentum_buffer"])
    steps(model, optimizer, 4)  # the fourth moves the masks
    assert torch.equal(optimizer.base.state[model[0].weight]["GG"], torch.eye(8))  # type: ignore[union-attr,index]
    momentum = optimizer.base.state[model[0].weight]["momentum_buffer"]  # type: ignore[union-attr,index]
    assert (momentum == 0).any()


def test_the_state_of_an_optimiser_inside_another_is_cleared() -> None:
    class Around(torch.optim.SGD):
        """Holds the optimiser that does the work, as ZeroRedundancyOptimizer does."""

        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, lr=0.1)
            self.optim = torch.optim.SGD([{**group, **options} for group in self.param_groups])

        def step(self, closure: Any = None) -> Any:
            return self.optim.step(closure)

    model, optimizer = square(Around)
    steps(model, optimizer, 4)
    momentum = optimizer.base.optim.state[model[0].weight]["momentum_buffer"]  # type: ignore[union-attr,attr-defined]
    assert (momentum == 0).any()


def test_a_moment_that_cannot_be_cleared_by_entries_is_an_error() -> None:
    class Packed(torch.Tensor):
        """Stands for eight-bit states."""

    class Small(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for p, state in self.state.items():
                state["exp_avg"] = torch.zeros_like(p.detach()).as_subclass(Packed)
            return loss

    model, optimizer = square(Small)
    with pytest.raises(TypeError, match=r"'exp_avg' of '0\.weight' is a Packed, whose entries cannot be cleared"):
        steps(model, optimizer, 1)


# --- adapters, experts, averages ------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, in the usual names."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(6, 6).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(6, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 6, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_train_with_alpha_on_the_matrix_that_does_not_start_at_zero() -> None:
    model = Adapted()
    optimizer = pp.Powerprop(sgd(model), model, 2.0)
    assert set(optimizer.masters) == {"lora_A.default.weight"}
    for _ in range(5):
        optimizer.zero_grad()
        (model(torch.ones(3, 6)) - 1).square().mean().backward()
        optimizer.step()
    assert model.lora_B["default"].weight.any()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 16, 8))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = Experts()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(8, 4), nn.Linear(8, 4)


def test_routers_of_experts_are_no_weights_and_other_gates_are() -> None:
    assert set(pp.Masks.ones(Mixture())) == {"experts.w1"}
    assert set(pp.Masks.ones(Gated())) == {"gate.weight", "value.weight"}
    assert set(pp.Masks.ones(Mixture(), "gate.weight")) == {"gate.weight"}


def test_a_pattern_for_experts_in_one_tensor_is_refused_with_the_reason() -> None:
    model = Mixture()
    message = r"'experts\.w1' of shape \(4, 16, 8\) is no convolution's, so that nothing says which dimension"
    with pytest.raises(ValueError, match=message):
        pp.prune(model, pattern="2:4")
    with pytest.raises(ValueError, match=message):
        pp.Powerprop(sgd(model), model, sparsify=pp.Static(0.5, pattern="2:4"))
    turned = nn.Sequential(nn.ConvTranspose2d(8, 8, 3))
    with pytest.raises(ValueError, match=r"'0\.weight' of shape \(8, 8, 3, 3\) is no convolution's"):
        pp.prune(turned, pattern="2:4")
    pp.prune(nn.Sequential(nn.Conv1d(8, 4, 3)), pattern="2:4")


def test_averaged_weights_take_the_masks_again() -> None:
    model = net(hidden=20)
    optimizer = pp.Powerprop(sgd(model), model, sparsify=pp.RigL(0.8, steps=50, interval=3))
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(4):
        train(model, optimizer, 3, start=3 * step)
        average.update_parameters(model)
    assert pp.sparsity(average.module).total < 0.8
    optimizer.active.apply(average.module)
    assert pp.sparsity(average.module).total == pytest.approx(0.8, abs=0.01)
