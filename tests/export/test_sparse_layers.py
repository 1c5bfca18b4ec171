"""Single layers as sparse products give the same outputs as dense ones, and chains of them copy nothing."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import powerprop as pp
from powerprop.export import Choice, Exported, Plan, sparse_layers
from powerprop.export.sparse_layers import SparseConv, SparseLinear, columns, product, rows, sparse_layer, transposed
from sparse_nets import MODELS, assert_same, pruned


def planned(batch: int, *forms: str) -> Plan:
    """The three layers of the network "mlp" in these forms."""
    choices = tuple(Choice(f"fc{i}", form, 0.9) for i, form in enumerate(forms, 1))
    return Plan("sparse" if forms else "smaller", True, batch, 1, choices=choices)


def calls_in(fast: Exported) -> list[object]:
    assert isinstance(fast.network, fx.GraphModule)
    return [node.target for node in fast.network.graph.nodes if node.op.startswith("call")]


@settings(max_examples=30)
@given(
    kernel=st.integers(1, 3), stride=st.integers(1, 2), padding=st.integers(0, 2), dilation=st.integers(1, 2),
    batch=st.integers(0, 3), block=st.sampled_from([1, 2**18]),
)  # fmt: skip
def test_convolutions(kernel: int, stride: int, padding: int, dilation: int, batch: int, block: int) -> None:
    layer = nn.Conv2d(3, 4, kernel, stride, padding, dilation)
    pp.prune(layer, 0.7)
    x = torch.randn(batch, 3, 7, 9)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(sparse_layers, "BLOCK", block)
        mine = sparse_layer(layer, many=True)
        assert isinstance(mine, SparseConv)
        torch.testing.assert_close(mine(x), layer(x))
        assert mine(x).is_contiguous()
        if batch:
            torch.testing.assert_close(mine(x[0]), layer(x[0]))


@pytest.mark.parametrize("shape", [(20,), (1, 20), (5, 20), (9, 20), (2, 3, 20), (0, 20)])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers(shape: tuple[int, ...], many: bool, bias: bool) -> None:
    layer = nn.Linear(20, 6, bias=bias)
    with torch.no_grad():
        layer.weight[:, 4:] = 0
        mine = sparse_layer(layer, many)
        assert isinstance(mine, SparseLinear)
        assert (mine.used is not None) == many
        x = torch.randn(shape)
        torch.testing.assert_close(mine(x), layer(x))
        assert mine(x).is_contiguous()


def test_activations_stay_columns_between_sparse_layers_and_dense_ones_have_their_transposes_at_hand() -> None:
    net, x = pruned("mlp"), MODELS["mlp"][1](4)
    chain = [columns, product, torch.relu_, product, torch.relu_, product, rows, "contiguous"]
    assert calls_in(pp.export.sparse(net, x, plan=planned(4, "sparse", "sparse", "sparse"))) == chain
    dense = [torch.addmm, torch.relu_, torch.addmm, torch.relu_, torch.addmm]
    assert calls_in(pp.export.sparse(net, x, plan=planned(4))) == dense


@pytest.mark.parametrize("forms", list(itertools.product(("dense", "sparse"), repeat=3)))
@pytest.mark.parametrize("batch", [1, 16])
def test_every_mixture_of_forms(forms: tuple[str, ...], batch: int) -> None:
    net, data = pruned("mlp"), MODELS["mlp"][1]
    fast = pp.export.sparse(net, data(batch), plan=planned(batch, *forms))
    for n in (0, 1, 2, 16):
        assert_same(fast, net, data(n))


@settings(max_examples=30)
@given(
    n=st.integers(0, 70), m=st.integers(0, 70),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_the_fast_transposition(n: int, m: int, dtype: torch.dtype) -> None:
    x = torch.randn(n, m).to(dtype)
    for given_x in (x, x[:, ::2], torch.randn(m, n).to(dtype).t()):
        mine = transposed(given_x)
        assert mine.is_contiguous()
        assert torch.equal(mine, given_x.t())


def test_gradients_pass_through_to_the_inputs() -> None:
    net, x = pruned("mlp"), MODELS["mlp"][1](16).requires_grad_()
    fast = pp.export.sparse(net, x, plan=planned(16, "sparse", "sparse", "sparse"))
    mine, wanted = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (fast, net))
    torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_no_warning_reaches_the_user() -> None:
    code = (
        "import warnings, torch, powerprop as pp;"
        "m = torch.nn.Linear(200, 200); pp.prune(m, 0.99); x = torch.randn(64, 200); pp.export.sparse(m, x);"
        "before = list(warnings.filters)  # those of what torch imports at its first use are there\n"
        "assert pp.export.sparse(m, x).plan.choices[0].sparse; assert warnings.filters == before"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
