"""Sparse inference: the same outputs, dead units gone, the rule that chooses, and models of any structure."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp
from powerprop.continual import make_task
from powerprop.export import Choice, Exported, Plan, choose, measure, model, plan
from powerprop.export.calls import Call
from powerprop.export.csr import columns, copied_columns, product, rows, transposed
from powerprop.export.dead import remove_dead_units
from powerprop.export.exported import Fast
from powerprop.export.graph import fold_batch_norms, trace
from powerprop.export.layers import ColumnsLinear, SparseConv, in_form, sparse_layer
from powerprop.models import conv6, lenet_300_100, mlp, resnet20, wrn_22_2


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def set_times(monkeypatch: pytest.MonkeyPatch, times: Callable[..., dict[str, float]]) -> None:
    """Instead of those of layers and networks that depend on the machine."""
    for module in (measure, model):
        monkeypatch.setattr(module, "best_times", times)


@pytest.fixture
def sparse_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sparse layers are always faster."""
    order = {"dense": 8.0, "smaller": 4.0, "columns": 3.0, "sparse": 2.0, "all sparse": 1.0}
    set_times(monkeypatch, lambda calls, device, seconds=0: {n: order[n] for n in calls})


@pytest.fixture
def columns_win(monkeypatch: pytest.MonkeyPatch) -> None:
    order = {"dense": 8.0, "smaller": 4.0, "columns": 1.0, "sparse": 2.0, "all sparse": 3.0}
    set_times(monkeypatch, lambda calls, device, seconds=0: {n: order[n] for n in calls})


@pytest.fixture
def dense_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    order = {"dense": 1.0, "smaller": 4.0, "columns": 3.0, "sparse": 2.0, "all sparse": 8.0}
    set_times(monkeypatch, lambda calls, device, seconds=0: {n: order[n] for n in calls})


class Branching(nn.Module):
    """Two heads read one hidden layer; nothing of it is a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(12, 30)
        self.left, self.right = nn.Linear(30, 4, bias=False), nn.Linear(30, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.hidden(x))
        return self.left(h), self.right(h)


class Looking(nn.Module):
    """Python code that depends on the numbers: cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 20), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h if h.sum() > 0 else -h)


class Tokens(nn.Module):
    """Linear layers over three dimensions, with a residual connection and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Convolutions(nn.Module):
    """1x1 and other kernels, strides, dilation, groups and paddings of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(12, 12, 3, padding="same", dilation=2), nn.SiLU(),
            nn.Conv2d(12, 12, 3, groups=3), nn.BatchNorm2d(12), nn.ReLU(),
            nn.Conv2d(12, 6, (1, 3), padding=(0, 1), padding_mode="reflect", bias=False), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.out = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (lambda: mlp([20, 40, 30, 5], generator=seeded()), lambda n: torch.randn(n, 20, generator=seeded())),
    "lenet": (lambda: lenet_300_100(generator=seeded()), lambda n: torch.rand(n, 1, 28, 28, generator=seeded())),
    "conv6": (
        lambda: conv6(width=0.1, batch_norm=True, generator=seeded()),
        lambda n: torch.rand(n, 3, 32, 32, generator=seeded()),
    ),
    "resnet20": (lambda: resnet20(generator=seeded()), lambda n: torch.rand(n, 3, 16, 16, generator=seeded())),
    "wrn": (lambda: wrn_22_2(generator=seeded()), lambda n: torch.rand(n, 3, 8, 8, generator=seeded())),
    "branching": (Branching, lambda n: torch.randn(n, 12, generator=seeded())),
    "looking": (Looking, lambda n: torch.randn(n, 12, generator=seeded())),
    "tokens": (Tokens, lambda n: torch.randn(n, 6, 16, generator=seeded())),
    "convolutions": (Convolutions, lambda n: torch.randn(n, 3, 12, 12, generator=seeded())),
    "attention": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        lambda n: torch.randn(n, 5, 16, generator=seeded()),
    ),
    "sequence": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 2, 1)),
        lambda n: torch.randn(n, 4, 9, generator=seeded()),
    ),
}


def pruned(name: str, sparsity: float = 0.9) -> nn.Module:
    net = MODELS[name][0]().eval()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2, generator=seeded(1))
                module.running_var.uniform_(0.5, 2.0, generator=seeded(2))
            if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
                module.bias.uniform_(-0.5, 0.5, generator=seeded(3))
    pp.prune(net, sparsity)
    return net


