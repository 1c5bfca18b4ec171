"""One weight behind the optimiser: what it does to masks and gradients, in every layout and precision."""

import pytest
import torch

from powerprop.weight import WeightState

SHAPE = (6, 4, 3, 3)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def master(alpha: float, dtype: torch.dtype, layout: torch.memory_format) -> WeightState:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    return WeightState("conv.weight", torch.nn.Parameter(values.contiguous(memory_format=layout)), alpha)


def mask(seed: int, density: float = 0.5) -> torch.Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed)) < density


@every_layout
@pytest.mark.parametrize("of_gradient", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_gradients_are_confined_to_what_is_trained(
    alpha: float, dtype: torch.dtype, of_gradient: torch.memory_format, layout: torch.memory_format
) -> None:
    weight, trained = master(alpha, dtype, layout), mask(1)
    gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)).to(dtype)
    gradient.view(-1)[trained.logical_not().flatten().nonzero()[0]] = torch.nan
    weight.set_masks(None, trained, keep=True)
    weight.param.grad = gradient.contiguous(memory_format=of_gradient)
    weight.confine_gradient()
    assert torch.equal(weight.param.grad, torch.where(trained, gradient, 0))


def test_what_is_trained_is_counted_once_for_each_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[torch.Tensor] = []
    monkeypatch.setattr("powerprop.weight.count", lambda mask: counted.append(mask) or int(mask.sum()))
    weight = master(1.5, torch.float32, torch.contiguous_format)
    assert weight.trained_count() == weight.param.numel()
    for seed in (1, 2):
        weight.set_masks(None, mask(seed), keep=True)
        assert weight.trained_count() == weight.trained_count() == int(mask(seed).sum())
    assert len(counted) == 2
