"""The products of sparse compute: the kernel and its torch twin against dense products, patterns that cannot be."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from powerprop import kernel
from powerprop.sparse import products
from powerprop.sparse.pattern import Pattern

no_kernel = mock.patch.object(kernel, "_loaded", return_value=(None, "torch"))


def example(rows: int, columns: int, n: int, density: float, seed: int) -> tuple[Pattern, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    pattern = Pattern.of(torch.rand(rows, columns, generator=draw) < density)
    sizes = {"values": (pattern.count,), "x": (columns, n), "g": (rows, n), "bias": (rows,)}
    return pattern, {name: torch.randn(size, generator=draw) for name, size in sizes.items()}


def agrees(pattern: Pattern, values: Tensor, x: Tensor, g: Tensor, bias: Tensor, relu: bool) -> None:
    """Forward and backward against the dense products in float64."""
    wide, columns, grads = pattern.scatter(values).double(), x.double(), g.double()
    y = wide @ columns + bias.double()[:, None]
    dx, dv, db = products.backward(pattern, values, x, g, wants_bias=True)
    assert dx is not None
    assert db is not None
    pairs = [
        (products.forward(pattern, values, x, bias, relu), y.relu() if relu else y),
        (products.forward(pattern, values, x), wide @ columns),
        (dx, wide.t() @ grads),
        (dv, pattern.gather(grads @ columns.t())),
        (db, grads.sum(1)),
        (products.backward(pattern, values, x, g, wants_x=False)[1], pattern.gather(grads @ columns.t())),
    ]
    for found, wanted in pairs:
        assert found.shape == wanted.shape
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)


@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([0, 1, 5, 15, 16, 17, 31, 47, 48, 63, 64, 65, 130]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_the_kernel_and_its_twin_give_the_dense_products(
    rows: int, columns: int, n: int, density: float, relu: bool, seed: int
) -> None:
    pattern, tensors = example(rows, columns, n, density, seed)
    agrees(pattern, **tensors, relu=relu)
    with no_kernel:
        twin, again = example(rows, columns, n, density, seed)
        assert (twin.at, twin.turned_indices, twin.turned_pointers) == (
            pattern.at,
            pattern.turned_indices,
            pattern.turned_pointers,
        )
        agrees(twin, **again, relu=relu)


def test_a_product_by_hand() -> None:
    pattern = Pattern.of(torch.tensor([[True, False, True], [False, False, False]]))
    values, x = torch.tensor([2.0, -1.0]), torch.tensor([[1.0, 2.0], [9.0, 9.0], [5.0, 3.0]])
    bias, g = torch.tensor([0.5, -4.0]), torch.tensor([[1.0, 10.0], [7.0, 7.0]])
    assert products.forward(pattern, values, x, bias).tolist() == [[-2.5, 1.5], [-4.0, -4.0]]
    assert products.forward(pattern, values, x, bias, relu=True).tolist() == [[0.0, 1.5], [0.0, 0.0]]
    dx, dv, db = products.backward(pattern, values, x, g, wants_bias=True)
    assert dx is not None
    assert db is not None
    assert db.tolist() == [11.0, 14.0]
    assert dx.tolist() == [[2.0, 20.0], [0.0, 0.0], [-1.0, -10.0]]
    assert dv.tolist() == [21.0, 35.0]
    assert pattern.places().tolist() == [0, 2]
    assert torch.equal(pattern.mask(torch.tensor([False, True])), torch.tensor([[False, False, True], [False] * 3]))


def test_nan_and_infinity_pass_through_the_weights_that_are_there_alone() -> None:
    for n in (2, 16, 70):
        pattern, tensors = example(6, 8, n, 0.4, 1)
        x = tensors["x"]
        x[3], x[5] = torch.nan, torch.inf
        y = products.forward(pattern, tensors["values"], x, relu=True)
        reached = pattern.mask()[:, 3]
        assert y[reached].isnan().all()
        assert not y[~reached].isnan().any()


def test_sums_have_one_order_whatever_the_threads() -> None:
    pattern, tensors = example(200, 150, 77, 0.1, 0)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            y = products.forward(pattern, tensors["values"], tensors["x"], tensors["bias"])
            found.append((y, *products.backward(pattern, tensors["values"], tensors["x"], tensors["g"], True, True)))
        finally:
            torch.set_num_threads(1)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("pointers", "indices", "said"),
    [
        ([0, 2, 1], [0, 1], "pointers that do not rise"),
        ([0, 3, 2], [0, 1], "pointers that do not rise"),
        ([1, 1, 2], [0, 1], "pointers that do not rise"),
        ([0, 1, 3], [0, 1], "pointers that do not rise"),
        ([0, 1, 2], [0, 3], "an index outside"),
        ([0, 1, 2], [-1, 1], "an index outside"),
        ([0, 2, 2], [1, 1], "out of order"),
        ([0, 2, 2], [2, 0], "out of order"),
        ([0, 2], [0, 1], "needs 3 pointers and a list of indices in int32, got int32 of shape"),
    ],
)
def test_a_pattern_that_cannot_be_is_an_error(
    compiled: bool, pointers: list[int], indices: list[int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(kernel, "_loaded", lambda: (None, "torch"))
    with pytest.raises(ValueError, match=said):
        Pattern((2, 3), np.array(pointers, "i4"), np.array(indices, "i4"))


def test_other_numbers_than_int32_and_other_masks_are_errors() -> None:
    with pytest.raises(ValueError, match=r"got int64 of shape \(2,\) and int32 of shape \(0,\)"):
        Pattern((1, 3), np.array([0, 0]), np.array([], "i4"))
    with pytest.raises(ValueError, match=r"a bool matrix, got torch.float32 of shape \(2, 2\)"):
        Pattern.of(torch.ones(2, 2))
    with pytest.raises(ValueError, match="fewer than 2³¹ rows"):
        Pattern((2**31, 3), np.array([0], "i4"), np.array([], "i4"))


def test_a_pattern_never_changes() -> None:
    pattern, _ = example(5, 4, 1, 0.5, 0)
    assert copy.deepcopy(pattern) is pattern
    again = pickle.loads(pickle.dumps(pattern))
    assert (again.pointers, again.indices, again.at) == (pattern.pointers, pattern.indices, pattern.at)
    with pytest.raises(ValueError, match="read-only"):
        np.frombuffer(pattern.indices, np.int32)[0] = 9


def test_tensors_that_do_not_fit_are_errors() -> None:
    pattern, good = example(5, 4, 20, 0.5, 0)
    wrong = {
        "x": (good["x"][:3], r"x must be floating-point columns \(4, n\), got torch.float32 of shape \(3, 20\)"),
        "values": (good["values"][1:], "values must be torch.float32 of shape"),
        "bias": (good["bias"].double(), r"bias must be torch.float32 of shape \(5,\) on cpu.*got torch.float64"),
        "g": (good["g"][:, 1:], r"g must be torch.float32 of shape \(5, 20\)"),
    }
    for name, (tensor, said) in wrong.items():
        values, x, g, bias = ({**good, name: tensor}[key] for key in ("values", "x", "g", "bias"))
        with pytest.raises(ValueError, match=said):
            products.backward(pattern, values, x, g) if name == "g" else products.forward(pattern, values, x, bias)