@torch.no_grad()
def assert_same(mine: nn.Module, other: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(mine(x), other(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("sparse_wins")
def test_same_outputs_for_models_of_any_structure(name: str, batch: int) -> None:
    net, data = pruned(name), MODELS[name][1]
    before = copy.deepcopy(net.state_dict())
    fast = pp.export.sparse(net, data(batch))
    for n in (batch, 1, 2, 7):
        assert_same(fast, net, data(n))
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    if name != "attention":  # its fast path looks into the layers, so that none can be replaced
        assert any(c.form == "sparse" for c in fast.plan.choices)


@pytest.mark.usefixtures("dense_wins")
@pytest.mark.parametrize("name", MODELS)
def test_where_nothing_is_faster_the_model_itself_answers(name: str) -> None:
    net, x = pruned(name), MODELS[name][1](4)
    fast = pp.export.sparse(net, x)
    assert fast.plan.network == "dense"
    assert not fast.plan.removed
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(_all(fast(x)), _all(net(x)), strict=True))


def _all(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def test_the_rule() -> None:
    assert choose(1.0, 0.95) == "sparse"
    assert choose(1.0, 0.96) == "dense"
    assert choose(1.0, 0.5, margin=0.4) == "dense"
    assert choose(1.0, None) == "dense"


def test_the_rule_decides_by_the_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = iter([(1.0, 0.1, 0.2), (1.0, 0.98, 0.96), (1.0, 0.3, 0.2)])  # sparse and columns of fc1, fc2, fc3

    def measured(calls: dict[str, object], device: object, seconds: float = 0.0) -> dict[str, float]:
        if "smaller" in calls:
            return {"dense": 9.0, "smaller": 8.0, "columns": 7.0, "sparse": 5.0, "all sparse": 6.0}
        if "columns" in calls:
            return dict(zip(("dense", "sparse", "columns"), next(queue), strict=True))
        return {"dense": 9.0, "sparse": 5.0}  # the network once more

    set_times(monkeypatch, measured)
    net = mlp([20, 40, 30, 5], generator=seeded())
    pp.prune(net, 0.8)
    made = pp.export.sparse(net, torch.randn(3, 20)).plan
    assert [(c.layer, c.form, c.dense, c.sparse, c.columns) for c in made.choices] == [
        ("fc1", "sparse", 1.0, 0.1, 0.2),
        ("fc2", "dense", 1.0, 0.98, 0.96),
        ("fc3", "columns", 1.0, 0.3, 0.2),
    ]
    assert (made.network, made.batch, made.margin, made.speedup) == ("sparse", 3, 0.95, 1.8)


def test_a_network_that_was_fast_only_once_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(calls: dict[str, object], device: object, seconds: float = 0.0) -> dict[str, float]:
        return {n: 1.0 if n == "dense" else (2.0 if seconds == 0.1 else 0.5) for n in calls}

    set_times(monkeypatch, measured)
    made = pp.export.sparse(pruned("mlp"), MODELS["mlp"][1](3)).plan
    assert made.network == "dense"
    assert made.speedup == 1.0


def test_layers_that_are_not_sparse_are_not_measured() -> None:
    fast = pp.export.sparse(mlp([20, 40, 5], generator=seeded()), torch.randn(3, 20))
    assert [c.form for c in fast.plan.choices] == ["dense", "dense"]
    assert all(c.dense is None and "less than 50% is zero" in c.reason for c in fast.plan.choices)


def test_half_precision_stays_dense_where_there_is_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(layer: nn.Module, many: bool) -> nn.Module:
        raise RuntimeError('"addmm" not implemented')

    monkeypatch.setattr(measure, "sparse_layer", refuse)
    net = pruned("mlp").bfloat16()
    x = torch.randn(4, 20).bfloat16()
    fast = pp.export.sparse(net, x)
    assert all(c.form == "dense" and "no sparse product here" in c.reason for c in fast.plan.choices)
    torch.testing.assert_close(fast(x), net(x), rtol=0.05, atol=0.05)


def test_half_precision_runs() -> None:
    net, x = pruned("mlp").bfloat16(), torch.randn(4, 20).bfloat16()
    torch.testing.assert_close(pp.export.sparse(net, x)(x), net(x), rtol=0.05, atol=0.05)


# --- dead units -------------------------------------------------------------------------------------------------


def test_dead_units_by_hand() -> None:
    """Unit 0 has no inputs and says relu(0.5) = 0.5; nobody reads unit 1; unit 2 lives; unit 3 says relu(-1) = 0."""
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[0.0, 0], [1, 2], [3, 4], [0, 0]]))
        net[0].bias.copy_(torch.tensor([0.5, 1.0, 2.0, -1.0]))
        net[2].weight.copy_(torch.tensor([[2.0, 0, 1, 5], [4, 0, 0, 6]]))
        net[2].bias.copy_(torch.tensor([1.0, 1.0]))
    x = torch.tensor([[1.0, -1.0], [0.5, 2.0]])
    graph = trace(copy.deepcopy(net), Call.of(x))
    assert remove_dead_units(graph, [x]) == {"0": 3}
    first, last = graph.get_submodule("0"), graph.get_submodule("2")
    assert first.weight.tolist() == [[3.0, 4.0]]
    assert first.bias.tolist() == [2.0]
    assert last.weight.tolist() == [[1.0], [0.0]]
    assert last.bias.tolist() == [2.0, 3.0]  # 1 + 2 · 0.5 and 1 + 4 · 0.5
    torch.testing.assert_close(graph(x), net(x))


