"""Ψ, its inverse and its slope, against numbers worked out by hand and finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import powerprop as pp
from powerprop.reparam import check_alpha, psi, psi_inverse, slope


def test_by_hand() -> None:
    phi = torch.tensor([-2.0, -1.0, 0.0, 0.25, 4.0])
    assert psi(phi, 2).tolist() == [-4.0, -1.0, 0.0, 0.0625, 16.0]
    assert psi(phi, 1.5)[3:].tolist() == [0.125, 8.0]
    assert slope(phi, 3).tolist() == [12.0, 3.0, 0.0, 0.1875, 48.0]
    assert psi_inverse(torch.tensor([-9.0, 0.0, 16.0]), 2).tolist() == [-3.0, 0.0, 4.0]


@pytest.mark.parametrize("alpha", [1, 1.25, 1.5, 2, 3.3])
def test_gradient(alpha: float) -> None:
    phi = torch.tensor([-1.5, -0.3, 0.2, 0.9, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: psi(x, alpha), (phi,))


@pytest.mark.parametrize("alpha", [2, 2.5, 3, 4, 5])
def test_gradient_at_exactly_zero_by_finite_differences(alpha: float) -> None:
    zero = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: psi(x, alpha), (zero,), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("alpha", [1.01, 1.125, 1.5, 1.99])
def test_gradient_at_zero_is_zero_and_not_nan(alpha: float) -> None:
    phi = torch.tensor([0.0, -0.0, 1.0], requires_grad=True)
    psi(phi, alpha).sum().backward()
    assert phi.grad is not None
    assert phi.grad.tolist() == pytest.approx([0.0, 0.0, alpha])


@given(st.floats(1, 6), st.floats(-100, 100, width=32))
def test_inverse_undoes_psi(alpha: float, theta: float) -> None:
    there = torch.tensor([theta], dtype=torch.float64)
    assert torch.allclose(psi(psi_inverse(there, alpha), alpha), there, rtol=1e-12, atol=1e-300)


@given(st.floats(1, 6), st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=20))
def test_psi_keeps_sign_and_order(alpha: float, values: list[float]) -> None:
    phi = torch.tensor(sorted(values), dtype=torch.float64)
    theta = psi(phi, alpha)
    assert (theta.diff() >= 0).all()
    assert ((theta.sign() == phi.sign()) | (theta == 0)).all()


@pytest.mark.parametrize("bad", [0.5, 0.999, -1, math.nan, math.inf])
def test_bad_alpha_is_repeated_back(bad: float) -> None:
    with pytest.raises(ValueError, match=f"alpha must be a finite number >= 1, got {bad}"):
        check_alpha(bad)
    with pytest.raises(ValueError, match=r"for 'fc1\.weight'"):
        check_alpha(bad, "fc1.weight")
    for function in (psi, psi_inverse, slope):
        with pytest.raises(ValueError, match="alpha must be"):
            function(torch.ones(1), bad)


@pytest.mark.parametrize(("bad", "shown"), [(10**400, "1000000000… beyond all floats"), (True, "True"), ("2", "'2'")])
def test_alphas_that_are_no_floats(bad: float, shown: str) -> None:
    with pytest.raises(ValueError, match=f"alpha must be a finite number >= 1, got .*{shown}.* for 'w'"):
        check_alpha(bad, "w")
    with pytest.raises(ValueError, match=f"alpha must be a finite number >= 1, got .*{shown}"):
        pp.Powerprop(torch.optim.SGD((net := torch.nn.Linear(2, 2)).parameters(), lr=0.1), net, bad)
