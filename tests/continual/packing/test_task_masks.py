"""The masks of many tasks in one owner for each weight, against masks kept one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from powerprop.continual import TaskMasks
from powerprop.masks import Masks

SHAPES = {"a": (5, 7), "b": (13,)}


def history(tasks: int, seed: int, decimals: int = 1) -> tuple[TaskMasks, list[Masks], dict[str, Tensor]]:
    """Tasks that take what is above a threshold of their own per layer; coarse magnitudes make many equals."""
    generator = torch.Generator().manual_seed(seed)
    weights = {n: torch.zeros(s) for n, s in SHAPES.items()}
    store, kept = TaskMasks(weights), []
    for _ in range(tasks):
        drawn = {n: torch.rand(s, generator=generator).round(decimals=decimals) for n, s in SHAPES.items()}
        free = store.free()
        weights |= {n: torch.where(free[n], drawn[n], weights[n]) for n in SHAPES}
        wanted = {n: s > 0.3 + 0.8 * torch.rand((), generator=generator) for n, s in weights.items()}
        masks = store.complete(wanted)
        store.add(masks)
        kept.append(masks)
    return store, kept, weights


def test_two_tasks_by_hand() -> None:
    weights = {"w": torch.tensor([3.0, -2.0, 1.0, 0.1, 0.1, 0.1])}
    store = TaskMasks(weights)
    store.add({"w": torch.tensor([True, True, True, False, False, False])})
    weights["w"] = torch.tensor([3.0, -2.0, 1.0, 2.5, 0.2, -0.2])
    store.add({"w": torch.tensor([True, True, False, True, False, False])})
    assert store.owner["w"].tolist() == [0, 0, 0, 1, -1, -1]
    assert store.threshold["w"] == [float("inf"), 2.0]
    assert store.mask(0)["w"].tolist() == [True, True, True, False, False, False]
    assert store.mask(1)["w"].tolist() == [True, True, False, True, False, False]
    assert store.free()["w"].tolist() == [False, False, False, False, True, True]
    assert store.used() == pytest.approx(4 / 6)
    assert store.mixture("w", torch.tensor([0.25, 0.75])).tolist() == [1.0, 1.0, 0.25, 0.75, 0.0, 0.0]
    assert store.sums("w", torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])).tolist() == [7.0, 11.0]


def test_equals_are_not_parted() -> None:
    store = TaskMasks({"w": torch.tensor([1.0, -1.0, 2.0, 0.0])})
    store.add({"w": torch.tensor([True, True, True, False])})
    wanted = {"w": torch.tensor([True, False, True, False])}
    with pytest.raises(ValueError, match=r"part used weights of equal magnitude; call complete\(\) first"):
        store.add(wanted)
    assert store.tasks == 1
    assert store.complete(wanted)["w"].tolist() == [True, True, True, False]


def test_masks_go_where_the_weights_are() -> None:
    store, _, _ = history(2, 0)
    store.follow({n: torch.device("meta") for n in SHAPES})
    assert {t.device.type for t in store.owner.values()} == {"meta"}


@settings(max_examples=40)
@given(tasks=st.integers(1, 25), seed=st.integers(0, 10**6))
def test_every_mask_comes_back(tasks: int, seed: int) -> None:
    store, kept, weights = history(tasks, seed)
    assert all(store.mask(t) == masks for t, masks in enumerate(kept))
    again = TaskMasks(weights)
    again.load_state(*store.state())
    assert all(again.mask(t) == masks for t, masks in enumerate(kept))
    assert again.free() == store.free()


@settings(max_examples=40)
@given(tasks=st.integers(1, 25), seed=st.integers(0, 10**6))
def test_mixtures_and_sums_are_those_of_the_masks(tasks: int, seed: int) -> None:
    store, kept, _ = history(tasks, seed)
    generator = torch.Generator().manual_seed(seed)
    pi = torch.rand(tasks, generator=generator, dtype=torch.float64)
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator)
        stack = torch.stack([masks[name].double() for masks in kept])
        mixed = torch.einsum("t,t...->...", pi, stack)
        assert torch.allclose(store.mixture(name, pi).double(), mixed, atol=1e-6)
        assert torch.allclose(store.sums(name, values), (stack * values).flatten(1).sum(1), atol=1e-6)


def test_planes_take_the_logarithm_of_the_tasks() -> None:
    for tasks, bits in ((1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4), (300, 9)):
        store, _, _ = history(tasks, 0)
        planes, _ = store.state()
        assert {n: tuple(p.shape) for n, p in planes.items()} == {"a": (bits, 5), "b": (bits, 2)}
        assert bits <= 1.1 * tasks


def test_unknown_tasks_and_damaged_planes() -> None:
    store, _, _ = history(3, 0)
    with pytest.raises(ValueError, match=r"task must be in 0\.\.2 .*, got 3"):
        store.mask(3)
    planes, data = store.state()
    with pytest.raises(ValueError, match="owners among 3 tasks take 2 bit planes, got 1"):
        store.load_state({n: p[:1] for n, p in planes.items()}, data)


def test_a_thousand_tasks_take_two_bytes_a_weight_in_memory() -> None:
    """2 million weights: 4 MB, whatever the number of tasks up to 32,767; one bit for each task would be 250 MB."""
    masks = TaskMasks(weights := {"w": torch.zeros(40, 50)})
    for task in range(1000):
        wanted = torch.zeros(40, 50, dtype=torch.bool)
        wanted.view(-1)[2 * task : 2 * task + 2] = True
        weights["w"] = torch.where(masks.free()["w"], 1.0 + task, weights["w"])
        masks.add(masks.complete({"w": wanted}))
    assert masks.owner["w"].nbytes == 2 * 2000
    assert masks.mask(999)["w"].view(-1)[1998:].all()