def test_dead_units_take_others_with_them() -> None:
    """Nobody reads the second hidden layer's unit 1, so that nobody reads what it alone read in the first."""
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).eval()
    with torch.no_grad():
        net[2].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        net[4].weight.copy_(torch.tensor([[1.0, 0.0]]))
    x = torch.randn(3, 2)
    graph = trace(copy.deepcopy(net), Call.of(x))
    assert remove_dead_units(graph, [x]) == {"0": 1, "2": 1}
    torch.testing.assert_close(graph(x), net(x))


def test_a_constant_channel_before_a_padded_convolution_stays_unless_it_is_zero() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1)).eval()
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([0.0, 0.0, 1.0]).view(3, 1, 1, 1))
        net[0].bias.copy_(torch.tensor([0.7, -0.7, 0.0]))  # 0.7 would end at the border; relu(-0.7) = 0 does not
    x = torch.randn(2, 1, 5, 5)
    graph = trace(copy.deepcopy(net), Call.of(x))
    assert remove_dead_units(graph, [x]) == {"0": 1}
    torch.testing.assert_close(graph(x), net(x))


def test_channels_and_the_blocks_of_columns_that_read_them() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)).eval()
    with torch.no_grad():
        net[0].weight[1] = 0
        net[0].bias[1] = 0.7
        net[4].weight[:, 8:] = 0
    x = torch.randn(2, 1, 4, 4)
    graph = trace(copy.deepcopy(net), Call.of(x))
    assert remove_dead_units(graph, [x]) == {"0": 2}
    assert graph.get_submodule("4").weight.shape == (2, 4)
    torch.testing.assert_close(graph(x), net(x))


def test_a_layer_that_two_others_read_loses_what_neither_reads() -> None:
    net = Branching().eval()
    with torch.no_grad():
        net.left.weight[:, :10] = 0
        net.right.weight[:, 5:15] = 0
        net.hidden.weight[20] = 0
    x = torch.randn(4, 12)
    graph = trace(copy.deepcopy(net), Call.of(x))
    assert remove_dead_units(graph, [x]) == {"hidden": 6}
    torch.testing.assert_close(graph(x), net(x))


def test_a_layer_in_which_all_is_dead_keeps_a_unit() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    nn.init.zeros_(net[2].weight)
    x = torch.randn(3, 3)
    graph = trace(copy.deepcopy(net), Call.of(x))
    assert remove_dead_units(graph, [x]) == {"0": 3}
    torch.testing.assert_close(graph(x), net(x))


@settings(max_examples=40, deadline=None)
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
    remove_dead_units(graph, [x])
    with torch.no_grad():
        torch.testing.assert_close(graph(x), net(x), rtol=1e-4, atol=1e-5)


