"""Iterative pruning and Top-KAST, on eight weights worked out by hand."""

import math

import pytest

import powerprop as pp
from rows import KAST, Rows, every_alpha, on, push, sgd

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


@pytest.mark.parametrize("sparsity", [0.25, 0.75])
def test_iterative_pruning_goes_on_for_longer(sparsity: float) -> None:
    model = Rows(a=[0.1, -0.8, 0.2, 0.7, -0.3, 0.6, 0.4, -0.5])
    short = sgd(model, pp.IterativePruning(sparsity, steps=10, interval=1))
    for _ in range(7):
        push(model, short, a=[0.0] * 8)
    longer = sgd(model, pp.IterativePruning(sparsity, steps=20, interval=1))
    longer.load_state_dict(short.state_dict())
    left = on(short)
    assert len(left) < 8
    for _ in range(3):
        push(model, longer, a=[0.0] * 8)
        assert on(longer) == left


def test_iterative_pruning_takes_each_layer_along_its_own_curve() -> None:
    model = Rows(a=[float(i) for i in range(1, 9)], b=[float(i) for i in range(1, 9)])
    optimizer = sgd(model, pp.IterativePruning(0.75, start=0, stop=2, interval=1, layers={"b.*": 0.5}))
    push(model, optimizer, a=[0.0] * 8, b=[0.0] * 8)
    assert (len(on(optimizer)), len(on(optimizer, "b"))) == (8 - 5, 8 - 4)  # 7/8 of 6 and of 4, rounded
    push(model, optimizer, a=[0.0] * 8, b=[0.0] * 8)
    assert (len(on(optimizer)), len(on(optimizer, "b"))) == (2, 4)


# --- Top-KAST -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_topkast_by_hand(momentum: float) -> None:
    model = Rows(a=KAST)
    optimizer = sgd(model, pp.TopKAST(0.75, backward_sparsity=0.5, decay=0.5, interval=2), momentum=momentum)
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


def test_topkast_names_the_layer_whose_weights_are_nan() -> None:
    model = Rows(a=KAST, b=KAST)
    optimizer = sgd(model, pp.TopKAST(0.75))
    before = optimizer.active
    with pytest.raises(FloatingPointError, match=r"^'b\.weight' has 1 NaN among its scores"):
        push(model, optimizer, a=[0.0] * 8, b=[math.nan] + [0.0] * 7)
    assert optimizer.active == before
