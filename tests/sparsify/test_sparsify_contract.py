"""The contract of every sparse-training method, for α = 1 and α > 1, under every kind of base optimiser."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp
from nets import batch, net, same, train, weights
from powerprop.allocate import DISTRIBUTIONS, layer_counts
from powerprop.weight import WeightState
from sparse import METHODS, RANDOM, REDISTRIBUTE, STEPS, counts, sparse
from unseen import UNSEEN

every_method = pytest.mark.parametrize("method", METHODS)
every_alpha = pytest.mark.parametrize("alpha", [1.0, 2.0])


def wanted(model: nn.Module, distribution: str, layers: dict[str, float] | None = None) -> dict[str, int]:
    named = dict(model.named_parameters())
    return layer_counts({n: named[n].shape for n in ("0.weight", "2.weight", "4.weight")}, 0.8, distribution, layers)


def base_for(method: str, alpha: float) -> str:
    """Every base optimiser with some methods and powers: all of all would take a minute."""
    return ["momentum", "adam", "adamw"][([*METHODS].index(method) + (alpha > 1)) % 3]


@every_method
@every_alpha
def test_asked_sparsity_and_exact_zeros(method: str, alpha: float) -> None:
    base = base_for(method, alpha)
    model, optimizer = sparse(method, base, alpha)
    reached = 48 if method == "iterative" else 1
    for step in range(STEPS):
        train(model, optimizer, 1, start=step)
        active = optimizer.active
        assert not any(p[~active[n]].any() for n, p in model.named_parameters() if n in active)
        if step + 1 >= reached:
            assert active.count() == sum(wanted(model, "uniform").values())
            assert method in REDISTRIBUTE or counts(optimizer) == wanted(model, "uniform") or method == "snip"


@every_method
@every_alpha
@pytest.mark.parametrize("unseen", ["fused adamw", "fresh data"])
def test_the_sparsity_is_exact_where_the_version_counter_shows_nothing(method: str, alpha: float, unseen: str) -> None:
    model = net(hidden=20)
    make, _ = UNSEEN[unseen]
    sparsify = METHODS[method](sparsity=0.8, steps=20)
    optimizer = pp.Powerprop(make(list(model.parameters())), model, alpha, sparsify=sparsify)
    train(model, optimizer, 20)
    active = optimizer.active
    assert active.count() == sum(wanted(model, "uniform").values())
    assert not any(p[~active[n]].any() for n, p in model.named_parameters() if n in active)


@every_method
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("layers", [None, {"0.*": 0.0, "4.*": 0.5}])
def test_every_distribution_and_layers_of_their_own(
    method: str, distribution: str, layers: dict[str, float] | None
) -> None:
    model, optimizer = sparse(method, alpha=1.5, distribution=distribution, layers=layers)
    train(model, optimizer, STEPS)
    plan = wanted(model, "uniform" if distribution == "global" else distribution, layers)
    own = {} if layers is None else {n: plan[n] for n in ("0.weight", "4.weight")}
    found = counts(optimizer)
    assert abs(sum(found.values()) - sum(plan.values())) <= (distribution == "global")
    assert {n: found[n] for n in own} == own
    assert distribution == "global" or method in REDISTRIBUTE or found == plan


@every_method
@every_alpha
def test_resume_is_bit_identical(method: str, alpha: float) -> None:
    base = base_for(method, alpha)
    options = {"steps": 130, "distribution": "erk"}
    model, optimizer = sparse(method, base, alpha, **options)
    train(model, optimizer, 31)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, 100, start=31)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, resumed = sparse(method, base, alpha, seed=5, **options)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(again, resumed, 100, start=31)
    assert same(model, again)
    assert optimizer.active == resumed.active
    assert optimizer.trainable == resumed.trainable


@every_method
def test_the_seed_decides(method: str) -> None:
    def run(seed: int) -> pp.Masks:
        model = net(hidden=20)
        sparsify = METHODS[method](sparsity=0.8, steps=STEPS, seed=seed)
        optimizer = pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model, 2.0, sparsify=sparsify)
        train(model, optimizer, 30)
        return optimizer.active

    assert run(3) == run(3)
    assert (run(3) == run(4)) == (method not in RANDOM)


@every_method
def test_learns(method: str) -> None:
    model, optimizer = sparse(method, "adam", 2.0, sparsity=0.5, steps=200)
    losses = train(model, optimizer, 200)
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])


@pytest.mark.parametrize("method", ["set", "rigl", "snfs", "dsr"])
@every_alpha
def test_masks_move_and_every_grown_weight_can_learn(method: str, alpha: float) -> None:
    model, optimizer = sparse(method, alpha=alpha)
    before = optimizer.active
    for step in range(45):
        train(model, optimizer, 1, start=step)
        if alpha > 1:
            assert pp.Masks.nonzero(model) == optimizer.active
    assert 0 < before.overlap(optimizer.active) < 1


@every_method
@every_alpha
def test_closures_are_evaluated_once_and_mean_the_same(method: str, alpha: float) -> None:
    plain, plain_optimizer = sparse(method, "adam", alpha)
    train(plain, plain_optimizer, 30)
    model, optimizer = sparse(method, "adam", alpha)
    calls = 0
    for step in range(30):
        x, y = batch(step)

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)  # noqa: B023
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
    assert calls == 30 + (method == "snfs")  # it looks for a momentum of the base optimiser, which begins later
    assert same(plain, model)


@every_method
def test_half_precision_weights(method: str) -> None:
    model, optimizer = sparse(method, alpha=2.0, dtype=torch.bfloat16)
    for step in range(30):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x.bfloat16()), y).backward()
        optimizer.step()
    assert method == "iterative" or optimizer.active.count() == sum(wanted(model, "uniform").values())
    assert all(p.isfinite().all() for p in model.parameters())


@every_method
def test_channels_last_means_the_same(method: str) -> None:
    def run(memory_format: torch.memory_format) -> dict[str, Tensor]:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.2, generator=generator)
        model = model.double().to(memory_format=memory_format)
        sparsify = METHODS[method](sparsity=0.7, steps=STEPS)
        optimizer = pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, sparsify=sparsify)
        x = torch.randn(8, 3, 6, 6, generator=generator, dtype=torch.float64).to(memory_format=memory_format)
        for _ in range(40):
            optimizer.zero_grad()
            model(x).square().mean().sub(1).square().backward()
            optimizer.step()
        return weights(model)

    last, first = run(torch.channels_last), run(torch.contiguous_format)
    assert all(torch.allclose(last[n], w, atol=1e-9) for n, w in first.items())


@every_method
def test_layers_without_a_gradient_are_left_alone(method: str) -> None:
    model, optimizer = sparse(method, base="sgd", alpha=2.0)
    train(model, optimizer, 1)
    before, masks = weights(model), optimizer.active
    for step in range(1, 20):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model[2].weight.grad = None  # type: ignore[union-attr]
        optimizer.step()
    if method != "iterative":
        assert torch.equal(optimizer.active["2.weight"], masks["2.weight"])
        assert torch.equal(model[2].weight, before["2.weight"])  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*keeps none of its")
@given(
    method=st.sampled_from([m for m in METHODS if m not in ("snip", "iterative")]),
    alpha=st.sampled_from([1.0, 1.5, 3.0]),
    sparsity=st.floats(0.0, 0.99),
    distribution=st.sampled_from(DISTRIBUTIONS),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    seed=st.integers(0, 100),
)
@settings(max_examples=40)
def test_the_count_never_changes(
    method: str, alpha: float, sparsity: float, distribution: str, sizes: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], 2))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5, generator=generator)
    extra = {"backward_sparsity": sparsity / 2} if method == "topkast" else {}
    sparsify = METHODS[method](
        **{"sparsity": sparsity, "distribution": distribution, "steps": 20, "seed": seed, "interval": 2, **extra}
        if method != "static"
        else {"sparsity": sparsity, "distribution": distribution, "seed": seed}
    )
    optimizer = pp.Powerprop(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5), model, alpha, sparsify=sparsify
    )
    start, layers = optimizer.active.count(), counts(optimizer)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(3, sizes[0], generator=generator)).tanh().sum().backward()
        optimizer.step()
        assert optimizer.active.count() == start
        assert method in REDISTRIBUTE or distribution == "global" or counts(optimizer) == layers


# --- updates that fail ----------------------------------------------------------------------------------------------


def everything(optimizer: pp.Powerprop) -> list[Tensor]:
    """Weights, φ, masks, the base optimiser's memory, the sparsifier's step, random numbers and threshold."""
    entries = optimizer.state_dict()["state"]
    tensors = [t for entry in entries.values() for t in entry.values() if isinstance(t, Tensor)]
    return [t.clone() for t in [*optimizer.model.parameters(), *tensors]]


def next_update(method: str, alpha: float, base: str) -> tuple[nn.Sequential, pp.Powerprop]:
    """A run whose next step is a mask update."""
    model, optimizer = sparse(method, base, alpha)
    train(model, optimizer, 0 if method == "snip" else 6)
    x, y = batch(6)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return model, optimizer


@pytest.mark.parametrize(
    ("method", "base", "where"),
    [
        *(
            (method, base, "weight")
            for method in ("snip", "set", "rigl", "snfs", "dsr")
            for base in ("sgd", "momentum")
        ),
        *((method, base, "gradient") for method in ("snip", "rigl") for base in ("sgd", "momentum")),
        ("snfs", "sgd", "gradient"),
    ],
)
@every_alpha
def test_an_update_that_meets_nan_names_the_layer_and_changes_nothing(
    method: str, alpha: float, base: str, where: str
) -> None:
    model, optimizer = next_update(method, alpha, base)
    last = model[4].weight
    assert isinstance(last, Tensor)
    assert last.grad is not None
    place = tuple(last.nonzero()[0])
    with torch.no_grad():
        (last if where == "weight" else last.grad)[place] = torch.nan
    before = [t.nan_to_num(7.0) for t in everything(optimizer)]
    with pytest.raises(FloatingPointError, match=r"'4\.weight' has 1 NaN among its \w+, so that no mask can be chosen"):
        optimizer.step()
    assert all(torch.equal(a, b.nan_to_num(7.0)) for a, b in zip(before, everything(optimizer), strict=True))


@pytest.mark.parametrize("method", ["iterative", "topkast"])
def test_a_pruning_that_meets_nan_changes_no_mask(method: str) -> None:
    model, optimizer = sparse(method, "sgd", 2.0)
    train(model, optimizer, 18 if method == "iterative" else 6)
    masks = optimizer.active
    x, y = batch(6)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    assert isinstance(model[4].weight.grad, Tensor)  # type: ignore[union-attr]
    model[4].weight.grad.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(FloatingPointError, match=r"'4\.weight' has \d+ NaN among its"):
        optimizer.step()
    assert optimizer.active == masks


@pytest.mark.parametrize("method", ["set", "rigl", "snfs", "dsr"])
@every_alpha
def test_an_update_that_failed_can_be_taken_again(method: str, alpha: float) -> None:
    def run(fails: bool) -> nn.Module:
        model, optimizer = next_update(method, alpha, "sgd")
        if fails:
            good = model[4].weight.detach().clone()  # type: ignore[union-attr,operator]
            with torch.no_grad():
                model[4].weight.view(-1)[int(good.flatten().nonzero()[0])] = torch.nan  # type: ignore[union-attr,operator]
            with pytest.raises(FloatingPointError):
                optimizer.step()
            with torch.no_grad():
                model[4].weight.copy_(good)  # type: ignore[union-attr,operator]
        optimizer.step()
        train(model, optimizer, 8, start=7)
        return model

    assert same(run(False), run(True))


# --- global settings of torch ---------------------------------------------------------------------------------------


@every_method
@every_alpha
@pytest.mark.usefixtures("deterministic")
def test_deterministic_algorithms(method: str, alpha: float) -> None:
    model, optimizer = sparse(method, "adamw", alpha)
    train(model, optimizer, 25)
    torch.use_deterministic_algorithms(False)
    twin, other = sparse(method, "adamw", alpha)
    train(twin, other, 25)
    assert same(model, twin)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_algorithms_with_other_layouts() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    where = torch.zeros(4, 3, 3, 3, dtype=torch.bool)
    where[1, 2] = True
    for alpha in (1.0, 2.0):
        WeightState("conv.weight", weight, alpha).put(where, torch.arange(1.0, 10.0))
        assert weight.detach()[1, 2].flatten().tolist() == pytest.approx(list(range(1, 10)))


@pytest.mark.parametrize("method", RANDOM)
def test_random_masks_do_not_depend_on_torch_s_defaults(method: str) -> None:
    def masks(default: torch.dtype) -> pp.Masks:
        model = net(hidden=20)
        torch.set_default_dtype(default)
        try:
            sparsify = METHODS[method](sparsity=0.8, steps=STEPS)
            optimizer = pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model, 2.0, sparsify=sparsify)
        finally:
            torch.set_default_dtype(torch.float32)
        train(model, optimizer, 15)
        return optimizer.active

    assert masks(torch.float64) == masks(torch.float32)
    with torch.device("meta"):
        assert METHODS[method](sparsity=0.8, steps=STEPS).random(torch.zeros(3, device="cpu")).device.type == "cpu"