def test_tied_and_reused_layers_keep_their_units() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.relu(self.twice(torch.relu(self.twice(x)))))

    net, x = Reused().eval(), torch.randn(3, 8)
    with torch.no_grad():
        net.twice.weight[:4] = 0
    assert remove_dead_units(trace(copy.deepcopy(net), Call.of(x)), [x]) == {}


def test_batch_norms_are_folded() -> None:
    net, x = pruned("conv6", 0.5), MODELS["conv6"][1](2)
    graph = trace(copy.deepcopy(net), Call.of(x))
    fold_batch_norms(graph)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in graph.modules())
    assert_same(graph, net, x)


# --- layers -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("shape", [(20,), (1, 20), (5, 20), (9, 20), (2, 3, 20), (0, 20)])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["columns", "sparse"])
def test_linear_layers(shape: tuple[int, ...], many: bool, bias: bool, form: str) -> None:
    layer = nn.Linear(20, 6, bias=bias)
    with torch.no_grad():
        layer.weight[:, 4:] = 0
        mine = in_form(layer, form, many)
        assert isinstance(mine, ColumnsLinear)
        assert (mine.used is not None) == many
        x = torch.randn(shape)
        torch.testing.assert_close(mine(x), layer(x))
        assert mine(x).is_contiguous()


@pytest.mark.usefixtures("sparse_wins")
def test_activations_stay_columns_between_sparse_layers() -> None:
    fast = pp.export.sparse(pruned("mlp"), MODELS["mlp"][1](4))
    assert calls_in(fast) == [
        copied_columns, product, torch.relu_, product, torch.relu_, product, rows, "contiguous",
    ]  # fmt: skip


@pytest.mark.usefixtures("columns_win")
def test_dense_layers_stay_on_columns_too() -> None:
    fast = pp.export.sparse(pruned("mlp"), MODELS["mlp"][1](4))
    assert fast.plan.network == "columns"
    assert {c.form for c in fast.plan.choices} == {"columns"}
    assert calls_in(fast) == [columns, product, torch.relu_, product, torch.relu_, product, rows, "contiguous"]


def test_dense_layers_have_their_transposes_at_hand() -> None:
    net, x = pruned("mlp"), MODELS["mlp"][1](4)
    fast = pp.export.sparse(net, x, plan=Plan("smaller", True, 4, 1))
    assert calls_in(fast) == [torch.addmm, torch.relu_, torch.addmm, torch.relu_, torch.addmm]
    assert_same(fast, net, x)


def calls_in(fast: Exported) -> list[object]:
    assert isinstance(fast.network, Fast)
    return [node.target for node in fast.network.graph.graph.nodes if node.op.startswith("call")]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("columns_win")
def test_same_outputs_on_columns(name: str, batch: int) -> None:
    net, data = pruned(name), MODELS[name][1]
    fast = pp.export.sparse(net, data(batch))
    for n in (batch, 1, 2, 9):
        assert_same(fast, net, data(n))


@pytest.mark.parametrize("forms", list(itertools.product(("dense", "columns", "sparse"), repeat=3)))
@pytest.mark.parametrize("batch", [1, 16])
def test_every_mixture_of_forms(forms: tuple[str, ...], batch: int) -> None:
    net, data = pruned("mlp"), MODELS["mlp"][1]
    choices = tuple(Choice(f"fc{i}", form, 0.9) for i, form in enumerate(forms, 1))
    fast = pp.export.sparse(net, data(batch), plan=Plan("sparse", True, batch, 1, choices=choices))
    for n in (0, 1, 2, 16):
        assert_same(fast, net, data(n))


def test_a_form_that_a_layer_does_not_have() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 1))
    wanted = Plan("sparse", True, 2, 1, choices=(Choice("0", "columns", 0.9),))
    with pytest.raises(ValueError, match="a Conv2d layer has no form 'columns'"):
        pp.export.sparse(net, torch.randn(2, 1, 4, 4), plan=wanted)


