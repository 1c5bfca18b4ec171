"""Sparse inference: single layers give the same outputs as dense ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import powerprop as pp
from powerprop.export.csr import columns, product, rows
from powerprop.export.exported import Fast
from powerprop.export.layers import SparseConv, SparseLinear, sparse_layer
from sparse_nets import MODELS, pruned


@settings(max_examples=30, deadline=None)
@given(
    kernel=st.integers(1, 3), stride=st.integers(1, 2), padding=st.integers(0, 2), dilation=st.integers(1, 2),
    batch=st.integers(0, 3), block=st.sampled_from([1, 2**18]),
)  # fmt: skip
def test_convolutions(kernel: int, stride: int, padding: int, dilation: int, batch: int, block: int) -> None:
    from powerprop.export import layers

    layer = nn.Conv2d(3, 4, kernel, stride, padding, dilation)
    pp.prune(layer, 0.7)
    x = torch.randn(batch, 3, 7, 9)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(layers, "BLOCK", block)
        mine = sparse_layer(layer, many=True)
        assert isinstance(mine, SparseConv)
        torch.testing.assert_close(mine(x), layer(x))
        assert mine(x).is_contiguous()
        if batch:
            torch.testing.assert_close(mine(x[0]), layer(x[0]))


@pytest.mark.parametrize("shape", [(20,), (1, 20), (5, 20), (2, 3, 20), (0, 20)])
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


@pytest.mark.usefixtures("sparse_wins")
def test_activations_stay_columns_between_sparse_layers() -> None:
    fast = pp.export.sparse(pruned("mlp"), MODELS["mlp"][1](4))
    network = fast.network
    assert isinstance(network, Fast)
    called = [node.target for node in network.graph.graph.nodes if node.op.startswith("call")]
    assert called == ["flatten", columns, product, torch.relu_, product, torch.relu_, product, rows, "contiguous"]


def test_no_warning_reaches_the_user() -> None:
    code = (
        "import warnings, torch, powerprop as pp; before = list(warnings.filters);"
        "m = torch.nn.Linear(200, 200); pp.prune(m, 0.99); x = torch.randn(64, 200);"
        "assert pp.export.sparse(m, x).plan.choices[0].sparse; assert warnings.filters == before"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
