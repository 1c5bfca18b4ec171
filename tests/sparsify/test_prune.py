"""How the budget is spread, and one-shot pruning: counts are exact, exceptions are obeyed."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import powerprop as pp
from nets import net, weights
from powerprop.allocate import erk, layer_counts, uniform
from powerprop.mask_entries import places
from powerprop.sparsify.prune import top_k, top_k_masks

shapes = st.dictionaries(
    st.sampled_from("abcdef"),
    st.one_of(
        st.tuples(st.integers(1, 60), st.integers(1, 60)),
        st.tuples(st.integers(1, 20), st.integers(1, 20), st.just(3), st.just(3)),
    ),
    min_size=1,
)


def test_top_k_by_hand() -> None:
    assert top_k(torch.tensor([3.0, 1, 4, 1, 5, 9, 2, 6]), 3).tolist() == [0, 0, 0, 0, 1, 1, 0, 1]


@given(st.lists(st.sampled_from([0.0, 0.0, 0.0, -1.0, 1.0, 2.0, 3.0]), min_size=1, max_size=40), st.data())
def test_top_k_with_many_ties_keeps_the_first(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(scores)))
    first = sorted(range(len(scores)), key=lambda i: -scores[i])[:k]
    assert places(top_k(torch.tensor(scores), k)).tolist() == sorted(first)


@pytest.mark.parametrize("k", [-1, 4])
def test_top_k_out_of_range(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k must be in \[0, 3\], got {k}"):
        top_k(torch.ones(3), k)


def test_top_k_of_nan() -> None:
    with pytest.raises(FloatingPointError, match="scores must be finite numbers to rank them, got 2 NaN"):
        top_k(torch.tensor([1.0, math.nan, math.nan]), 1)
    with pytest.raises(FloatingPointError, match="got 1 NaN"):
        top_k(torch.tensor([1.0, math.nan, 2.0, 0.0]), 2)


def test_erk_by_hand() -> None:
    # scores Σdims/Πdims: a 20/100 = .2, b 110/1000 = .11; budget 110 = ε(.2·100 + .11·1000), ε = 110/130
    assert erk({"a": (10, 10), "b": (10, 100)}, 0.9) == {"a": 17, "b": 93}


def test_erk_makes_crowded_layers_dense_and_solves_again() -> None:
    # a would need density > 1: it stays dense (4), and b receives what is left of the 754.
    assert erk({"a": (2, 2), "b": (50, 100)}, 0.85) == {"a": 4, "b": 747}


@given(shapes, st.floats(0, 0.999))
def test_erk_meets_the_asked_sparsity_exactly(layers: dict[str, tuple[int, ...]], sparsity: float) -> None:
    total = sum(math.prod(s) for s in layers.values())
    counts = erk(layers, sparsity)
    assert sum(counts.values()) == total - round(total * sparsity)
    assert all(0 <= counts[n] <= math.prod(s) for n, s in layers.items())


@given(shapes, st.floats(0, 0.999))
def test_uniform_meets_the_asked_sparsity_in_every_layer(layers: dict[str, tuple[int, ...]], sparsity: float) -> None:
    for name, count in uniform(layers, sparsity).items():
        size = math.prod(layers[name])
        assert count == size - round(size * sparsity)


@pytest.mark.parametrize("distribution", ["uniform", "erk", "global"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_prune_is_exact(distribution: str, sparsity: float) -> None:
    model = net()
    masks = pp.prune(model, sparsity, distribution)
    assert pp.Masks.nonzero(model) == masks
    total = masks.numel()
    slack = 1.5 / total if distribution == "uniform" else 0.5 / total
    assert pp.sparsity(model).total == pytest.approx(sparsity, abs=slack + 1e-12)


def test_prune_keeps_the_largest_of_each_layer() -> None:
    model = net()
    before = model[0].weight.detach().clone()  # type: ignore[union-attr,operator]
    masks = pp.prune(model, 0.5)
    kept = before[masks["0.weight"]].abs()
    assert kept.min() > before[~masks["0.weight"]].abs().max()


def test_global_ranks_all_weights_together() -> None:
    scores = {"a": torch.tensor([9.0, 8, 7, 6]), "b": torch.tensor([5.0, 4, 3, 2])}
    masks = top_k_masks(scores, 0.5, "global")
    assert masks["a"].all()
    assert not masks["b"].any()


def test_exceptions_per_layer() -> None:
    model = net()
    layers = {"0.*": 0.0, "2.weight": pp.at_most(0.8), "4.weight": pp.half}
    pp.prune(model, 0.9, layers=layers)
    found = pp.sparsity(model)
    assert found["0.weight"] == 0
    assert found["2.weight"] == pytest.approx(0.8, abs=0.5 / 96)
    assert found["4.weight"] == pytest.approx(0.45, abs=0.5 / 24)


@pytest.mark.parametrize("distribution", ["erk", "global"])
def test_exceptions_leave_the_rest_at_the_asked_sparsity(distribution: str) -> None:
    masks = pp.prune(net(), 0.75, distribution, layers={"4.weight": 0.0})
    assert masks["4.weight"].all()
    assert int(masks["0.weight"].sum() + masks["2.weight"].sum()) == (72 + 96) // 4


def test_biases_and_norms_are_not_pruned() -> None:
    model = net()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.ndim == 1}
    assert set(pp.prune(model, 0.9)) == {"0.weight", "2.weight", "4.weight"}
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if p.ndim == 1)


def test_where_chooses() -> None:
    assert set(pp.prune(net(), 0.5, where="0.*")) == {"0.weight", "0.bias"}


@pytest.mark.parametrize("bad", [1.0, 1.4, -0.1, math.nan])
def test_bad_sparsity_is_repeated_back(bad: float) -> None:
    with pytest.raises(ValueError, match=rf"sparsity must be in \[0, 1\), got {bad}"):
        pp.prune(net(), bad)
    with pytest.raises(ValueError, match=rf"sparsity must be in \[0, 1\), got {bad} for '0\.weight'"):
        pp.prune(net(), 0.5, layers={"0.weight": bad})


@pytest.mark.parametrize(("distribution", "layers"), [("uniform", None), ("global", {"1.weight": 0.99})])
def test_a_layer_that_keeps_nothing_is_worth_a_warning(distribution: str, layers: dict[str, float] | None) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    message = r"'1\.weight' keeps none of its 16 weights at sparsity=0\.97.*layers={'1\.weight': \.\.\.}"
    with pytest.warns(UserWarning, match=message) as caught:
        pp.prune(model, 0.97, distribution, layers)
    assert [w.filename for w in caught] == [__file__]


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="distribution must be one of uniform, erk, global, got 'ekr'"):
        pp.prune(net(), 0.5, "ekr")
    with pytest.raises(ValueError, match=r"layers='fc\*' matches no weight; there are 0\.weight, 2\.weight, 4\.weight"):
        pp.prune(net(), 0.5, layers={"fc*": 0.1})
    with pytest.raises(ValueError, match="one of uniform, erk here, got 'global'"):
        layer_counts({"w": torch.Size((2, 2))}, 0.5, "global")


def test_sparsity_prints_as_a_table() -> None:
    model = net()
    pp.prune(model, 0.5)
    assert str(pp.sparsity(model)).splitlines()[-1].split() == ["all", "50.0000%"]


# --- what is refused changes nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("0.5",), TypeError, r"sparsity must be a number in \[0, 1\), got '0\.5'$"),
        ((None,), ValueError, "prune needs a sparsity or a pattern, one of them, got None and None"),
        ((True,), TypeError, "sparsity must be a number .*, got True"),
        ((0.5, ["erk"]), ValueError, r"distribution must be one of .*, got \['erk'\]"),
        ((0.5, "uniform", ["0.weight"]), TypeError, r"layers must map name patterns .*, got \['0\.weight'\]"),
        ((0.5, "uniform", {"4.weight": "0.1"}), TypeError, r"sparsity must be .*, got '0\.1' for '4\.weight'"),
        ((0.5, "uniform", {"4.weight": lambda s: None}), TypeError, r"sparsity must be .*, got None for '4\.weight'"),
        ((0.5, "uniform", None, 3), TypeError, "where must be a name pattern, .*, got 3"),
    ],
)
def test_wrong_kinds_are_repeated_back(arguments: tuple[object, ...], kind: type[Exception], message: str) -> None:
    model = net()
    before = weights(model)
    with pytest.raises(kind, match=message):
        pp.prune(model, *arguments)  # type: ignore[arg-type]
    assert all(torch.equal(p, before[n]) for n, p in weights(model).items())


def test_any_kind_of_number_is_a_sparsity() -> None:
    for half in (np.float32(0.5), np.float64(0.5), Fraction(1, 2)):
        assert pp.magnitude_masks(net(), half).sparsity() == 0.5  # type: ignore[arg-type]
    assert pp.magnitude_masks(net(), 0).sparsity() == 0


@pytest.mark.parametrize("distribution", ["uniform", "erk", "global"])
def test_a_weight_that_is_nan_is_named_and_nothing_is_pruned(distribution: str) -> None:
    model = net()
    with torch.no_grad():
        model[4].weight[1, 2] = math.nan  # type: ignore[union-attr,index,operator]
    before = weights(model)
    with pytest.raises(FloatingPointError, match=r"^'4\.weight': scores must be finite .*, got 1 NaN"):
        pp.prune(model, 0.5, distribution)
    assert all(torch.equal(p.nan_to_num(), before[n].nan_to_num()) for n, p in weights(model).items())


@pytest.mark.parametrize("distribution", ["uniform", "erk", "global"])
def test_a_layer_of_no_size_keeps_nothing(distribution: str) -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 0))
    masks = pp.prune(model, 0.5, distribution)
    assert masks["1.weight"].shape == (0, 6)
    assert masks["0.weight"].sum() == 12


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_layer_without_a_shape() -> None:
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet: run one forward pass first"):
        pp.prune(nn.Sequential(nn.LazyLinear(3)), 0.5)
