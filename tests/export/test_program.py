"""Compiled programs give the outputs of the layers that they were made of, at any shapes, batches and threads."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

import powerprop as pp
from powerprop import kernel
from powerprop.export import Choice, Exported, Plan
from powerprop.export.lower import layer_program
from powerprop.export.program import Program
from random_graphs import check
from sparse_nets import MODELS, assert_same, pruned, seeded


def planned(batch: int, *forms: str) -> Plan:
    """The three layers of the network "mlp" in these forms."""
    choices = tuple(Choice(f"fc{i}", form, 0.9) for i, form in enumerate(forms, 1))
    return Plan("sparse" if forms else "smaller", True, batch, 1, choices=choices)


def calls_in(fast: Exported) -> list[object]:
    assert isinstance(fast.network, fx.GraphModule)
    return [node.target for node in fast.network.graph.nodes if node.op.startswith("call")]


def program_of(layer: nn.Module, x: Tensor) -> Program:
    made = layer_program(layer, x)
    assert isinstance(made, Program)
    return made


@settings(max_examples=60, deadline=None)
@given(
    kernel_size=st.integers(1, 4), stride=st.integers(1, 3), padding=st.integers(0, 3), dilation=st.integers(1, 2),
    batch=st.sampled_from([1, 3, 16, 17, 40]), groups=st.sampled_from([1, 2, 4]), bias=st.booleans(),
)  # fmt: skip
def test_convolutions(
    kernel_size: int, stride: int, padding: int, dilation: int, batch: int, groups: int, bias: bool
) -> None:
    layer = nn.Conv2d(4, 8, kernel_size, stride, padding, dilation, groups, bias)
    pp.prune(layer, 0.7)
    x = torch.randn(batch, 4, 9, 12)
    with torch.no_grad():
        mine = program_of(layer, x)
        torch.testing.assert_close(mine(x), layer(x), rtol=1e-5, atol=1e-5)
        assert mine(x).is_contiguous()
        torch.testing.assert_close(mine(x[0]), layer(x[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(20,), (1, 20), (5, 20), (9, 20), (2, 3, 20), (0, 20), (300, 20)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers(shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(20, 6, bias=bias)
    with torch.no_grad():
        layer.weight[:, 4:] = 0
        mine, x = program_of(layer, torch.randn(4, 20)), torch.randn(shape)
        torch.testing.assert_close(mine(x), layer(x))
        assert mine(x).is_contiguous()


@pytest.mark.parametrize("batch", [1, 16])
def test_a_chain_is_one_call_and_dense_layers_have_their_transposes_at_hand(batch: int) -> None:
    net, x = pruned("mlp"), MODELS["mlp"][1](batch)
    assert calls_in(pp.export.sparse(net, x, plan=planned(batch, "sparse", "sparse", "sparse"))) == ["program0"]
    dense = [torch.addmm, torch.relu_, torch.addmm, torch.relu_, torch.addmm]
    assert calls_in(pp.export.sparse(net, x, plan=planned(batch))) == dense


@pytest.mark.parametrize("forms", list(itertools.product(("dense", "sparse"), repeat=3)))
@pytest.mark.parametrize("batch", [1, 16])
def test_every_mixture_of_forms(forms: tuple[str, ...], batch: int) -> None:
    net, data = pruned("mlp"), MODELS["mlp"][1]
    fast = pp.export.sparse(net, data(batch), plan=planned(batch, *forms))
    for n in (0, 1, 2, 16):
        assert_same(fast, net, data(n))


@pytest.mark.parametrize("batch", [1, 2, 16, 40])
@pytest.mark.parametrize("block", range(8))
def test_random_graphs(block: int, batch: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        check(seed, batch)


@pytest.mark.parametrize("batch", [1, 16, 33, 64])
@pytest.mark.parametrize("name", ["mlp", "conv6", "convolutions", "preactivated", "tokens"])
def test_the_threads_do_not_change_a_bit(name: str, batch: int) -> None:
    net, x = pruned(name), MODELS[name][1](batch)
    layers = tuple(Choice(n, "sparse", 0.9) for n, m in net.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear)))
    fast, threads = (
        pp.export.sparse(net, x, plan=Plan("sparse", True, batch, 1, choices=layers)),
        torch.get_num_threads(),
    )
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(fast(x))
    torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_passes_through_the_weights_that_are_there(bad: float, batch: int) -> None:
    layer = nn.Linear(6, 4)
    with torch.no_grad():
        layer.weight[:2, 3] = 0
        layer.weight[2:, 3] = 1
        x = torch.randn(batch, 6)
        x[:, 3] = bad
        y = program_of(layer, x)(x)
    assert y[:, :2].isfinite().all()
    assert not y[:, 2:].isfinite().any()


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "hardswish", "sigmoid", "tanh", "relu6"])
def test_functions(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(50, 50)

        def forward(self, x: Tensor) -> Tensor:
            return getattr(F, name)(self.fc(x))

    net = Net()
    with torch.no_grad():
        net.fc.weight.copy_(torch.eye(50))
        net.fc.bias.zero_()
    for scale in (1e-4, 1.0, 30.0):
        x = torch.randn(40, 50, generator=seeded()) * scale
        fast = pp.export.sparse(net, x, plan=Plan("sparse", True, 40, 1, choices=(Choice("fc", "sparse", 0.9),)))
        assert calls_in(fast) == ["program0"]
        torch.testing.assert_close(fast(x), net(x), rtol=2e-6, atol=1e-6 * scale)
        x[3, 4] = float("nan")
        assert fast(x)[3].isnan().sum() == 1


def test_what_the_code_does_not_suit_is_left_to_torch() -> None:
    net, x = pruned("mlp"), MODELS["mlp"][1](16)
    fast = pp.export.sparse(net, x, plan=planned(16, "sparse", "sparse", "sparse"))
    wanted = net(x)
    mapped = torch.func.vmap(fast.network)(x[:, None])[:, 0]
    for y in (fast(x.t().contiguous().t()), fast(torch.cat([x, x], 1)[:, :20]), mapped):
        torch.testing.assert_close(y, wanted)
    with mock.patch.object(kernel, "_loaded", return_value=(None, "torch")):
        torch.testing.assert_close(fast(x), wanted)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fast(x[:, :7])
    torch.testing.assert_close(copy.deepcopy(fast).double()(x.double()), wanted.double())


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
        "assert pp.export.sparse(m, x).plan.choices; assert warnings.filters == before"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
