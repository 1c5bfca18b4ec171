"""Resume in every order, through plain torch, torch.distributed.checkpoint and copies: bit-identical, or refused."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import powerprop as pp
from nets import BASES as EVERY_BASE
from nets import flat, net, one_weight, same, train, weights, wrap
from resume import ALPHAS, BASES, BEFORE, SPARSIFIERS, begun, ends_alike, plain, wrapped

every_method = pytest.mark.parametrize("method", SPARSIFIERS)
every_base = pytest.mark.parametrize("base", BASES)
every_alpha = pytest.mark.parametrize("alpha", ALPHAS)

ORDERS = ["weights, wrap, state", "wrap, weights, state", "wrap, state, weights", "wrap, weights, own state, state"]
"""The last is Hugging Face's Trainer: accelerate loads a fresh optimiser's own state into it when it takes it over."""


def resumed_in(
    order: str, saved: dict[str, Any], wrapping: Callable[[nn.Module], pp.Powerprop], dtype: torch.dtype = torch.float32
) -> Any:
    model, optimizer = plain(7).to(dtype), None
    for verb in order.split(", "):
        if verb == "wrap":
            optimizer = wrapping(model)
        elif verb == "weights":
            model.load_state_dict(saved["model"])
        elif verb == "own state":
            assert optimizer is not None
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            assert optimizer is not None
            optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


def base_for(method: str, alpha: float) -> str:
    """One base optimiser for each pair: all pairs of methods, powers and bases would take minutes."""
    return list(BASES)[([*SPARSIFIERS].index(method) + ALPHAS.index(alpha)) % len(BASES)]


PRECISIONS = [(m, torch.float32) for m in SPARSIFIERS] + [
    (m, dtype) for m in ("dense", "rigl", "topkast") for dtype in (torch.bfloat16, torch.float64)
]


@pytest.mark.parametrize(("method", "dtype"), PRECISIONS)
@every_alpha
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_resumes_bit_identically(order: str, method: str, dtype: torch.dtype, alpha: float) -> None:
    base = base_for(method, alpha)
    model, optimizer = begun(method, base, alpha, dtype)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, resumed = resumed_in(order, saved, lambda m: wrapped(m, method, base, alpha), dtype)
    assert ends_alike(model, optimizer, again, resumed)


@pytest.mark.parametrize("alpha", [1.375, 2.0])
def test_the_state_alone_brings_masks_and_hidden_weights(alpha: float) -> None:
    model, optimizer = begun("topkast", "momentum", alpha)
    saved = {"optimizer": optimizer.state_dict()}
    again, resumed = resumed_in("wrap, state", saved, lambda m: wrapped(m, "topkast", "momentum", alpha))
    assert resumed.active == optimizer.active
    again.load_state_dict(model.state_dict())
    for name, weight in optimizer.masters.items():
        assert torch.equal(resumed.masters[name].theta(), weight.theta())


@every_alpha
def test_weights_that_somebody_wrote_after_us_win_over_a_state(alpha: float) -> None:
    _, optimizer = begun("dense", "momentum", alpha)
    again = plain(7)
    resumed = wrapped(again, "dense", "momentum", alpha)
    own = weights(plain(9))
    again.load_state_dict(own)
    resumed.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(again.state_dict()[n], w) for n, w in own.items())
    for group in resumed.param_groups:
        group["lr"] = 0.0
    train(again, resumed, 1)
    assert all(torch.allclose(again.state_dict()[n], w, rtol=1e-5) for n, w in own.items())


def test_a_state_saved_after_a_change_from_outside_holds_the_change() -> None:
    model, optimizer = begun("dense", "momentum", 1.375)
    model.load_state_dict(plain(9).state_dict())
    saved = copy.deepcopy({"optimizer": optimizer.state_dict(), "model": model.state_dict()})
    again, resumed = resumed_in(ORDERS[0], saved, lambda m: wrapped(m, "dense", "momentum", 1.375))
    assert ends_alike(model, optimizer, again, resumed)


@every_alpha
def test_a_copy_of_a_fresh_optimiser_resumes_too(alpha: float) -> None:
    model, optimizer = begun("rigl", "adamw", alpha)
    again = plain(7)
    again.load_state_dict(model.state_dict())
    again, resumed = copy.deepcopy((again, wrapped(again, "rigl", "adamw", alpha)))
    again, resumed = copy.deepcopy((resumed.model, resumed))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert ends_alike(model, optimizer, again, resumed)


# --- torch.distributed.checkpoint -----------------------------------------------------------------------------------


def state_of(model: nn.Module, optimizer: pp.Powerprop, options: StateDictOptions) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return get_state_dict(model, optimizer, options=options)


@every_method
@every_alpha
@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoint_carries_everything(flat: bool, method: str, alpha: float) -> None:
    base = base_for(method, alpha)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = begun(method, base, alpha)
    optimizer.zero_grad()
    saved = copy.deepcopy(state_of(model, optimizer, options))
    for first in ("wrap", "weights"):
        again = plain(7)
        if first == "weights":
            again.load_state_dict(saved[0])
        resumed = wrapped(again, method, base, alpha)
        set_state_dict(
            again,
            resumed,
            model_state_dict=copy.deepcopy(saved[0]),
            optim_state_dict=copy.deepcopy(saved[1]),
            options=options,
        )
        assert ends_alike(*copy.deepcopy((model, optimizer)), again, resumed)


@every_method
@every_alpha
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process")
def test_distributed_checkpoint_in_a_folder(tmp_path: Path, method: str, alpha: float) -> None:
    base = {1.0: "momentum", 1.375: "adamw", 2.0: "momentum"}[alpha]  # of one without state nothing is in the folder
    options = StateDictOptions(flatten_optimizer_state_dict=alpha == 2)
    model, optimizer = begun(method, base, alpha)
    optimizer.zero_grad()
    names = ("model", "optimizer")
    dcp.save(dict(zip(names, state_of(model, optimizer, options), strict=True)), checkpoint_id=tmp_path)
    again = plain(7)
    resumed = wrapped(again, method, base, alpha)
    state = dict(zip(names, state_of(again, resumed, options), strict=True))
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(
        again, resumed, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    assert ends_alike(model, optimizer, again, resumed)


@every_method
@every_base
def test_asking_a_fresh_optimiser_for_its_state_trains_nothing(method: str, base: str) -> None:
    model, twin = plain(0), plain(0)
    optimizer, other = (wrapped(m, method, base, 2.0) for m in (model, twin))
    state_of(model, optimizer, StateDictOptions())
    assert optimizer.sparsify is None or optimizer.sparsify.step == 0  # type: ignore[attr-defined]
    assert same(model, twin)
    assert optimizer.active == other.active
    if base == "sgd":  # torch itself counts a step of the others' moments
        assert ends_alike(model, optimizer, twin, other)


# --- pickles --------------------------------------------------------------------------------------------------------


def through_torch(optimizer: pp.Powerprop) -> pp.Powerprop:
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


COPIES: dict[str, Callable[[pp.Powerprop], pp.Powerprop]] = {
    "torch.save": through_torch,
    "pickle": lambda o: pickle.loads(pickle.dumps(o)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("how", COPIES)
@every_method
@every_alpha
def test_a_pickled_optimiser_trains_on_identically(how: str, method: str, alpha: float) -> None:
    model, optimizer = begun(method, "adamw", alpha)
    again = COPIES[how](optimizer)
    assert again.param_groups is again.base.param_groups
    assert ends_alike(model, optimizer, again.model, again)


def test_a_pickle_with_a_scheduler() -> None:
    model = net()
    optimizer = wrap(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 2)
    again = COPIES["pickle"](optimizer)
    train(model, optimizer, 2, start=2)
    train(again.model, again, 2, start=2)
    assert same(model, again.model)


# --- refused --------------------------------------------------------------------------------------------------------


def snapshot(optimizer: pp.Powerprop) -> Any:
    """Everything that a refusal must leave as it was."""
    return copy.deepcopy((weights(optimizer.model), optimizer.state_dict()))


def unchanged(optimizer: pp.Powerprop, before: Any) -> bool:
    return flat(before) == flat(snapshot(optimizer))


@pytest.mark.parametrize("method", [m for m in SPARSIFIERS if m != "dense"])
def test_a_state_without_masks_is_refused_by_a_sparse_optimiser(method: str) -> None:
    model, optimizer = begun(method, "momentum", 1.0)
    plain_optimizer = BASES["momentum"](model)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"the state holds no masks .*, but this optimiser has sparsify=\w+: it was"):
        optimizer.load_state_dict(plain_optimizer.state_dict())
    assert unchanged(optimizer, before)
    dense = wrapped(plain(0), "dense", "momentum", 1.0)
    with pytest.raises(ValueError, match="saved with no sparsify=, this optimiser has a sparsify="):
        optimizer.load_state_dict(dense.state_dict())
    assert unchanged(optimizer, before)


def test_a_state_without_masks_is_refused_where_masks_are_set() -> None:
    model = plain(0)
    optimizer = wrapped(model, "dense", "momentum", 2.0)
    optimizer.set_masks(pp.magnitude_masks(model, 0.5))
    with pytest.raises(ValueError, match=r"this optimiser has masks on \['0\.weight', '2\.weight'\]"):
        optimizer.load_state_dict(BASES["momentum"](model).state_dict())


def without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda state: state["state"][2].pop(key)


def instead(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda state: state["state"][2].update({key: value})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.pop("state"), "an optimiser's state has 'state' and 'param_groups', this one lacks state"),
        (lambda s: s["param_groups"][0]["params"].pop(), r"the state is of groups with \[3\] parameters, not \[4\]"),
        (without("powerprop"), r"the state is of weights \['0\.weight'\], not \['0\.weight', '2\.weight'\]"),
        (without("powerprop_active"), r"the state of '2\.weight' must hold a tensor 'powerprop_active', got nothing"),
        (instead("powerprop_active", torch.zeros(1).byte()), r"'powerprop_active' of '2\.weight': a mask of shape"),
        (
            instead("powerprop_active", torch.zeros(4)),
            r"'powerprop_active' of '2\.weight': a mask .* packs to \d+ bytes, got 4 of torch",
        ),
        (instead("powerprop", torch.zeros(2)), r"'powerprop' of '2\.weight' must hold at least 3 numbers, got \[0"),
        (lambda s: s["state"][0]["powerprop_sparsify"].zero_(), "'powerprop_sparsify' is not a sparsifier's state"),
        (lambda s: s["state"][0].pop("powerprop_sparsify_generator"), "is not a sparsifier's state"),
        (lambda s: s["state"][0]["powerprop_sparsify_generator"].zero_(), "(?i)mt19937"),
        (lambda s: s["state"][1].update(momentum_buffer=range(3)), "generator"),
    ],
)
@pytest.mark.parametrize("method", ["rigl", "topkast"])
def test_a_damaged_state_is_refused_and_changes_nothing(
    method: str, damage: Callable[[dict[str, Any]], object], message: str
) -> None:
    _, other = begun(method, "momentum", 2.0)
    state = copy.deepcopy(other.state_dict())
    damage(state)
    model = plain(7)
    optimizer = wrapped(model, method, "momentum", 2.0)
    train(model, optimizer, BEFORE - 2)
    before = snapshot(optimizer)
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        optimizer.load_state_dict(state)
    assert unchanged(optimizer, before)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("powerprop_theta"), r"the state of '2\.weight' must hold a tensor 'powerprop_theta', got nothing"),
        (instead("powerprop_theta", 3), r"the state of '2\.weight' must hold a tensor 'powerprop_theta', got int"),
        (
            instead("powerprop_theta", torch.zeros(2)),
            r"'powerprop_theta' of '2\.weight' must hold floating-point .* \(3, 10\), got .* of shape \(2,\)",
        ),
        (instead("powerprop_theta", torch.zeros(3, 10).int()), r"got torch\.int32 of shape \(3, 10\)"),
    ],
)
def test_damaged_hidden_weights_are_refused_and_change_nothing(
    damage: Callable[[dict[str, Any]], object], message: str
) -> None:
    test_a_damaged_state_is_refused_and_changes_nothing("topkast", damage, message)


def test_a_state_of_version_0_1_is_an_error_that_says_so() -> None:
    _, optimizer = begun("dense", "momentum", 2.0)
    state = optimizer.state_dict()
    state["state"][2]["powerprop_phi"] = torch.zeros(3, 10)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"saved by powerprop 0\.1, which kept φ in it"):
        optimizer.load_state_dict(state)
    assert unchanged(optimizer, before)


@pytest.mark.parametrize(("method", "key"), [("dsr", "height"), ("snfs", "average"), ("rigl", "step")])
def test_a_sparsifier_s_state_that_lacks_something_says_what(method: str, key: str) -> None:
    _, optimizer = begun(method, "sgd", 1.0)
    state = optimizer.sparsify.state_dict()  # type: ignore[union-attr]
    del state[key]
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=f"the state of \\w+ lacks {key}"):
        optimizer.sparsify.load_state_dict(state)  # type: ignore[union-attr]
    assert unchanged(optimizer, before)


# --- torch's own habits ---------------------------------------------------------------------------------------------


def test_state_dict_hooks_run() -> None:
    optimizer = wrap(net())
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda o, s: {**s, "mark": 3})
    state = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda o, s: calls.append(f"before loading {s.pop('mark')}"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("after loading"))
    optimizer.load_state_dict(state)
    assert state["mark"] == 3
    assert calls == ["before saving", "before loading 3", "after loading"]


def test_the_state_is_the_base_optimiser_s_with_our_part_to_read() -> None:
    model = net()
    optimizer = wrap(model, "adam")
    optimizer.set_masks(pp.magnitude_masks(model, 0.5))
    assert not optimizer.state
    train(model, optimizer, 2)
    weight = model[0].weight
    entry = optimizer.state[weight]  # type: ignore[index]
    assert entry["exp_avg"] is optimizer.base.state[weight]["exp_avg"]  # type: ignore[index]
    assert torch.equal(entry["powerprop_theta"], optimizer.masters["0.weight"].kept)  # type: ignore[arg-type]
    for key, value in entry.items():
        entry[key] = value.clone()
    assert set(optimizer.base.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}  # type: ignore[index]
    assert len(entry) == 7
    optimizer.state[weight] = dict(entry)  # type: ignore[index]
    assert set(optimizer.base.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}  # type: ignore[index]
    del optimizer.state[weight]["exp_avg"], optimizer.state[model[2].weight]  # type: ignore[index]
    assert set(optimizer.base.state[weight]) == {"step", "exp_avg_sq"}  # type: ignore[index]
    assert optimizer.state.get(model[2].weight) is None
    assert len(list(optimizer.state)) == len(optimizer.base.state) == 7
    optimizer.state = {}
    assert optimizer.base.state == {}


@pytest.mark.parametrize("base", EVERY_BASE)
def test_a_plain_optimiser_s_state_keeps_a_group_s_own_alpha(base: str) -> None:
    model = net()
    optimizer = wrap(model, base, 2.0)
    key = "powerprop_alpha" if base == "rmsprop" else "alpha"
    model = net()
    groups = EVERY_BASE[base]([{"params": model.parameters(), key: 3.0}])  # type: ignore[list-item]
    optimizer = pp.Powerprop(groups, model)
    other = net()
    other_base = EVERY_BASE[base](list(other.parameters()))
    train(other, other_base, 2)
    optimizer.load_state_dict(other_base.state_dict())
    train(model, optimizer, 2)
    assert {m.alpha for m in optimizer.masters.values()} == {3.0}
    assert optimizer.param_groups[0][key] == 3.0


def test_a_sparsifier_whose_state_cannot_be_saved_is_named() -> None:
    class Odd(pp.Static):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "odd": {1, 2}}

    optimizer = wrap(net(), sparsify=Odd(0.5))
    with pytest.raises(TypeError, match=r"a sparsifier's state may hold .*, got odd=\{1, 2\}"):
        optimizer.state_dict()


def test_state_of_a_plain_optimiser_is_taken_up() -> None:
    model = net()
    plain = EVERY_BASE["momentum"](list(model.parameters()))
    train(model, plain, 5)
    optimizer = wrap(model)
    optimizer.load_state_dict(plain.state_dict())
    assert torch.equal(
        optimizer.state[model[0].weight]["momentum_buffer"],  # type: ignore[index]
        plain.state[model[0].weight]["momentum_buffer"],  # type: ignore[index]
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: wrap(net(), where="0.weight"), r"the state is of weights \['0\.weight'\], not"),
        (lambda: wrap(net(hidden=13)), r"'0\.weight' was saved with shape \(13, 6\), not \(12, 6\)"),
    ],
)
def test_foreign_state_is_refused(other: Callable[[], pp.Powerprop], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrap(net()).load_state_dict(other().state_dict())


def test_a_copy_with_a_scheduler_steps_itself_alone() -> None:
    model = net()
    optimizer = wrap(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    copied, other = copy.deepcopy((model, optimizer))
    before = copy.deepcopy(model)
    train(copied, other, 1)
    assert same(model, before)
    assert not same(copied, before)


def test_a_half_precision_state_from_before_the_masks() -> None:
    layer = one_weight([4.0, -9.0, 1.0]).bfloat16()
    optimizer = wrap(layer, "sgd", 1.0)
    state = optimizer.state_dict()
    optimizer.set_masks(pp.prune(layer, 0.5))
    optimizer.load_state_dict(state)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert not torch.equal(layer.weight, before)
