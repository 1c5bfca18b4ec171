"""Every sparse-training method on eight weights worked out by hand, and the errors for bad input."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import powerprop as pp
from nets import batch, net, train
from powerprop.entries import places
from powerprop.schedules import constant
from powerprop.sparsify import Method
from powerprop.sparsify.base import share, top_among
from powerprop.sparsify.prune import top_k
from sparse import counts

every_alpha = pytest.mark.parametrize("alpha", [1.0, 2.0])


class Rows(nn.Module):
    """Layers of eight weights each, named a, b, ..."""

    def __init__(self, **rows: list[float]) -> None:
        super().__init__()
        for name, row in rows.items():
            layer = nn.Linear(8, 1, bias=False)
            with torch.no_grad():
                layer.weight.copy_(torch.tensor([row]))
            self.add_module(name, layer)

    def __getitem__(self, name: str) -> Tensor:
        return self.get_parameter(f"{name}.weight")


def sgd(model: nn.Module, method: Method, alpha: float = 1.0, momentum: float = 0.0) -> pp.Powerprop:
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return pp.Powerprop(base, model, alpha, sparsify=method)


def put(model: Rows, optimizer: pp.Powerprop, **rows: list[float]) -> None:
    """Choose weights, and make those that are not zero the mask."""
    optimizer.set_masks()
    with torch.no_grad():
        for name, row in rows.items():
            model[name].copy_(torch.tensor([row]))
    masks = {f"{n}.weight": torch.tensor([row]) != 0 for n, row in rows.items()}
    optimizer.set_masks(masks, masks, keep=False)


def push(model: Rows, optimizer: pp.Powerprop, **grads: list[float]) -> None:
    """One step with these gradients."""
    for name, grad in grads.items():
        model[name].grad = torch.tensor([grad])
    optimizer.step()


def on(optimizer: pp.Powerprop, name: str = "a") -> list[int]:
    """Which weights are active."""
    return optimizer.active[f"{name}.weight"].flatten().nonzero().flatten().tolist()


# --- at initialisation --------------------------------------------------------------------------------------------


@every_alpha
def test_static_masks_never_move(alpha: float) -> None:
    model = net()
    optimizer = pp.Powerprop(torch.optim.Adam(model.parameters()), model, alpha, sparsify=pp.Static(0.75, seed=1))
    before = optimizer.active
    assert counts(optimizer) == {"0.weight": 18, "2.weight": 24, "4.weight": 6}
    train(model, optimizer, 10)
    assert optimizer.active == before == pp.Masks.nonzero(model)


@every_alpha
def test_snip_by_hand(alpha: float) -> None:
    # |w·g| of a: 8 6 3 4 5 2 1 0, of b: all 2.5; half of 16 stay: five of a and three of b, the first among equals
    model = Rows(a=[8.0, -3.0, 1.0, -2.0, 5.0, 2.0, 1.0, 4.0], b=[1.0] * 8)
    optimizer = sgd(model, pp.SNIP(0.5), alpha, momentum=0.9)
    assert pp.sparsity(model).total == 0
    before = model["a"].tolist()[0]
    push(model, optimizer, a=[1.0, 2.0, 3.0, -2.0, -1.0, 1.0, -1.0, 0.0], b=[-2.5] * 8)
    assert (on(optimizer), on(optimizer, "b")) == ([0, 1, 2, 3, 4], [0, 1, 2])
    assert model["a"].tolist()[0] == pytest.approx([*before[:5], 0, 0, 0])
    push(model, optimizer, a=[1.0] * 8, b=[1.0] * 8)
    assert (on(optimizer), on(optimizer, "b")) == ([0, 1, 2, 3, 4], [0, 1, 2])
    assert model["a"].tolist()[0][0] < 8


def test_snip_without_gradients_says_what_to_do() -> None:
    model = Rows(a=[1.0] * 8, b=[1.0] * 8)
    optimizer = sgd(model, pp.SNIP(0.5))
    with pytest.raises(ValueError, match=r"no weight has one: call backward\(\) before step\(\)"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"'b\.weight' got none: .* leave it out through where="):
        push(model, optimizer, a=[1.0] * 8)


# --- drop and grow ------------------------------------------------------------------------------------------------

# Two of four are dropped: -0.1 and 0.3. Outside the kept 0.5 and -0.7, the gradient is largest at the second (which was
# only just dropped, so it stays as it was) and at the sixth.
WEIGHTS = [0.5, -0.1, 0.3, -0.7, 0.0, 0.0, 0.0, 0.0]
GRADS = [9.0, 5.0, 0.0, 9.0, -1.0, 3.0, 0.5, -2.0]


@pytest.mark.parametrize(("alpha", "grown"), [(1.0, 0.0), (2.0, -0.3)])
def test_rigl_by_hand(alpha: float, grown: float) -> None:
    model = Rows(a=[1.0] * 8)
    optimizer = sgd(model, pp.RigL(0.5, interval=2, fraction=constant(0.5), stop=10), alpha, momentum=0.9)
    push(model, optimizer, a=[0.0] * 8)
    put(model, optimizer, a=WEIGHTS)
    optimizer.state[model["a"]]["momentum_buffer"] = torch.arange(1.0, 9.0).view(1, 8)
    push(model, optimizer, a=GRADS)
    assert on(optimizer) == [0, 1, 3, 5]
    assert model["a"].tolist()[0] == pytest.approx([0.5, -0.1, 0.0, -0.7, 0.0, grown, 0.0, 0.0])
    assert optimizer.state[model["a"]]["momentum_buffer"].tolist() == [[1, 2, 0, 4, 5, 0, 7, 8]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_changed_from_outside_decide_who_is_dropped(dtype: torch.dtype) -> None:
    model = Rows(a=[1.0] * 8).to(dtype)
    optimizer = sgd(model, pp.RigL(0.5, interval=1, fraction=constant(0.5), stop=10), alpha=2.0)
    put(model, optimizer, a=WEIGHTS)
    with torch.no_grad():
        model["a"].copy_(torch.tensor([[0.1, 0.5, -0.7, 0.3, 0, 0, 0, 0]]))
    model["a"].grad = torch.tensor([GRADS], dtype=dtype)
    model["a"].grad[0, :4] = 0
    optimizer.step()
    assert on(optimizer) == [1, 2, 5, 7]


@every_alpha
def test_set_by_hand(alpha: float) -> None:
    seen = set()
    for seed in range(20):
        model = Rows(a=[1.0] * 8)
        optimizer = sgd(model, pp.SET(0.5, interval=1, fraction=constant(0.5), stop=10, seed=seed), alpha)
        put(model, optimizer, a=WEIGHTS)
        push(model, optimizer, a=GRADS)
        assert {0, 3} < set(on(optimizer))
        assert len(on(optimizer)) == 4
        gone, come = {1, 2} - set(on(optimizer)), set(on(optimizer)) - {0, 1, 2, 3}
        size = sum(abs(WEIGHTS[i]) for i in gone) / max(1, len(gone)) if alpha > 1 else 0.0
        assert [abs(model["a"][0, i].item()) for i in come] == pytest.approx([size] * len(come))
        seen |= {(i, model["a"][0, i].item() > 0) for i in come}
    assert {i for i, _ in seen} == {4, 5, 6, 7}
    assert {up for _, up in seen} == ({True, False} if alpha > 1 else {False})


def test_the_fraction_follows_the_cosine_and_the_masks_come_to_rest() -> None:
    model = Rows(a=[float(i) for i in range(1, 9)])
    optimizer = sgd(model, pp.RigL(0.5, steps=40, interval=10, fraction=0.8, stop=0.75))
    moved = []
    for step in range(1, 41):
        before = set(on(optimizer))
        put(model, optimizer, a=[float(i in before) * (i + 1) for i in range(8)])
        push(model, optimizer, a=[0.0 if i in before else 1.0 for i in range(8)])
        if set(on(optimizer)) != before:
            moved.append((step, len(before - set(on(optimizer)))))
    # fractions of four weights: at 10 of 30 steps 0.4·(1 + cos 60°) = 0.6, at 20 0.4·(1 - 0.5) = 0.2; at 30 it is over
    assert moved == [(10, 2)]


def test_grown_weights_have_the_smallest_magnitude_of_the_layer_when_none_was_dropped() -> None:
    model = Rows(a=[1.0] * 8, b=[1.0] * 8)
    optimizer = sgd(model, pp.SNFS(0.5, interval=1, fraction=constant(0.25), stop=10), 2.0, momentum=0.9)
    put(model, optimizer, a=[0.9, 0.8, 0.7, 0.6, 0, 0, 0, 0], b=[0.4, 0.3, 0.2, 0.5, 0, 0, 0, 0])
    for name, size in (("a", 0.0), ("b", 1.0)):
        optimizer.state[model[name]]["momentum_buffer"] = torch.tensor([[size] * 4 + [2.0, -2.0, 0, 0]])
    # each loses one weight, both go to b: its own lost one gives the magnitude
    push(model, optimizer, a=[1.0] * 8, b=[1.0] * 8)
    assert on(optimizer) == [0, 1, 2]
    assert model["b"].tolist()[0] == pytest.approx([0.4, 0.3, 0, 0.5, -0.2, 0.2, 0, 0], abs=1e-6)


def test_a_layer_that_lost_nothing_grows_at_its_smallest_magnitude() -> None:
    model = Rows(a=[1.0] * 8, b=[1.0] * 8)
    optimizer = sgd(model, pp.SNFS(0.5, interval=1, fraction=constant(0.3), stop=10), 2.0, momentum=0.9)
    put(model, optimizer, a=[0.9, 0.8, 0.7, 0.6, 0.5, 0, 0, 0], b=[0.4, 0.3, 0.2, 0, 0, 0, 0, 0])
    for name, size in (("a", 0.0), ("b", 1.0)):
        optimizer.state[model[name]]["momentum_buffer"] = torch.tensor([[size] * 3 + [0.0] * 4 + [-7.0]])
    push(model, optimizer, a=[1.0] * 8, b=[1.0] * 8)
    assert on(optimizer) == [0, 1, 2, 3]
    assert model["b"].tolist()[0] == pytest.approx([0.4, 0.3, 0.2, 0, 0, 0, 0, 0.2], abs=1e-6)


# --- SNFS ---------------------------------------------------------------------------------------------------------


def snfs(momenta: dict[str, list[float]], **options: object) -> tuple[Rows, pp.Powerprop]:
    model = Rows(a=[1.0] * 8, b=[1.0] * 8)
    method = pp.SNFS(0.5, interval=1, fraction=constant(0.5), stop=10, **options)  # type: ignore[arg-type]
    optimizer = sgd(model, method, momentum=0.9)
    put(model, optimizer, a=WEIGHTS, b=WEIGHTS)
    for name, momentum in momenta.items():
        optimizer.state[model[name]]["momentum_buffer"] = torch.tensor([momentum])
    push(model, optimizer, a=GRADS, b=GRADS)
    return model, optimizer


def test_snfs_redistributes_by_hand() -> None:
    # mean |momentum| of the active weights is 3 against 1, four weights were lost: a grows three, b one
    _, optimizer = snfs({"a": [3.0, -3, 3, 3, 0, -5, 4, 1], "b": [1.0, 0, 0, 3, -9, 9.5, 0, 0]})
    assert on(optimizer) == [0, 1, 3, 5, 6]
    assert on(optimizer, "b") == [0, 3, 5]


def test_snfs_gives_no_layer_more_than_it_can_take() -> None:
    _, optimizer = snfs({"a": [1.0] * 8, "b": [0.0] * 8})
    assert (len(on(optimizer)), len(on(optimizer, "b"))) == (6, 2)
    model = Rows(a=[1.0] * 8, b=[1.0] * 8)
    optimizer = sgd(model, pp.SNFS(0.25, interval=1, fraction=constant(0.5), stop=10), momentum=0.9)
    for name, size in (("a", 1.0), ("b", 0.0)):
        optimizer.state[model[name]]["momentum_buffer"] = torch.full((1, 8), size)
    # six weights each; three are lost in each and a has room for five of the six
    push(model, optimizer, a=GRADS, b=GRADS)
    assert (len(on(optimizer)), len(on(optimizer, "b"))) == (8, 4)


def test_snfs_leaves_layers_with_a_rule_of_their_own_their_count() -> None:
    _, optimizer = snfs({"a": [1.0] * 8, "b": [0.0] * 8}, layers={"b.*": 0.5})
    assert (len(on(optimizer)), len(on(optimizer, "b"))) == (4, 4)


@pytest.mark.parametrize("method", [pp.RigL, pp.SNFS])
def test_weights_too_small_for_half_precision_grow_all_the_same(method: Callable[..., Method]) -> None:
    model = Rows(a=[1.0] * 8).half()
    optimizer = sgd(model, method(0.5, steps=10, interval=1), 2.0)
    master = optimizer.masters["a.weight"]
    before = optimizer.active["a.weight"]
    master.put(before, torch.full((1, 8), 1e-9))
    model["a"].grad = (~before).half()
    optimizer.step()
    now = optimizer.active["a.weight"]
    assert not torch.equal(now, before)
    assert master.theta()[now].abs().tolist() == pytest.approx([1e-9] * 4)


def test_snfs_keeps_an_average_where_the_base_optimiser_has_none() -> None:
    model = Rows(a=[1.0] * 8)
    method = pp.SNFS(0.5, interval=10, steps=100)
    optimizer = sgd(model, method)
    push(model, optimizer, a=[1.0] * 8)
    push(model, optimizer, a=[2.0] * 8)
    assert method.average["a.weight"].tolist()[0] == pytest.approx([0.9 * 0.1 + 0.2] * 8)
    optimizer = sgd(model, method := pp.SNFS(0.5, interval=10, steps=100), momentum=0.9)
    push(model, optimizer, a=[1.0] * 8)
    push(model, optimizer, a=[2.0] * 8)
    assert not method.average


# --- DSR ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "height"),
    # two of four are dropped: as asked, within 10% of it on either side, too few, too many
    [(0.5, 0.2), (0.46, 0.2), (0.54, 0.2), (0.9, 0.4), (0.25, 0.1)],
)
def test_dsr_adapts_its_threshold(fraction: float, height: float) -> None:
    model = Rows(a=[1.0] * 8)
    method = pp.DSR(0.5, interval=1, fraction=fraction, stop=10, threshold=0.2)
    optimizer = sgd(model, method)
    put(model, optimizer, a=[0.5, -0.1, 0.15, -0.7, 0.0, 0.0, 0.0, 0.0])
    push(model, optimizer, a=GRADS)
    assert method.height == pytest.approx(height)
    assert {0, 3} < set(on(optimizer))
    assert len(on(optimizer)) == 4


def test_dsr_regrows_where_weights_survive() -> None:
    # a loses one of four, b three of four: four to grow, three survivors against one
    model = Rows(a=[1.0] * 8, b=[1.0] * 8)
    optimizer = sgd(model, pp.DSR(0.5, interval=1, stop=10, threshold=0.2))
    put(model, optimizer, a=[0.5, 0.3, 0.1, -0.7, 0, 0, 0, 0], b=[0.5, 0.1, 0.1, -0.1, 0, 0, 0, 0])
    push(model, optimizer, a=GRADS, b=GRADS)
    assert (len(on(optimizer)), len(on(optimizer, "b"))) == (6, 2)
    assert {0, 1, 3} < set(on(optimizer))
    assert 0 in on(optimizer, "b")


@every_alpha
def test_dsr_leaves_every_layer_at_least_one_weight(alpha: float) -> None:
    model = Rows(a=[1.0] * 8, b=[1.0] * 8)
    optimizer = sgd(model, pp.DSR(0.5, interval=1, stop=10, threshold=5.0), alpha)
    put(model, optimizer, a=[0.5, 0.3, 0.1, -0.7, 0, 0, 0, 0], b=[9.0, 8.0, 7.0, 6.0, 0, 0, 0, 0])
    push(model, optimizer, a=GRADS, b=GRADS)
    assert 3 in on(optimizer)
    assert len(on(optimizer)) + len(on(optimizer, "b")) == 8


# --- iterative pruning --------------------------------------------------------------------------------------------


@every_alpha
def test_iterative_pruning_by_hand(alpha: float) -> None:
    # 75% from step 2 to step 6 in two prunings: after four steps 0.75·(1 - 1/8) of 8 = 5.25 are gone, after six 6
    model = Rows(a=[0.1, -0.8, 0.2, 0.7, -0.3, 0.6, 0.4, -0.5])
    optimizer = sgd(model, pp.IterativePruning(0.75, steps=10, start=0.2, stop=0.6, interval=2), alpha)
    left = []
    for _ in range(10):
        push(model, optimizer, a=[0.0] * 8)
        left.append(on(optimizer))
    everything = list(range(8))
    assert left == [everything] * 3 + [[1, 3, 5]] * 2 + [[1, 3]] * 5


def test_iterative_pruning_never_revives() -> None:
    model = Rows(a=[0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0])
    optimizer = sgd(model, pp.IterativePruning(0.5, start=0, stop=4, interval=2))
    previous = set(range(8))
    for _ in range(4):
        push(model, optimizer, a=[4.0, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0])  # all weights become zero at the first step
        assert set(on(optimizer)) <= previous
        previous = set(on(optimizer))
    assert len(previous) == 4


def test_iterative_pruning_takes_each_layer_along_its_own_curve() -> None:
    model = Rows(a=[float(i) for i in range(1, 9)], b=[float(i) for i in range(1, 9)])
    optimizer = sgd(model, pp.IterativePruning(0.75, start=0, stop=2, interval=1, layers={"b.*": 0.5}))
    push(model, optimizer, a=[0.0] * 8, b=[0.0] * 8)
    assert (len(on(optimizer)), len(on(optimizer, "b"))) == (8 - 5, 8 - 4)  # 7/8 of 6 and of 4, rounded
    push(model, optimizer, a=[0.0] * 8, b=[0.0] * 8)
    assert (len(on(optimizer)), len(on(optimizer, "b"))) == (2, 4)


# --- Top-KAST -----------------------------------------------------------------------------------------------------

KAST = [0.1, -0.8, 0.2, 0.7, -0.3, 0.6, 0.4, -0.5]  # top two: 1, 3; top four: 1, 3, 5, 7


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_topkast_by_hand(momentum: float) -> None:
    model = Rows(a=KAST)
    optimizer = sgd(model, pp.TopKAST(0.75, backward_sparsity=0.5, decay=0.5), momentum=momentum)
    assert on(optimizer) == [1, 3]
    assert optimizer.trainable["a.weight"].flatten().nonzero().flatten().tolist() == [1, 3, 5, 7]
    assert model["a"].tolist()[0] == pytest.approx([0, -0.8, 0, 0.7, 0, 0, 0, 0])
    push(model, optimizer, a=[1.0, 2.0, 3.0, 4.0, 5.0, -1.0, -2.0, -3.0])
    theta = optimizer.masters["a.weight"].theta().tolist()[0]
    # lr = 0.1, λ = 0.5, D = 1/4: the decay is 0.05 on A and 0.2 on B∖A
    assert theta == pytest.approx([0.1, -0.8 - 0.2 + 0.04, 0.2, 0.7 - 0.4 - 0.035, -0.3, 0.6 + 0.1 - 0.12, 0.4, -0.1])
    assert model["a"].tolist()[0] == pytest.approx([0, -0.96, 0, 0.265, 0, 0, 0, 0])
    if momentum:
        assert optimizer.state[model["a"]]["momentum_buffer"].tolist() == [[1, 2, 3, 4, 5, -1, -2, -3]]


def test_topkast_under_powerprop_by_hand() -> None:
    # α = 2: φ += (Δ - decay·θ)·2|φ|
    model = Rows(a=KAST)
    optimizer = sgd(model, pp.TopKAST(0.75, backward_sparsity=0.5, decay=0.5), alpha=2.0)
    push(model, optimizer, a=[1.0, 2.0, 3.0, 4.0, 5.0, -1.0, -2.0, -3.0])
    wanted = []
    for theta, grad, rate in zip(KAST, [0, 2, 0, 4, 0, -1, 0, -3], [0, 0.5, 0, 0.5, 0, 2, 0, 2], strict=True):
        size = abs(theta) ** 0.5
        phi = size * (1 if theta > 0 else -1)
        phi += (-0.1 * grad - 0.1 * rate * theta) * 2 * size
        wanted.append(phi * abs(phi))
    assert optimizer.masters["a.weight"].theta().tolist()[0] == pytest.approx(wanted, rel=1e-5)


@every_alpha
def test_topkast_decay_follows_the_learning_rate(alpha: float) -> None:
    def run(change: bool) -> list[float]:
        model = Rows(a=KAST)
        optimizer = sgd(model, pp.TopKAST(0.75, decay=0.5), alpha)
        push(model, optimizer, a=[0.0] * 8)
        if change:
            optimizer.param_groups[0]["lr"] = 0.0
        before = optimizer.masters["a.weight"].theta().tolist()[0]
        push(model, optimizer, a=[0.0] * 8)
        return [a / b for a, b in zip(optimizer.masters["a.weight"].theta().tolist()[0], before, strict=True)]

    assert run(change=True) == pytest.approx([1.0] * 8)
    assert all(ratio < 0.99 for ratio in run(change=False))


@every_alpha
def test_topkast_weights_come_back_with_the_values_they_had(alpha: float) -> None:
    model = Rows(a=KAST)
    optimizer = sgd(model, pp.TopKAST(0.75, decay=0.0, interval=1), alpha)
    push(model, optimizer, a=[0.0, 0.0, 0.0, 7.0 if alpha == 1 else 2.5, 0.0, 0.0, 0.0, 0.0])  # 0.7 becomes small
    assert on(optimizer) == [1, 5]
    assert model["a"].tolist()[0] == pytest.approx([0, -0.8, 0, 0, 0, 0.6, 0, 0])


def test_topkast_freezes() -> None:
    model = Rows(a=KAST)
    optimizer = sgd(model, pp.TopKAST(0.75, decay=0.0, interval=1, steps=4, freeze=0.5))
    grads = [0.0] * 8
    push(model, optimizer, a=grads)
    push(model, optimizer, a=[0.0, 0.0, 0.0, 6.9, 0.0, 0.0, 0.0, 0.0])  # 0.7 becomes 0.01, but the masks are at rest
    push(model, optimizer, a=grads)
    assert on(optimizer) == [1, 3]


def test_topkast_resets_the_momentum_of_weights_that_enter_or_leave_b() -> None:
    model = Rows(a=KAST)
    optimizer = sgd(model, pp.TopKAST(0.75, backward_sparsity=0.5, decay=0.0, interval=2), momentum=0.5)
    push(model, optimizer, a=[1.0, 0, 0, 0, 0, 0, 0, 0])
    push(model, optimizer, a=[1.0, 0, 0, 0, 1.0, 6.0, 1.0, 0])  # 0.6 becomes 0: the sixth leaves B, the seventh enters
    assert optimizer.trainable["a.weight"].flatten().nonzero().flatten().tolist() == [1, 3, 6, 7]
    assert optimizer.state[model["a"]]["momentum_buffer"].tolist() == [[1.5, 0, 0, 0, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("layers", "trained"), [({"a.*": 0.75}, 4), ({"a.*": 0.25}, 6), ({"a.*": pp.half}, 6), (None, 4)]
)
def test_topkast_layers_of_their_own(layers: dict[str, float] | None, trained: int) -> None:
    optimizer = sgd(Rows(a=KAST), pp.TopKAST(0.75, backward_sparsity=0.5, layers=layers))
    assert int(optimizer.trainable["a.weight"].count_nonzero()) == trained


# --- sharing out --------------------------------------------------------------------------------------------------


def test_share_by_hand() -> None:
    assert share(10, {"a": 3.0, "b": 1.0, "c": 1.0}, {"a": 10, "b": 10, "c": 10}) == {"a": 6, "b": 2, "c": 2}
    assert share(10, {"a": 8.0, "b": 1.0, "c": 1.0}, {"a": 4, "b": 10, "c": 10}) == {"a": 4, "b": 3, "c": 3}
    assert share(4, {"a": 0.0, "b": 0.0}, {"a": 3, "b": 1}) == {"a": 3, "b": 1}
    assert share(0, {}, {}) == {}
    with pytest.raises(ValueError, match="5 weights to place, but there is room for 4"):
        share(5, {"a": 1.0}, {"a": 4})


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 50)), min_size=1, max_size=6), st.data())
def test_share_is_exact(layers: list[tuple[float, int]], data: st.DataObject) -> None:
    weights = {str(i): w for i, (w, _) in enumerate(layers)}
    room = {str(i): r for i, (_, r) in enumerate(layers)}
    total = data.draw(st.integers(0, sum(room.values())))
    counts = share(total, weights, room)
    assert sum(counts.values()) == total
    assert all(0 <= counts[n] <= room[n] for n in room)


@given(st.lists(st.sampled_from([0.0, 0.0, 0.0, -1.0, 1.0, 2.0, 3.0]), min_size=1, max_size=40), st.data())
def test_rankings_with_many_ties_keep_the_first(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(scores)))
    first = sorted(range(len(scores)), key=lambda i: -scores[i])[:k]
    assert places(top_k(torch.tensor(scores), k)).tolist() == sorted(first)


@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=1, max_size=40), st.data())
def test_rankings_among_some(entries: list[tuple[int, bool]], data: st.DataObject) -> None:
    candidates = [i for i, (_, there) in enumerate(entries) if there]
    k = data.draw(st.integers(0, len(candidates)))
    values, where = torch.tensor([float(v) for v, _ in entries]), torch.tensor([there for _, there in entries])
    first = sorted(candidates, key=lambda i: -abs(entries[i][0]))[:k]
    assert places(top_among(values.view(-1, 1), where.view(-1, 1), k)).tolist() == sorted(first)


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pp.RigL(1.4, steps=10), r"sparsity must be in \[0, 1\), got 1\.4"),
        (lambda: pp.Static(1.0), r"sparsity must be in \[0, 1\), got 1\.0"),
        (lambda: pp.Static(0.5, distribution="even"), "distribution must be one of uniform, erk, global, got 'even'"),
        (lambda: pp.SET(0.5), r"stop=0\.75 is a fraction of steps: give steps="),
        (lambda: pp.SET(0.5, steps=0), "steps must be a positive whole number of optimiser steps, got 0"),
        (lambda: pp.SET(0.5, steps=10.5), r"steps must be a positive whole number of optimiser steps, got 10\.5"),  # type: ignore[arg-type]
        (lambda: pp.SET(0.5, steps=10, fraction=1.5), r"fraction must be in \(0, 1\], got 1\.5"),
        (
            lambda: pp.SET(0.5, steps=10, interval=0),
            "interval must be a positive whole number of optimiser steps, got 0",
        ),
        (lambda: pp.SET(0.5, steps=10, interval=-3), "interval must be a positive whole number .*, got -3"),
        (lambda: pp.SET(0.5, steps=10, interval=0.1), r"interval must be a positive whole number .*, got 0\.1"),  # type: ignore[arg-type]
        (lambda: pp.TopKAST(0.5, interval=0.1), r"interval must be a positive whole number .*, got 0\.1"),  # type: ignore[arg-type]
        (lambda: pp.RigL(0.5, steps=10, stop=1.5), r"stop must be a step .* or a fraction of steps .*, got 1\.5"),
        (lambda: pp.DSR(0.5, steps=10, threshold=0.0), r"threshold must be more than 0, got 0\.0"),
        (lambda: pp.IterativePruning(0.5), r"start=0\.2 is a fraction of steps: give steps="),
        (
            lambda: pp.IterativePruning(0.5, start=5, stop=5, interval=1),
            "start must come before stop, got start=5, stop=5",
        ),
        (lambda: pp.TopKAST(0.5, backward_sparsity=0.8), r"backward_sparsity must be at most sparsity=0\.5, got 0\.8"),
        (
            lambda: pp.TopKAST(0.5, backward_sparsity=-1),
            r"sparsity must be in \[0, 1\), got -1 for 'backward_sparsity'",
        ),
        (lambda: pp.TopKAST(0.5, decay=-0.1), r"decay must be at least 0, got -0\.1"),
        (lambda: pp.TopKAST(0.5, freeze=0.5), r"freeze=0\.5 is a fraction of steps: give steps="),
    ],
)
def test_bad_arguments_are_repeated(make: Callable[[], Method], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(ValueError, match=r"layers='conv\.\*' matches no weight; there are a\.weight"):
        sgd(Rows(a=KAST), pp.SNIP(0.5, layers={"conv.*": 0.0}))


@pytest.mark.parametrize("method", [pp.RigL(0.97, steps=9), pp.TopKAST(0.97), pp.IterativePruning(0.97, steps=9)])
def test_a_layer_that_keeps_nothing_is_worth_a_warning(method: Method) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    with pytest.warns(UserWarning, match=r"'1\.weight' keeps none of its 16 weights at sparsity=0\.97") as caught:
        optimizer = sgd(model, method)
    assert len(caught) == 1
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()


def test_one_method_serves_one_optimiser() -> None:
    method = pp.Static(0.5)
    sgd(Rows(a=KAST), method)
    with pytest.raises(ValueError, match="this Static already belongs to an optimiser"):
        sgd(Rows(a=KAST), method)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (pp.SET(0.5, steps=10), "the state was saved with method='SET', not 'RigL'"),
        (pp.RigL(0.75, steps=10), r"the state was saved with sparsity=0\.75, not 0\.5"),
        (pp.RigL(0.5, steps=10, distribution="erk"), "the state was saved with distribution='erk', not 'uniform'"),
    ],
)
def test_the_state_of_another_method_is_refused(other: Method, message: str) -> None:
    state = sgd(Rows(a=KAST), other).state_dict()
    with pytest.raises(ValueError, match=message):
        sgd(Rows(a=KAST), pp.RigL(0.5, steps=10)).load_state_dict(state)


def test_the_state_of_a_topkast_that_trained_other_weights_is_refused() -> None:
    state = sgd(Rows(a=KAST), pp.TopKAST(0.5, backward_sparsity=0.25)).state_dict()
    with pytest.raises(ValueError, match=r"the state was saved with backward_sparsity=0\.25, not 0\.0"):
        sgd(Rows(a=KAST), pp.TopKAST(0.5)).load_state_dict(state)


def test_older_states_say_less_and_still_load() -> None:
    state = sgd(Rows(a=KAST), pp.TopKAST(0.5, steps=7)).state_dict()
    for key in ("distribution", "backward_sparsity"):
        del state["powerprop"]["sparsify"][key]
    sgd(Rows(a=KAST), pp.TopKAST(0.5, backward_sparsity=0.25)).load_state_dict(state)


def test_whole_numbers_of_any_kind_are_steps() -> None:
    methods = pp.SET(0.5, steps=np.int64(40), interval=np.int32(5)), pp.TopKAST(0.5, interval=np.int64(5))  # type: ignore[arg-type]
    assert [(m.steps, m.interval) for m in methods] == [(40, 5), (None, 5)]
    assert all(type(m.interval) is int for m in methods)


def test_a_method_prints_as_it_was_made() -> None:
    assert (
        repr(pp.Static(0.5, seed=3)) == "Static(sparsity=0.5, distribution='uniform', steps=None, layers=None, seed=3)"
    )


@pytest.mark.parametrize("method", [pp.RigL(0.8, steps=40), pp.SNFS(0.8, steps=40), pp.DSR(0.8, steps=40)])
def test_weights_cannot_be_added_once_the_masks_are_laid_out(method: Method) -> None:
    model = net()
    optimizer = pp.Powerprop(torch.optim.SGD(model[0].parameters(), lr=0.1), model, 1.0, sparsify=method)
    with pytest.raises(ValueError, match=rf"{type(method).__name__} .*cannot take in '4\.weight' later"):
        optimizer.add_param_group({"params": model[4].parameters()})
    optimizer.add_param_group({"params": [model[4].bias]})  # type: ignore[list-item]
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 1]
    train(model, optimizer, 4)
    assert list(optimizer.masters) == ["0.weight"]


def test_a_dense_layer_simply_trains() -> None:
    model, twin = net(), net()
    method = pp.RigL(0.0, steps=40, interval=1000)
    train(model, pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model, 1.0, sparsify=method), 10)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 10)
    x, _ = batch(0)
    assert torch.equal(model(x), twin(x))


def test_training_goes_on_for_longer() -> None:
    short, longer = pp.RigL(0.5, steps=10), pp.RigL(0.5, steps=20)
    saved = sgd(Rows(a=KAST), short)
    short.step = 7
    sgd(Rows(a=KAST), longer).load_state_dict(saved.state_dict())
    assert (longer.step, longer.steps) == (7, 20)