@settings(max_examples=30, deadline=None)
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
    choices = tuple(Choice(f"fc{i}", "sparse", 0.9) for i in (1, 2, 3))
    fast = pp.export.sparse(net, x, plan=Plan("sparse", True, 16, 1, choices=choices))
    mine, wanted = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (fast, net))
    torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_no_warning_reaches_the_user() -> None:
    code = (
        "import warnings, torch, powerprop as pp; before = list(warnings.filters);"
        "m = torch.nn.Linear(200, 200); pp.prune(m, 0.99); x = torch.randn(64, 200);"
        "assert pp.export.sparse(m, x).plan.choices[0].sparse; assert warnings.filters == before"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


# --- the exported network -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sparse_wins")
def test_a_network_is_exported_for_its_arguments() -> None:
    net = mlp([12, 20, 3], heads=3, generator=seeded())
    pp.prune(net, 0.8)
    x = torch.randn(4, 12)
    fast = pp.export.sparse(net, (x, 1))
    with torch.no_grad():
        wanted = net(x, 1)
    for outputs in (fast(x, 1), fast(x, task=1), fast(x=x, task=1), fast(x)):
        torch.testing.assert_close(outputs, wanted)
    with pytest.raises(ValueError, match="exported for task=1, called with task=2: export it again"):
        fast(x, 2)
    with pytest.raises(TypeError, match="exported for the arguments x, task; it was called with 1 by place and speed"):
        fast(x, speed=3)
    with pytest.raises(TypeError, match="called with 0 by place and none by name"):
        fast()


@pytest.mark.usefixtures("sparse_wins")
def test_named_arguments_and_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 20), nn.Linear(4, 20)

        def forward(self, left: Tensor, scale: float = 1.0, *, right: Tensor) -> Tensor:
            return torch.relu(self.a(left)) * scale + self.b(right)

    net = Two()
    pp.prune(net, 0.8)
    example = {"left": torch.randn(3, 6), "right": torch.randn(3, 4)}
    fast = pp.export.sparse(net, example)
    assert fast.plan.traced
    torch.testing.assert_close(fast(**example), net(**example))


@pytest.mark.parametrize("network", ["dense", "smaller"])
def test_hooks_run(network: str) -> None:
    net, x = pruned("mlp"), MODELS["mlp"][1](4)
    fast = pp.export.sparse(net, x, plan=Plan(network, True, 4, 1))
    wanted = fast(x)
    seen: list[object] = []
    handles = [
        fast.register_forward_pre_hook(lambda module, args: seen.append("before")),
        fast.register_forward_hook(lambda module, args, output: output + 1),
    ]
    torch.testing.assert_close(fast(x), wanted + 1)
    for handle in handles:
        handle.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    torch.testing.assert_close(fast(x), wanted)
    everywhere.remove()
    torch.testing.assert_close(fast(x), wanted)
    assert seen[0] == "before"
    assert seen[-1] is Exported


def test_hooks_of_the_model_itself_run() -> None:
    net, x = pruned("mlp"), MODELS["mlp"][1](4)
    fast = pp.export.sparse(net, x, plan=Plan("dense", True, 4, 1))
    wanted = fast(x)
    fast.network.register_forward_hook(lambda module, args, output: output + 2)
    torch.testing.assert_close(fast(x), wanted + 2)


@pytest.mark.usefixtures("sparse_wins")
def test_a_copy_has_tensors_of_its_own() -> None:
    net, x = pruned("mlp"), MODELS["mlp"][1](4)
    fast = pp.export.sparse(net, x)
    other, wanted = copy.deepcopy(fast), fast(x)
    with torch.no_grad():
        for name, buffer in other.named_buffers():
            if name.endswith(("bias", "stacked")):
                buffer.add_(1)
    assert torch.equal(fast(x), wanted)
    assert not torch.allclose(other(x), wanted)
    assert other.double()(x.double()).dtype == torch.float64
    assert torch.equal(fast(x), wanted)


@pytest.mark.usefixtures("sparse_wins")
def test_copies_and_types() -> None:
    net, x = pruned("mlp"), MODELS["mlp"][1](4)
    fast = pp.export.sparse(net, x)
    assert torch.equal(copy.deepcopy(fast)(x), fast(x))
    wide = copy.deepcopy(fast).double()
    assert wide(x.double()).dtype == torch.float64
    torch.testing.assert_close(wide(x.double()).float(), fast(x))
    with pytest.raises(ValueError, match="an exported network only answers"):
        fast.train()
    assert not fast.eval().training


@pytest.mark.usefixtures("sparse_wins")
def test_what_follows_may_ask_for_rows_in_memory() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 20)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.a(x)).view(-1, 4, 5)

    net, x = Viewing(), torch.randn(3, 6)
    pp.prune(net, 0.8)
    assert_same(pp.export.sparse(net, x), net, x)


