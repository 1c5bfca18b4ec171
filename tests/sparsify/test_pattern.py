"""2:4 and other n:m patterns: exact in every group, for pruning and for every sparsifier."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp
from powerprop.sparsify.pattern import fill, pattern_masks, sparsity_of
from sparse import METHODS, make


def groups(weight: Tensor, m: int) -> Tensor:
    """How many weights are left in each group of m inputs."""
    return (weight != 0).movedim(1, -1).unflatten(-1, (-1, m)).sum(-1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.Flatten(), nn.Linear(48, 5))


def test_two_of_four_by_hand() -> None:
    score = torch.tensor([[1.0, 3.0, 2.0, 0.0, 5.0, 5.0, 5.0, 9.0]])
    mask = pattern_masks({"w": score}, "2:4")["w"]
    assert mask.tolist() == [[False, True, True, False, True, False, False, True]]  # of equals the first
    assert fill(torch.tensor([[False, False, False, True]]), torch.tensor([[1.0, 3, 2, 0]]), "2:4").tolist() == [
        [False, True, False, True]
    ]


def test_convolutions_are_grouped_along_the_channels() -> None:
    weight = torch.zeros(1, 4, 1, 2)
    weight[0, :, 0, 0] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    weight[0, :, 0, 1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    mask = pattern_masks({"w": weight}, "2:4")["w"]
    assert mask[0, :, 0, 0].tolist() == [True, True, False, False]
    assert mask[0, :, 0, 1].tolist() == [False, False, True, True]


@settings(max_examples=50)
@given(n=st.integers(1, 7), more=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_group_is_exact(n: int, more: int, seed: int) -> None:
    m = n + more
    score = torch.rand(3, 2 * m, 2, generator=torch.Generator().manual_seed(seed))
    mask = pattern_masks({"w": score}, f"{n}:{m}")["w"]
    assert torch.equal(groups(mask.float(), m), torch.full((3, 2, 2), n))
    left, gone = (
        score.movedim(1, -1).unflatten(-1, (2, m)) * k.movedim(1, -1).unflatten(-1, (2, m)) for k in (mask, ~mask)
    )
    assert bool((left.masked_fill(left == 0, 2).amin(-1) >= gone.amax(-1)).all())
    assert sparsity_of(f"{n}:{m}") == 1 - n / m


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prune(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    masks = pp.prune(model, pattern="2:4", layers={"0.weight": 0.0})
    assert pp.sparsity(model) == pytest.approx({"0.weight": 0.0, "2.weight": 0.5, "4.weight": 0.5})
    assert masks["0.weight"].all()
    for layer in (model[2], model[4]):
        assert bool((groups(layer.weight, 4) == 2).all())


@pytest.mark.parametrize("alpha", [1.0, 2.0])
@pytest.mark.parametrize("name", METHODS)
def test_every_sparsifier_keeps_the_pattern(name: str, alpha: float) -> None:
    model = net()
    method = make(name, sparsity=0.5, steps=40, interval=5, pattern="2:4", layers={"0.weight": 0.0})
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = pp.Powerprop(base, model, alpha=alpha, sparsify=method)
    x, y = torch.randn(16, 3, 6, 6), torch.randint(5, (16,))
    first = None
    for step in range(40):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        masks = {n: m.active for n, m in optimizer.masters.items()}
        first = first or copy.deepcopy(masks)
        if name != "iterative" or step >= 35:
            for weight in ("2.weight", "4.weight"):
                assert bool((groups(masks[weight].float(), 4) == 2).all()), step
                assert not dict(model.named_parameters())[weight][~masks[weight]].any()
    if name in ("set", "rigl", "snfs"):
        assert not torch.equal(first["4.weight"], masks["4.weight"])  # and yet the masks have moved


def test_the_pattern_belongs_to_the_state() -> None:
    def make(**kwargs: object) -> pp.Powerprop:
        model = net()
        method = pp.RigL(sparsity=0.5, steps=100, interval=10, layers={"0.weight": 0.0}, **kwargs)
        return pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model, alpha=1.0, sparsify=method)

    state = make(pattern="2:4").state_dict()
    make(pattern="2:4").load_state_dict(state)
    with pytest.raises(ValueError, match="pattern='2:4', not '1:2'"):
        make(pattern="1:2").load_state_dict(state)


@pytest.mark.parametrize("pattern", ["4:2", "2:2", "0:4", "two", "2/4", 24, "2:4:8"])
def test_what_is_no_pattern(pattern: object) -> None:
    with pytest.raises(ValueError, match="pattern must be n:m with 0 < n < m, such as '2:4', got"):
        pp.prune(net(), pattern=pattern)


def test_bad_input_changes_nothing() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"needs a multiple of 4 inputs, '0.weight' has shape \(8, 3, 3, 3\); leave it"
    ):
        pp.prune(model, pattern="2:4")
    with pytest.raises(ValueError, match="follows it or is dense"):
        pp.prune(model, pattern="2:4", layers={"0.weight": 0.0, "2.weight": 0.3})
    with pytest.raises(ValueError, match="a sparsity or a pattern, one of them, got 0.5 and '2:4'"):
        pp.prune(model, 0.5, pattern="2:4")
    with pytest.raises(ValueError, match="a sparsity or a pattern, one of them, got None and None"):
        pp.prune(model)
    with pytest.raises(ValueError, match=r"pattern='2:4' has sparsity 0.5, got sparsity=0.9"):
        pp.RigL(sparsity=0.9, pattern="2:4", steps=100)
    with pytest.raises(ValueError, match="needs a multiple of 4 inputs"):
        pp.Powerprop(
            torch.optim.SGD(model.parameters(), lr=0.1), model, alpha=1.0, sparsify=pp.Static(0.5, pattern="2:4")
        )
    with torch.no_grad():
        model[4].weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="NaN"):
        pp.prune(model, pattern="2:4", layers={"0.weight": 0.0})
    after = model.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before if n != "4.weight")


def test_ready_for_semi_structured_kernels() -> None:
    """What torch packs for a GPU: two values and their two-bit places of each group, here done and undone on a CPU."""
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass,
        sparse_semi_structured_to_dense_cutlass,
    )

    layer = nn.Linear(64, 64, bias=False).half()
    pp.prune(layer, pattern="2:4")
    values, places = sparse_semi_structured_from_dense_cutlass(layer.weight.detach())
    assert values.shape == (64, 32)
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(values, places), layer.weight.detach())
    other = nn.Linear(64, 64, bias=False).half()
    pp.prune(other, 0.5)  # as sparse, but without the pattern
    assert not bool((groups(other.weight, 4) == 2).all())
