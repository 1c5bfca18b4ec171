"""Task inference: its gradient against autograd, its answers on tasks that are easy to tell apart."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powerprop.continual import INFERENCES, Classification, Strategy, accuracy_on, entropy_gradient, infer, make_task
from powerprop.continual.packing.subnetworks import InputStats, NoMeansError, Sample
from powerprop.continual.packing.task_inference import Groups, entropies, shortlist
from powerprop.continual.task import entropy
from tasks import CLASSES, NormNet, learner, toy_model, toy_task

SUPERFLUOUS = [method for method in INFERENCES if method.endswith("superfluous")]
every_plain = pytest.mark.parametrize("method", [method for method in INFERENCES if method not in SUPERFLUOUS])


@pytest.fixture(scope="module")
def trained() -> Strategy:
    ours = learner(model=toy_model(width=64), steps=150, gamma=0.98)
    for t in range(5):
        ours.learn(toy_task(t))
    return ours


def test_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0], [50.0, 0.0, 0.0], [0.0, 0.0, -50.0]])
    expected = [1.0, 0.0, float(torch.log(torch.tensor(2.0)) / torch.log(torch.tensor(3.0)))]
    assert entropy(logits).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("heads", [0, 4])
def test_the_gradient_is_autograds(heads: int) -> None:
    ours = learner(alpha=1.375, head_count=heads)
    for t in range(4):
        ours.learn(toy_task(t))
    nets, x = ours.nets, toy_task(2).test().x[:16]
    pi = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    found = entropy_gradient(nets, x, pi, ours.objective)

    coefficients = pi.float().requires_grad_()
    theta = nets.theta()
    weights = {n: theta[n] * sum(c * nets.masks.mask(t)[n] for t, c in enumerate(coefficients)) for n in theta}
    for name, stack in nets._head_stacks().items():
        weights[name] = torch.einsum("t,t...->...", coefficients, stack)
    with nets.viewing(weights, 0) as model:
        (expected,) = torch.autograd.grad(entropy(model(x)).mean(), coefficients)
    assert torch.allclose(found.float(), expected, rtol=1e-4, atol=1e-6)


@every_plain
def test_groups_are_told_apart(method: str, trained: Strategy) -> None:
    right = [infer(trained.nets, toy_task(t).test().x, trained.objective, method, group=64) == t for t in range(5)]
    rate = float(torch.cat(right).double().mean())
    assert rate == 1 if method in ("shortlist", "exhaustive") else rate > 0.3


def test_exhaustive_takes_the_lowest_entropy(trained: Strategy) -> None:
    x = toy_task(1).test().x[:30]
    table = entropies(trained.nets, x, trained.objective)
    for t in range(5):
        expected = entropy(trained.logits(x, t)[:, :CLASSES])
        assert torch.allclose(table[t], expected, atol=1e-6)
    assert torch.equal(infer(trained.nets, x, trained.objective, "exhaustive", 1), table.argmin(0))
    means = torch.stack([table[:, :20].mean(1), table[:, 20:].mean(1)])
    expected = means.argmin(1).repeat_interleave(torch.tensor([20, 10]))
    assert torch.equal(infer(trained.nets, x, trained.objective, "exhaustive", 20), expected)


def test_a_short_list_has_near_tasks_only() -> None:
    # means 0, 1, 2, 3 and 10, variance 1 within tasks: the distances of an input at 1.2 are 1.44, 0.04, 0.64, 3.24, …
    nets = learner().nets
    for mean in (0.0, 1.0, 2.0, 3.0, 10.0):
        nets.stats.add(Sample(torch.tensor([[mean - 1], [mean + 1]] * 50)))
    assert nets.stats.distances(torch.tensor([[1.2]]), [1])[0].tolist() == pytest.approx(
        [d / 1.01 for d in (1.44, 0.04, 0.64, 3.24, 77.44)]
    )

    def listed(value: float, count: int = 1, candidates: int = 4) -> list[int]:
        groups = Groups(nets, torch.tensor([[value]] * count), [count], Classification(), candidates)
        return shortlist(groups)[0].nonzero()[:, 0].tolist()

    assert listed(1.2) == [1]
    # half way between two tasks both are near; for 1,000 inputs the margin is a factor of two
    assert listed(1.51) == [1, 2]
    assert listed(1.51, candidates=1) == [2]
    assert listed(1.58) == [2]
    assert listed(1.58, 1000) == [1, 2]


def standardised_task(index: int) -> Any:
    """Clouds whose every feature has mean 0 and variance 1 in every task: means say nothing."""
    task = toy_task(index, 1024)
    mean, std = task.train().x.mean(0), task.train().x.std(0)
    parts = [((part.x - mean) / std, part.y) for part in (task.train(), task.validation(), task.test())]
    return make_task(*parts, index=index, classes=task.classes)


def test_tasks_that_tie_are_never_parted() -> None:
    ours = learner(model=toy_model(width=96), steps=80, gamma=0.95, reuse="output", prunings=1, pruning_steps=10)
    for t in range(6):  # more than there are candidates
        ours.learn(standardised_task(t))
    for group, t in product((1, 8, 128), (0, 3, 5)):
        x = standardised_task(t).test().x
        found = [infer(ours.nets, x, ours.objective, method, group) for method in ("shortlist", "exhaustive")]
        assert torch.equal(*found)


def test_equal_distances_are_never_parted() -> None:
    nets = learner().nets
    for mean in (-1.0, 1.0, -1.0, 1.0, 5.0):
        nets.stats.add(Sample(torch.tensor([[mean - 0.1], [mean + 0.1]] * 5000)))
    groups = Groups(nets, torch.tensor([[0.0]]), [1], Classification(), candidates=1)
    assert shortlist(groups)[0].tolist() == [True, True, True, True, False]


def test_means_of_classes_by_hand() -> None:
    # task 0 has classes around 0 and 10, task 1 around 4 and 6: both have the mean 5
    kinds = {kind: InputStats(kind) for kind in ("task", "class")}
    for low, high in ((0.0, 10.0), (4.0, 6.0)):
        x = torch.tensor([[low - 1], [low + 1], [high - 1], [high + 1]] * 100)
        labels = torch.tensor([3, 3, 7, 7] * 100)
        for signatures in kinds.values():
            signatures.add(Sample(x, labels))
    x = torch.tensor([[9.0], [1.0]])
    assert kinds["task"].distances(x, [2])[0].tolist() == pytest.approx([0.0, 0.0])
    assert kinds["class"].distances(x, [1, 1]).tolist() == [
        pytest.approx([1 / 1.01, 9 / 1.01]), pytest.approx([1 / 1.01, 9 / 1.01])
    ]  # fmt: skip
    assert kinds["class"].distances(x, [2]).tolist() == [pytest.approx([1 / 1.01, 9 / 1.01])]
    assert kinds["task"].tied(0).tolist() == [True, True]
    assert kinds["class"].tied(0).tolist() == [True, False]


@pytest.mark.parametrize("means", ["task", "class"])
def test_what_is_kept_of_inputs_is_saved(means: str, tmp_path: Path) -> None:
    ours, again = (learner(steps=30, means=means) for _ in range(2))
    for t in range(3):
        ours.learn(toy_task(t))
    ours.save(tmp_path / "l")
    again.load(tmp_path / "l")
    x = torch.cat([toy_task(t).test().x[:20] for t in range(4)])
    for options in ({"group": 1}, {"group": 20, "unknown": 0.05}, {"unknown": 0.1}):
        found = [each.predict(x, **options) for each in (ours, again)]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with pytest.raises(ValueError, match="means"):
        learner(means="none").load(tmp_path / "l")


@pytest.mark.parametrize("kind", ["task", "class"])
def test_statistics_of_inputs_come_back(kind: Any) -> None:
    old, again, x = InputStats(kind), InputStats(kind), toy_task(1).test().x
    for t in range(3):
        old.add(Sample(*toy_task(t).train()))
    old.add(None)
    old.add(Sample(x[:, :2]))
    again.load_state(old.state(), 5)
    each = [1] * len(x)
    assert torch.equal(again.distances(x, each), old.distances(x, each))
    assert torch.equal(again.unknown(x, 0.05, each), old.unknown(x, 0.05, each))
    assert all(torch.equal(again.tied(t), old.tied(t)) for t in (0, 1, 2, 4))
    with pytest.raises(NoMeansError, match="task 3 has no stored mean input and deviation"):
        again.tied(3)


def test_without_stored_means() -> None:
    ours = learner(steps=30, means="none")
    for t in range(2):
        ours.learn(toy_task(t))
    x = toy_task(1).test().x
    with pytest.raises(NoMeansError, match="'shortlist' compares inputs with stored mean .*means='none'.*'exhaustive'"):
        ours.predict(x)
    with pytest.raises(NoMeansError, match="no stored mean input and deviation: .* was made with means='none'"):
        ours.predict(x, method="exhaustive", unknown=0.05)
    assert (ours.predict(x, method="exhaustive", group=64).task == 1).all()
    assert ours.nets.stats.state() == {}
    with pytest.raises(ValueError, match="means must be one of task, class, none, got 'some'"):
        learner(means="some")


def test_superfluous_outputs(trained: Strategy) -> None:
    for method in SUPERFLUOUS:
        with pytest.raises(ValueError, match=r"superfluous outputs, more than the 3 classes, got 3 outputs"):
            trained.predict(toy_task(0).test().x, method=method)
    ours = learner(model=toy_model(width=64, outputs=30), steps=100)
    for t in range(3):
        ours.learn(toy_task(t))
    x = toy_task(1).test().x[:16]
    even = torch.full((3,), 1 / 3, requires_grad=True)
    theta = ours.nets.theta()
    weights = {n: theta[n] * sum(c * ours.nets.masks.mask(t)[n] for t, c in enumerate(even)) for n in theta}
    with ours.nets.viewing(weights, None) as model:
        (expected,) = torch.autograd.grad(model(x)[:, CLASSES:].logsumexp(1).mean(), even)
    found = entropy_gradient(ours.nets, x, even.detach(), ours.objective, superfluous=True)
    assert torch.allclose(found.float(), expected, rtol=1e-4, atol=1e-6)
    assert set(ours.predict(x, method="oneshot-superfluous", group=None).task.tolist()) == {int(expected.argmin())}
    assert set(ours.predict(x, method="binary-superfluous", group=None).task.tolist()) <= {0, 1, 2}


def test_a_mixed_batch_is_not_given_one_task_unasked(trained: Strategy) -> None:
    x = torch.cat([toy_task(t).test().x[:64] for t in (0, 3)])
    single = trained.predict(x)
    assert torch.equal(single.task, trained.predict(x, group=1).task)
    assert len(single.task.unique()) > 1
    assert len(trained.predict(x, group=None).task.unique()) == 1
    given = accuracy_on(trained, toy_task(1), "class-incremental")
    assert given == accuracy_on(trained, toy_task(1), "class-incremental", group=1)


def test_the_lowest_entropy_decides_among_the_short_list(trained: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([toy_task(t).test().x[:64] for t in (3, 1)])
    chosen = {3: [True, False, True, True, False], 1: [False, True, False, False, False]}
    monkeypatch.setitem(INFERENCES, "shortlist", lambda _: torch.tensor(list(chosen.values())))
    found = infer(trained.nets, x, trained.objective, "shortlist", group=64)
    assert found.tolist() == [3] * 64 + [1] * 64


def test_predictions_come_back_in_order(trained: Strategy) -> None:
    parts = [toy_task(t).test() for t in (2, 0, 2, 4)]
    x = torch.cat([part.x[:32] for part in parts])
    found = trained.predict(x, group=32)
    assert found.task.view(4, 32)[:, 0].tolist() == [2, 0, 2, 4]
    for i, t in enumerate((2, 0, 2, 4)):
        rows = slice(32 * i, 32 * (i + 1))
        given = trained.predict(x[rows], t)
        assert torch.equal(found.label[rows], given.label)
        assert torch.allclose(found.entropy[rows], given.entropy, atol=1e-6)


def test_class_incremental_accuracy_counts_the_task(trained: Strategy) -> None:
    given = accuracy_on(trained, toy_task(1), "task-incremental")
    assert accuracy_on(trained, toy_task(1), "class-incremental", group=128) == given
    assert accuracy_on(trained, toy_task(1), "class-incremental", group=1) < given
    assert accuracy_on(trained, toy_task(1), "domain-incremental", group=128) == given


def test_unknown_inputs_are_flagged(trained: Strategy) -> None:
    known = trained.predict(toy_task(0).test().x, group=64, unsure=0.5)
    assert (known.task == 0).all()
    strange = 0.01 * torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    assert (trained.predict(strange, unsure=0.2, group=None).task == -1).all()
    assert (trained.predict(strange).task >= 0).all()
    far = 20 * torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    assert float(trained.predict(far, unsure=0.2).task.ge(0).double().mean()) > 0.5  # sure, far from all data
    found = trained.predict(far, unknown=0.05)
    assert (found.task == -1).all()
    assert (found.number == -1).all()


def test_the_rate_of_false_alarms_is_about_what_was_asked(trained: Strategy) -> None:
    x = torch.cat([toy_task(t).test().x for t in range(5)])
    for rate in (0.02, 0.05, 0.1, 0.2):
        alarms = trained.nets.stats.unknown(x, rate, [1] * 640)
        assert rate / 10 < float(alarms.double().mean()) < 2 * rate
    assert not trained.nets.stats.unknown(x[:128], 0.05, [128]).any()


def test_the_limit_of_unknown_inputs_by_hand() -> None:
    signatures = InputStats()
    held = torch.linspace(0, 10, 1001)[:, None]  # distances to the mean 0 in units of 1.01: up to 100 / 1.01
    signatures.add(Sample(torch.tensor([[-1.0], [1.0]] * 50), validation=held))
    assert signatures.limit(0, 0.1) == pytest.approx(81 / 1.01, rel=1e-3)
    assert signatures.limit(0, 0.5) == pytest.approx(25 / 1.01, rel=1e-3)
    x = torch.tensor([[8.8], [9.1], [0.0], [30.0]])
    assert signatures.unknown(x, 0.1, [1, 1, 1, 1]).tolist() == [False, True, False, True]
    assert signatures.unknown(x, 0.1, [2, 2]).tolist() == [False, False, True, True]
    assert signatures.unknown(torch.zeros(1, 2), 0.1, [1]).tolist() == [True]
    signatures.add(Sample(torch.tensor([[29.0], [31.0]] * 50)))  # a task where the last input is at home
    assert signatures.unknown(x, 0.1, [1, 1, 1, 1]).tolist() == [False, True, False, False]


def test_bad_arguments(trained: Strategy) -> None:
    x = toy_task(0).test().x
    with pytest.raises(ValueError, match="method must be one of shortlist, .*, got 'magic'"):
        trained.predict(x, method="magic")
    with pytest.raises(ValueError, match="group must be at least 1, got 0"):
        trained.predict(x, group=0)
    with pytest.raises(ValueError, match="task must be learned first"):
        learner().predict(x)
    for method in INFERENCES:
        with pytest.raises(ValueError, match="candidates must be at least 1, got 0"):
            infer(trained.nets, x, trained.objective, method, candidates=0)


def test_no_inputs_have_no_tasks(trained: Strategy) -> None:
    for method, group in product(INFERENCES, (None, 1, 64)):
        found = infer(trained.nets, toy_task(0).test().x[:0], trained.objective, method, group)
        assert found.tolist() == []
        assert found.dtype == torch.int64


class Spare(nn.Module):
    """A network with a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare = toy_model(), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("search", ["binary", "taylor"])
