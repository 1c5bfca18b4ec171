"""Sparse compute against the masked dense path: the same numbers, masks and files, for every method."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powerprop as pp
from nets import BASES, batch, closing, net, same, train, wrap
from powerprop.sparse.linear import SparseLinear
from sparse import METHODS, sparse

STEPS = 200
WORKS = [m for m in METHODS if m not in ("snfs", "topkast-dense")]
every_method = pytest.mark.parametrize("method", WORKS)


def pair(method: str, base: str, alpha: float, **options: object) -> tuple[nn.Sequential, pp.Powerprop]:
    """The small network of the methods' own contract, all of whose linear layers compute sparsely."""
    model, optimizer = sparse(method, base, alpha, **{"steps": STEPS, **options})
    pp.sparse_compute(model, optimizer, layers=["*"])
    return model, optimizer


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items()}


def close(one: nn.Module, other: nn.Module, tolerance: float) -> bool:
    left, right = whole(one), whole(other)
    return left.keys() == right.keys() and all(
        torch.allclose(t, right[n], rtol=tolerance, atol=tolerance) for n, t in left.items()
    )


def layers(model: nn.Module) -> list[SparseLinear]:
    return [m for m in model.modules() if isinstance(m, SparseLinear)]


@every_method
@pytest.mark.parametrize(("alpha", "base"), [(1.0, "momentum"), (1.5, "adam"), (2.0, "momentum")])
def test_the_numbers_and_masks_of_the_masked_dense_path_over_200_steps(method: str, alpha: float, base: str) -> None:
    """In float64, where no rounding decides who is dropped; the kernel's float32 is held to it below."""
    dense, dense_optimizer = sparse(method, base, alpha, dtype=torch.float64, steps=STEPS)
    model, optimizer = pair(method, base, alpha, dtype=torch.float64)
    was_sparse = False
    for step in range(STEPS):
        for each, its in ((dense, dense_optimizer), (model, optimizer)):
            x, y = batch(step)
            its.zero_grad()
            F.cross_entropy(each(x.double()), y).backward()
            its.step()
        was_sparse |= bool(layers(model))
        if step % 20 == 19:
            assert close(dense, model, 1e-9)
            assert dense_optimizer.active == optimizer.active
            assert dense_optimizer.trainable == optimizer.trainable
    assert was_sparse


def test_every_optimiser_of_the_masked_dense_path_takes_the_same_steps() -> None:
    for base in BASES:
        dense, dense_optimizer = sparse("static", base, 2.0)
        model, optimizer = pair("static", base, 2.0)
        if base == "lion":
            optimizer.moments = dense_optimizer.moments = ["momentum"]
        train(dense, dense_optimizer, 30)
        train(model, optimizer, 30)
        assert close(dense, model, 1e-5), base


@pytest.mark.parametrize("method", ["set", "rigl", "iterative", "topkast"])
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_either_path_goes_on_from_the_other_s_checkpoint(
    method: str, before: bool, after: bool, optimizer_first: bool
) -> None:
    """Bit for bit where both are sparse, to rounding otherwise."""

    def run(computes: bool, seed: int = 0) -> tuple[nn.Sequential, pp.Powerprop]:
        model, optimizer = sparse(method, "adam", 1.5, seed=seed, steps=STEPS)
        if computes:
            pp.sparse_compute(model, optimizer, layers=["*"])
        return model, optimizer

    model, optimizer = run(before)
    train(model, optimizer, 60)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    plain, _ = sparse(method, "adam", 1.5)
    assert {n: t.shape for n, t in saved["model"].items()} == {n: t.shape for n, t in plain.state_dict().items()}
    again, resumed = run(after, seed=5)
    train(again, resumed, 3)
    if optimizer_first:
        resumed.load_state_dict(saved["optimizer"])
    again.load_state_dict(saved["model"])
    if not optimizer_first:
        resumed.load_state_dict(saved["optimizer"])
    train(model, optimizer, 40, start=60)
    train(again, resumed, 40, start=60)
    assert optimizer.active == resumed.active
    assert same(model, again) if before and after else close(model, again, 1e-4)
    assert not after or layers(again)


