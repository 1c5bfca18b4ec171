"""Masks that are chosen once, and masks that drop and grow: on eight weights worked out by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import powerprop as pp
from nets import net, train
from powerprop.allocate import apportion
from powerprop.mask_entries import places
from powerprop.schedules import constant
from powerprop.sparsify import Method
from powerprop.sparsify.base import top_among
from rows import Rows, every_alpha, on, push, put, sgd
from sparse import counts

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
    master.put(before, torch.full((4,), 1e-9))
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


# --- sharing out --------------------------------------------------------------------------------------------------


def test_share_of_what_is_no_number() -> None:
    with pytest.raises(FloatingPointError, match="finite numbers, got .*'a': nan"):
        apportion(2, {"a": math.nan, "b": 1.0}, {"a": 5, "b": 5})


def test_share_by_hand() -> None:
    assert apportion(10, {"a": 3.0, "b": 1.0, "c": 1.0}, {"a": 10, "b": 10, "c": 10}) == {"a": 6, "b": 2, "c": 2}
    assert apportion(10, {"a": 8.0, "b": 1.0, "c": 1.0}, {"a": 4, "b": 10, "c": 10}) == {"a": 4, "b": 3, "c": 3}
    assert apportion(4, {"a": 0.0, "b": 0.0}, {"a": 3, "b": 1}) == {"a": 3, "b": 1}
    assert apportion(0, {}, {}) == {}
    with pytest.raises(ValueError, match="5 weights to place, but there is room for 4"):
        apportion(5, {"a": 1.0}, {"a": 4})


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 50)), min_size=1, max_size=6), st.data())
def test_share_is_exact(layers: list[tuple[float, int]], data: st.DataObject) -> None:
    weights = {str(i): w for i, (w, _) in enumerate(layers)}
    room = {str(i): r for i, (_, r) in enumerate(layers)}
    total = data.draw(st.integers(0, sum(room.values())))
    counts = apportion(total, weights, room)
    assert sum(counts.values()) == total
    assert all(0 <= counts[n] <= room[n] for n in room)


@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=1, max_size=40), st.data())
def test_rankings_among_some(entries: list[tuple[int, bool]], data: st.DataObject) -> None:
    candidates = [i for i, (_, there) in enumerate(entries) if there]
    k = data.draw(st.integers(0, len(candidates)))
    values, where = torch.tensor([float(v) for v, _ in entries]), torch.tensor([there for _, there in entries])
    first = sorted(candidates, key=lambda i: -abs(entries[i][0]))[:k]
    assert places(top_among(values.view(-1, 1), where.view(-1, 1), k)).tolist() == sorted(first)