def test_layers_that_are_not_used_are_no_obstacle(search: str) -> None:
    ours = learner(model=Spare(), search=search)
    for t in range(2):
        ours.learn(toy_task(t))
    x = toy_task(1).test().x
    found = entropy_gradient(ours.nets, x, torch.tensor([0.5, 0.5]), ours.objective)
    assert found.isfinite().all()
    for method in ("shortlist", "oneshot", "binary", "exhaustive"):
        assert len(infer(ours.nets, x, ours.objective, method)) == len(x)


class TwoWidths(nn.Module):
    """Heads of three and of four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(12, 32), nn.ModuleList([nn.Linear(32, 3), nn.Linear(32, 4)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](torch.relu(self.body(x)))  # type: ignore[no-any-return]


def test_heads_of_different_widths_cannot_be_mixed() -> None:
    ours = learner(model=TwoWidths(), heads="heads")
    ours.learn(toy_task(0))
    x, y = toy_task(1).train()
    ours.learn(make_task((x, y), index=1, classes=range(4)))
    for method in ("exhaustive", "shortlist"):
        assert (infer(ours.nets, x, ours.objective, method, None) == 1).all()
    for method in ("oneshot", "binary"):
        with pytest.raises(ValueError, match=r"mix the heads.*same shapes.*\(3, 32\).*\(4, 32\).*shortlist"):
            infer(ours.nets, x, ours.objective, method)


def test_dropout_does_not_disturb_the_gradient() -> None:
    ours = learner(model=NormNet(), heads="out")
    for t in range(2):
        ours.learn(toy_task(t))
    x, even = toy_task(1).test().x, torch.tensor([0.5, 0.5])
    expected = entropy_gradient(ours.nets, x, even, ours.objective)
    ours.model.train()
    assert torch.equal(entropy_gradient(ours.nets, x, even, ours.objective), expected)
    assert ours.model.training