def test_models_that_are_not_one_graph_say_so() -> None:
    fast = pp.export.sparse(pruned("looking"), MODELS["looking"][1](3))
    assert not fast.plan.traced
    assert "layer by layer, batch norms and dead units stay: the model is not one graph" in str(fast.plan)


@pytest.mark.usefixtures("sparse_wins")
@pytest.mark.parametrize("named", [False, True])
def test_a_transformer_of_hugging_face(named: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    net = GPT2LMHeadModel(config).eval()
    pp.prune(net, 0.9, where=["*.c_attn.weight", "*.c_proj.weight", "*.c_fc.weight"])
    ids = torch.randint(0, 16, (2, 5), generator=seeded())
    fast = pp.export.sparse(net, {"input_ids": ids} if named else ids)
    assert sum(c.form == "sparse" for c in fast.plan.choices) == 4
    with torch.no_grad():
        torch.testing.assert_close(fast(input_ids=ids).logits, net(ids).logits, rtol=1e-4, atol=1e-5)


def test_random_numbers_are_not_frozen_into_a_graph() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 20)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + torch.randn(20)

    net, x = Noisy(), torch.randn(3, 6)
    pp.prune(net, 0.9)
    fast = pp.export.sparse(net, x)
    assert fast.plan.network == "dense"
    assert not torch.equal(fast(x), fast(x))


def test_a_plan_is_followed_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = pruned("lenet"), MODELS["lenet"][1](8)
    made = pp.export.sparse(net, x).plan
    chosen = Plan("sparse", True, 8, 1, choices=(Choice("fc1", "sparse", 0.9), Choice("fc2", "dense", 0.9)))

    def never(*_: object, **__: object) -> dict[str, float]:
        raise AssertionError("measured")

    set_times(monkeypatch, never)
    for wanted in (made, chosen, Plan.from_json(made.to_json())):
        fast = pp.export.sparse(net, x, plan=wanted)
        assert fast.plan.choices == wanted.choices
        assert_same(fast, net, x)
    with pytest.raises(ValueError, match="the plan is of another model: this one has no layer conv9"):
        pp.export.sparse(net, x, plan=Plan("sparse", True, 8, 1, choices=(Choice("conv9", "sparse", 0.9),)))


def test_bad_input() -> None:
    net = mlp([4, 3, 2])
    for example in (None, (), {}, "x", 3):
        with pytest.raises(TypeError, match="example must be a tensor, a tuple of arguments or a dict"):
            pp.export.sparse(net, example)
    with pytest.raises(ValueError, match=r"margin must be in \(0, 1\], got 2"):
        pp.export.sparse(net, torch.randn(1, 4), margin=2)


def test_the_textbook_form_is_folded_first() -> None:
    net = mlp([12, 20, 3], generator=seeded())
    pp.prune(net, 0.8)
    x = torch.randn(4, 12)
    with torch.no_grad():
        wanted = net(x)
    pp.reparametrize(net, 2.0)
    torch.testing.assert_close(pp.export.sparse(net, x)(x), wanted)


def test_a_task_of_a_continual_learner() -> None:
    net = mlp([8, 64, 2], generator=seeded())
    learner = pp.EfficientPackNet(net, lambda p: torch.optim.SGD(p, lr=0.5), alpha=1.5, gamma=0.9, steps=60)
    generator = seeded(5)
    xs = [torch.randn(128, 8, generator=generator) + 3 * t for t in range(2)]
    for t, x in enumerate(xs):
        learner.learn(make_task((x, (x[:, t] > 3 * t).long()), index=t))
    for t, x in enumerate(xs):
        learner.nets.show(t)
        fast = pp.export.sparse(net, x)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
        assert torch.equal(fast(x).argmax(1), learner.predict(x, task=t).label)


def test_times_are_the_least_of_interleaved_rounds() -> None:
    order: list[str] = []
    times = plan.best_times(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, torch.device("cpu"), seconds=0
    )
    assert times.keys() == {"a", "b"}
    assert all(t > 0 for t in times.values())
    assert order[:4] == ["a", "b", "a", "b"]


def test_exported_is_a_public_name() -> None:
    assert isinstance(pp.export.sparse(mlp([4, 3, 2]), torch.randn(1, 4)), Exported)