@pytest.mark.parametrize("method", ["static", "rigl", "topkast"])
def test_bits_depend_neither_on_threads_nor_on_the_run(method: str) -> None:
    def run(threads: int) -> nn.Module:
        generator = torch.Generator().manual_seed(0)
        torch.set_num_threads(threads)
        try:
            model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))  # layer norms do depend on threads
            with torch.no_grad():
                for p in model.parameters():
                    p.normal_(0, 0.4, generator=generator)
            optimizer = wrap(model, "momentum", sparsify=METHODS[method](sparsity=0.8, steps=STEPS))
            pp.sparse_compute(model, optimizer, layers=["*"])
            train(model, optimizer, 40)
            return model
        finally:
            torch.set_num_threads(1)

    alone = run(1)
    assert all(same(alone, run(threads)) for threads in (1, 2, 3))


def test_copies_train_on_identically_and_a_model_s_copy_belongs_to_nobody() -> None:
    model, optimizer = pair("rigl", "adam", 2.0)
    train(model, optimizer, 12)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    alone = copy.deepcopy(model)
    pp.densify(alone)
    assert len(layers(model)) == len(layers(twin)) == 3
    assert not layers(alone)
    assert same(model, alone)
    train(model, optimizer, 20, start=12)
    train(twin, twin_optimizer, 20, start=12)
    assert same(model, twin)
    assert layers(twin)[0].owner is twin_optimizer.compute


# --- what RigL grows by ---------------------------------------------------------------------------------------------


def rigl(computes: bool) -> tuple[nn.Sequential, pp.Powerprop]:
    model, optimizer = sparse("rigl", "momentum", 2.0, dtype=torch.float64, interval=4, steps=STEPS)
    if computes:
        pp.sparse_compute(model, optimizer, layers=["*"])
    return model, optimizer


def pieces(model: nn.Module, optimizer: pp.Powerprop, cleared: str) -> None:
    """Three micro-batches a step, a pass that is thrown away, and gradients cleared in another way."""
    for step in range(10):
        for number in range(4):
            x, y = batch(10 * step + number)
            loss = F.cross_entropy(model(x.double()), y)
            if number == 1:
                optimizer.zero_grad(set_to_none=cleared == "to none")
            loss.backward()
        optimizer.step()


def closures(model: nn.Module, optimizer: pp.Powerprop, cleared: str) -> None:
    for step in range(10):
        x, y = batch(step)
        optimizer.step(closing(model, optimizer, x.double(), y))


@pytest.mark.parametrize("loop", [pieces, closures])
@pytest.mark.parametrize("cleared", ["to none", "to zero"])
def test_the_dense_gradient_is_that_of_all_passes_since_gradients_were_cleared(loop: object, cleared: str) -> None:
    runs = [rigl(computes) for computes in (False, True)]
    for model, optimizer in runs:
        loop(model, optimizer, cleared)  # type: ignore[operator]
    assert runs[0][1].active == runs[1][1].active
    assert close(runs[0][0], runs[1][0], 1e-9)


def test_nothing_is_noted_but_for_the_step_that_needs_it() -> None:
    model, optimizer = pair("rigl", "momentum", 2.0, interval=4)
    noted = []
    for step in range(9):
        train(model, optimizer, 1, start=step)
        noted.append(layers(model)[0].record is not None)
    assert noted == [(step + 2) % 4 == 0 for step in range(9)]


def test_a_gradient_of_before_is_an_error_that_says_what_to_do() -> None:
    model, optimizer = sparse("rigl", "momentum", 2.0, interval=4)
    train(model, optimizer, 3)
    x, y = batch(3)
    F.cross_entropy(model(x), y).backward()
    pp.sparse_compute(model, optimizer, layers=["*"])
    before = whole(model)
    with pytest.raises(
        RuntimeError, match=r"RigL chooses weights by the gradient.*'0\.weight'.*call backward\(\) after"
    ):
        optimizer.step()
    assert all(torch.equal(t, before[n]) for n, t in whole(model).items())


