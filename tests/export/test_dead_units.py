"""Dead units and batch norms are gone, and the outputs are the same."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import powerprop as pp
from powerprop.export.dead_units import remove_dead_units
from powerprop.export.graph import Call, fold_batch_norms, trace
from powerprop_paper.models import mlp
from sparse_nets import MODELS, Branching, assert_same, pruned, seeded


def loses(net: nn.Module, x: Tensor, units: dict[str, int]) -> nn.Module:
    """The graph without dead units, which must be so many by layer; it answers as the network does."""
    graph = trace(copy.deepcopy(net.eval()), Call.of(x))
    assert remove_dead_units(graph) == units
    assert_same(graph, net, x)
    return graph


def put(layer: nn.Module, weight: list[list[float]], bias: list[float] | None = None) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight).view_as(layer.weight))
        if bias is not None:
            layer.bias.copy_(torch.tensor(bias))


def test_dead_units_by_hand() -> None:
    """Unit 0 has no inputs and says relu(0.5) = 0.5; nobody reads unit 1; unit 2 lives; unit 3 says relu(-1) = 0."""
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    put(net[0], [[0.0, 0], [1, 2], [3, 4], [0, 0]], [0.5, 1.0, 2.0, -1.0])
    put(net[2], [[2.0, 0, 1, 5], [4, 0, 0, 6]], [1.0, 1.0])
    graph = loses(net, torch.tensor([[1.0, -1.0], [0.5, 2.0]]), {"0": 3})
    first, last = graph.get_submodule("0"), graph.get_submodule("2")
    assert (first.weight.tolist(), first.bias.tolist()) == ([[3.0, 4.0]], [2.0])
    assert (last.weight.tolist(), last.bias.tolist()) == ([[1.0], [0.0]], [2.0, 3.0])  # 1 + 2 · 0.5 and 1 + 4 · 0.5


def test_dead_units_take_others_with_them_and_one_stays() -> None:
    """Nobody reads the second hidden layer's unit 1, so that nobody reads what it alone read in the first."""
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    put(net[2], [[1.0, 0.0], [0.0, 1.0]])
    put(net[4], [[1.0, 0.0]])
    loses(net, torch.randn(3, 2), {"0": 1, "2": 1})
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    put(net[2], [[0.0] * 4] * 2)
    loses(net, torch.randn(3, 3), {"0": 3})


def test_a_constant_channel_before_a_padded_convolution_stays_unless_it_is_zero() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1))
    put(net[0], [[0.0], [0.0], [1.0]], [0.7, -0.7, 0.0])  # 0.7 would end at the border; relu(-0.7) = 0 does not
    loses(net, torch.randn(2, 1, 5, 5), {"0": 1})


def test_channels_and_the_blocks_of_columns_that_read_them() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    with torch.no_grad():
        net[0].weight[1], net[0].bias[1], net[4].weight[:, 8:] = 0, 0.7, 0
    graph = loses(net, torch.randn(2, 1, 4, 4), {"0": 2})
    assert graph.get_submodule("4").weight.shape == (2, 4)


def test_a_layer_that_two_others_read_loses_what_neither_reads() -> None:
    net = Branching()
    with torch.no_grad():
        net.left.weight[:, :10], net.right.weight[:, 5:15], net.hidden.weight[20] = 0, 0, 0
    loses(net, torch.randn(4, 12), {"hidden": 6})


@pytest.mark.parametrize(
    "between", [nn.GELU(), nn.Hardswish(), nn.Softsign(), nn.Dropout(), nn.ELU(inplace=True), nn.Threshold(0.1, 2.0)]
)
def test_constants_go_through_functions_of_each_number(between: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(2, 3), between, nn.Linear(3, 2))
    with torch.no_grad():
        net[0].weight[1], net[0].bias[1] = 0, 0.7
    loses(net, torch.randn(4, 2), {"0": 1})


@pytest.mark.parametrize("between", [nn.Softmax(1), nn.LayerNorm(3), nn.PReLU(3)])
def test_units_that_other_functions_mix_or_tell_apart_stay(between: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(2, 3), between, nn.Linear(3, 2))
    with torch.no_grad():
        net[0].weight[1] = 0
    loses(net, torch.randn(4, 2), {})


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), sparsity=st.floats(0.3, 0.99), batch=st.integers(1, 4))
def test_removal_changes_no_output(seed: int, sparsity: float, batch: int) -> None:
    generator = seeded(seed)
    net = mlp([6, 9, 7, 3], generator=generator).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that keep nothing, which are the interesting ones
        pp.prune(net, sparsity)
    with torch.no_grad():
        for layer in net.children():
            layer.bias.normal_(generator=generator)
    x = torch.randn(batch, 6, generator=generator)
    graph = trace(copy.deepcopy(net), Call.of(x))
    remove_dead_units(graph)
    assert_same(graph, net, x)


def test_tied_and_reused_layers_keep_their_units() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.relu(self.twice(torch.relu(self.twice(x)))))

    net = Reused()
    with torch.no_grad():
        net.twice.weight[:4] = 0
    loses(net, torch.randn(3, 8), {})


def test_batch_norms_are_folded() -> None:
    net, x = pruned("conv6", 0.5), MODELS["conv6"][1](2)
    graph = trace(copy.deepcopy(net), Call.of(x))
    fold_batch_norms(graph)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in graph.modules())
    assert_same(graph, net, x)
