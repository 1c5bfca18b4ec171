"""Sparse inference: the measured rule, the same outputs for models of any structure, and the exported network."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import powerprop as pp
from powerprop import kernel
from powerprop.continual import make_task
from powerprop.export import Choice, Exported, Plan, choose, measure
from powerprop_paper.models import mlp
from sparse_nets import MODELS, assert_same, pruned, seeded, set_times


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
@pytest.mark.parametrize("name", ["lenet", "branching", "looking"])
def test_where_nothing_is_faster_the_model_itself_answers(name: str) -> None:
    net, x = pruned(name), MODELS[name][1](4)
    fast = pp.export.sparse(net, x)
    assert fast.plan.network == "dense"
    assert not fast.plan.removed
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(_all(fast(x)), _all(net(x)), strict=True))


def _all(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


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
    wanted, seen = fast(x), []
    handles = [
        fast.register_forward_pre_hook(lambda *_: seen.append("before")),
        fast.register_forward_hook(lambda module, args, output: output + 1),
    ]
    torch.testing.assert_close(fast(x), wanted + 1)
    for handle in handles:
        handle.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    torch.testing.assert_close(fast(x), wanted)
    everywhere.remove()
    torch.testing.assert_close(fast(x), wanted)
    assert (seen[0], seen[-1]) == ("before", Exported)
    if network == "dense":
        fast.network.register_forward_hook(lambda module, args, output: output + 2)
        torch.testing.assert_close(fast(x), wanted + 2)


@pytest.mark.usefixtures("sparse_wins")
def test_a_copy_has_tensors_and_a_type_of_its_own() -> None:
    net, x = pruned("mlp"), MODELS["mlp"][1](4)
    fast = pp.export.sparse(net, x)
    other, wanted = copy.deepcopy(fast), fast(x)
    assert torch.equal(other(x), wanted)
    torch.testing.assert_close(copy.deepcopy(other).double()(x.double()).float(), wanted)
    other.network.program0.plan_for(4).weights.zero_()
    assert not torch.allclose(other(x), wanted)
    assert torch.equal(fast(x), wanted)
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


# --- the rule -----------------------------------------------------------------------------------------------------


def test_times_are_the_least_of_interleaved_rounds() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = measure.best_times(calls, torch.device("cpu"), seconds=0)
    assert times.keys() == {"a", "b"}
    assert all(t > 0 for t in times.values())
    assert order[:4] == ["a", "b", "a", "b"]


def test_the_rule() -> None:
    assert choose(1.0, 0.95) == "sparse"
    assert choose(1.0, 0.96) == choose(1.0, 0.5, margin=0.4) == choose(1.0, None) == "dense"


def test_the_rule_decides_by_the_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = iter([(1.0, 0.1), (1.0, 0.98), (1.0, 0.3)])  # of fc1, fc2, fc3

    def measured(calls: dict[str, object], device: object, seconds: float = 0.0) -> dict[str, float]:
        if "smaller" in calls:
            return {"dense": 9.0, "smaller": 8.0, "sparse": 5.0}
        layer = next(queue, (9.0, 5.0))  # the network once more
        return dict(zip(("dense", "sparse"), layer, strict=True))

    set_times(monkeypatch, measured)
    net = mlp([20, 40, 30, 5], generator=seeded())
    pp.prune(net, 0.8)
    made = pp.export.sparse(net, torch.randn(3, 20)).plan
    assert [(c.layer, c.form, c.dense, c.sparse) for c in made.choices] == [
        ("fc1", "sparse", 1.0, 0.1), ("fc2", "dense", 1.0, 0.98), ("fc3", "sparse", 1.0, 0.3)
    ]  # fmt: skip
    assert (made.network, made.batch, made.margin, made.speedup) == ("sparse", 3, 0.95, 1.8)


def test_a_network_that_was_fast_only_once_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(calls: dict[str, object], device: object, seconds: float = 0.0) -> dict[str, float]:
        return {n: 1.0 if n == "dense" else (2.0 if seconds == 0.1 else 0.5) for n in calls}

    set_times(monkeypatch, measured)
    made = pp.export.sparse(pruned("mlp"), MODELS["mlp"][1](3)).plan
    assert (made.network, made.speedup) == ("dense", 1.0)


def test_layers_that_are_not_sparse_are_not_measured() -> None:
    fast = pp.export.sparse(mlp([20, 40, 5], generator=seeded()), torch.randn(3, 20))
    assert [c.form for c in fast.plan.choices] == ["dense", "dense"]
    assert all(c.dense is None and "less than 50% is zero" in c.reason for c in fast.plan.choices)


def test_half_precision_stays_dense() -> None:
    net, x = pruned("mlp").bfloat16(), torch.randn(4, 20).bfloat16()
    fast = pp.export.sparse(net, x)
    assert all(c.form == "dense" and "no sparse product here" in c.reason for c in fast.plan.choices)
    torch.testing.assert_close(fast(x), net(x), rtol=0.05, atol=0.05)


def test_without_the_kernel_layers_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_loaded", lambda: (None, "torch: there is no kernel"))
    net, x = pruned("mlp"), torch.randn(4, 20)
    fast = pp.export.sparse(net, x)
    assert all("no sparse product here: torch: there is no kernel" in c.reason for c in fast.plan.choices)
    torch.testing.assert_close(fast(x), net(x))