# --- there and back ---------------------------------------------------------------------------------------------------


def test_densify_gives_back_the_model_its_optimiser_and_every_number() -> None:
    model, optimizer = pair("topkast", "adam", 2.0)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    parameters = list(model.parameters())
    train(model, optimizer, 30)
    train(twin, twin_optimizer, 30)
    pp.densify(model)
    assert optimizer.compute is None
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert not layers(model)
    assert same(model, twin)
    train(model, optimizer, 30, start=30)
    train(twin, twin_optimizer, 30, start=30)
    assert close(model, twin, 1e-5)
    pp.densify(model)


def test_gradients_and_memory_have_the_size_of_the_active_weights() -> None:
    model, optimizer = pair("static", "adam", 2.0)
    train(model, optimizer, 2)
    for layer in layers(model):
        count = round(0.2 * layer.in_features * layer.out_features)
        state = optimizer.base.state[layer.values]
        assert {layer.values.numel(), layer.values.grad.numel(), state["exp_avg"].numel()} == {count}  # type: ignore[union-attr]


def test_layers_change_over_when_masks_make_it_pay_and_shrink_with_them() -> None:
    model, optimizer = pair("iterative", "momentum", 2.0, steps=60, start=0.2, stop=0.8, interval=12)
    counts = []
    for step in range(60):
        train(model, optimizer, 1, start=step)
        counts.append([layer.values.numel() for layer in layers(model)])
    assert counts[22] == []
    assert [c[0] for c in (counts[23], counts[35], counts[47])] == sorted({c[0] for c in counts if c}, reverse=True)


def test_whoever_reads_the_weight_gets_the_matrix_with_its_gradient() -> None:
    model, _ = pair("static", "momentum", 1.0)
    layer = layers(model)[0]
    weight = layer.weight
    assert torch.equal(weight, model.state_dict()["0.weight"])
    weight.square().sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(layer.values.grad, 2 * layer.values)  # type: ignore[arg-type]
    assert "weights=24" in repr(layer)


def test_the_model_is_evaluated_saved_and_exported_as_it_is(tmp_path: object) -> None:
    model, optimizer = pair("static", "momentum", 2.0)
    train(model, optimizer, 5)
    x = batch(1)[0]
    plain = copy.deepcopy(model)
    pp.densify(plain)
    with torch.no_grad():
        assert torch.allclose(model.eval()(x), plain.eval()(x), atol=1e-6)
    path = f"{tmp_path}/net.safetensors"
    pp.save(model, path)
    assert same(pp.load(path, net(seed=4, hidden=20)), plain)
    assert torch.allclose(pp.export.sparse(model, x)(x), plain(x), atol=1e-5)
    pp.load(path, model)
    train(model, optimizer, 1)
    assert len(layers(model)) == 3
    with pytest.raises(ValueError, match=r"0, 2, 4 compute sparsely .* powerprop\.densify\(model\)"):
        pp.prune(model, 0.9)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_what_cannot_work_says_why() -> None:
    for method, options, said in (
        ("snfs", {}, "SNFS chooses weights by the momentum of all of them"),
        ("topkast-dense", {}, "TopKAST with backward_sparsity=0 trains all weights"),
    ):
        model, optimizer = sparse(method, **options)
        with pytest.raises(ValueError, match=said):
            pp.sparse_compute(model, optimizer)
    model, optimizer = sparse("static")
    with pytest.raises(TypeError, match="optimizer must be a Powerprop, got SGD"):
        pp.sparse_compute(model, optimizer.base)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of another model"):
        pp.sparse_compute(net(), optimizer)
    with pytest.raises(ValueError, match="batch must be a positive whole number of rows, got 0"):
        pp.sparse_compute(model, optimizer, batch=0)
    with pytest.raises(ValueError, match=r"layers=\['x'\] match no weight of a linear layer of this optimiser: 0"):
        pp.sparse_compute(model, optimizer, layers=["x"])
    factored = net()
    optimizer = pp.Powerprop(torch.optim.Adafactor(factored.parameters()), factored, 1.0, sparsify=pp.Static(0.5))
    with pytest.raises(ValueError, match="Adafactor looks at each weight as a matrix"):
        pp.sparse_compute(factored, optimizer)


