"""Products of matrices in half precision: faster, close, and nothing left behind."""

from __future__ import annotations

import pytest
import torch

from powerprop_paper.train.precision import PRODUCTS, Precision, matmul_precision


def test_products_are_close_and_results_stay_float32() -> None:
    a, b = (torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    with matmul_precision("bfloat16"):
        found = a @ b
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, a @ b, rtol=0.02, atol=0.5)


def test_full_precision_changes_nothing() -> None:
    a = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    with matmul_precision("float32"):
        found = a @ a
    assert torch.equal(found, a @ a)


@pytest.mark.parametrize("precision", PRODUCTS)
def test_the_precision_of_before_comes_back(precision: str) -> None:
    def fail() -> None:
        with matmul_precision(precision):
            assert torch.get_float32_matmul_precision() == PRODUCTS[precision]
            raise ZeroDivisionError

    before = torch.get_float32_matmul_precision()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.get_float32_matmul_precision() == before


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float32, bfloat16, got 'float8'"), matmul_precision("float8"):
        pass


def test_weights_that_change_inside_are_the_ones_that_count() -> None:
    """torch keeps the rounded weights of a block: a network pruned inside would be measured as it was before."""
    layer, x = torch.nn.Linear(8, 4, bias=False), torch.randn(2, 8)
    with Precision("bfloat16").autocast(torch.device("cpu")):
        assert layer(x).abs().sum() > 0
        with torch.no_grad():
            layer.weight.zero_()
        assert layer(x).abs().sum() == 0