def test_inputs_that_do_not_fit_say_so_and_odd_batches_are_right() -> None:
    model, _ = pair("static", "momentum", 2.0)
    plain = copy.deepcopy(model)
    pp.densify(plain)
    for shape in ((0, 6), (1, 6), (6,), (17, 6), (2, 3, 6), (65, 6)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
        grads = []
        for each in (model, plain):
            each.zero_grad()
            (grad,) = torch.autograd.grad(each(x).square().sum(), x)
            grads.append((each(x), grad))
        assert torch.allclose(grads[0][0], grads[1][0], atol=1e-5)
        assert torch.allclose(grads[0][1], grads[1][1], atol=1e-4)
        assert grads[0][1].shape == x.shape
    with pytest.raises(ValueError, match=r"this layer takes \(\.\.\., 6\), got an input of shape \(4, 5\)"):
        model(torch.ones(4, 5))
    with pytest.raises(ValueError, match="values must be torch.float16 of shape"):
        model(torch.ones(4, 6).half())
    with pytest.raises(ValueError, match="on meta, as the activations are, got torch.float32 .* on cpu"):
        model(torch.ones(4, 6, device="meta"))
    layers(model)[0].weight = nn.Parameter(torch.ones(20, 6))  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"values must be torch.float32 of shape \(24,\).* got .* of shape \(20, 6\)"):
        model(torch.ones(4, 6))


@pytest.mark.filterwarnings("ignore:.*keeps none of its")
def test_a_layer_without_an_active_weight_gives_its_bias() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    optimizer = pp.Powerprop(
        torch.optim.Adam(model.parameters(), lr=0.01),
        model,
        2.0,
        sparsify=pp.Static(0.0, layers={"2.weight": 1 - 1e-9}),
    )
    pp.sparse_compute(model, optimizer, layers=["2.*"])
    for step in range(3):
        train(model, optimizer, 1, start=step)
    assert layers(model)[0].values.numel() == 0
    assert torch.equal(model(batch(0)[0]), model[2].bias.expand(16, 3))  # type: ignore[union-attr,operator]


def test_half_precision_stays_dense_and_says_so() -> None:
    model, optimizer = sparse("static", dtype=torch.bfloat16)
    report = pp.sparse_compute(model, optimizer)
    assert {choice.form for choice in report.values()} == {"dense"}
    assert "torch.bfloat16 on cpu; float32 or float64 on a CPU can" in str(report)


def test_the_report_is_a_table_of_what_was_measured_or_asked() -> None:
    model = nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 4))
    optimizer = pp.Powerprop(
        torch.optim.SGD(model.parameters(), lr=0.1), model, 2.0, sparsify=pp.Static(0.99, layers={"2.*": 0.2})
    )
    report = pp.sparse_compute(model, optimizer)
    assert (report["0.weight"].form, report["2.weight"].form) == ("sparse", "dense")
    assert report["0.weight"].sparse < report["0.weight"].dense  # type: ignore[operator]
    assert report["2.weight"].reason == "less than 40% is zero"
    lines = str(report).splitlines()
    assert lines[0].split() == ["shape", "sparsity", "dense", "µs", "sparse", "µs", "form"]
    assert lines[1].split()[:5] == ["0.weight", "600", "×", "600", "99.00%"]
    assert pp.sparse_compute(model, optimizer, layers=["2.weight"])["0.weight"].form == "dense"
    assert [type(m).__name__ for m in model] == ["Linear", "ReLU", "SparseLinear"]
