"""Task inference: its gradient against autograd, its answers on tasks that are easy to tell apart."""

import pytest
import torch
from torch import Tensor, nn

from powerprop.continual import INFERENCES, Classification, Strategy, accuracy_on, entropy_gradient, infer, make_task
from powerprop.continual.packing.infer import entropies, shortlist
from powerprop.continual.task import entropy
from tasks import CLASSES, NormNet, learner, toy_model, toy_task


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


@pytest.mark.parametrize("method", INFERENCES)
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
        nets.signatures.add(torch.tensor([[mean - 1], [mean + 1]]))
    assert nets.signatures.distance(torch.tensor([[1.2]])).tolist() == pytest.approx(
        [d / 1.01 for d in (1.44, 0.04, 0.64, 3.24, 77.44)]
    )
    assert shortlist(nets, torch.tensor([[1.2]]), Classification(), 4).tolist() == [False, True, False, False, False]
    # half way between two tasks both are near; for 1,000 inputs the margin is a factor of two
    assert shortlist(nets, torch.tensor([[1.51]]), Classification(), 4).tolist() == [False, True, True, False, False]
    assert shortlist(nets, torch.tensor([[1.51]]), Classification(), 1).tolist() == [False, False, True, False, False]
    assert shortlist(nets, torch.tensor([[1.58]]), Classification(), 4).tolist() == [False, False, True, False, False]
    assert shortlist(nets, torch.tensor([[1.58]] * 1000), Classification(), 4).tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_the_lowest_entropy_decides_among_the_short_list(trained: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([toy_task(t).test().x[:64] for t in (3, 1)])
    chosen = {3: [True, False, True, True, False], 1: [False, True, False, False, False]}
    answers = iter(chosen.values())
    monkeypatch.setitem(INFERENCES, "shortlist", lambda *_: torch.tensor(next(answers)))
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
    known = trained.predict(toy_task(0).test().x, group=64, unknown=0.5)
    assert (known.task == 0).all()
    strange = 0.01 * torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    assert (trained.predict(strange, unknown=0.2).task == -1).all()
    assert (trained.predict(strange).task >= 0).all()


def test_bad_arguments(trained: Strategy) -> None:
    x = toy_task(0).test().x
    with pytest.raises(ValueError, match="method must be one of shortlist, .*, got 'magic'"):
        trained.predict(x, method="magic")
    with pytest.raises(ValueError, match="group must be at least 1, got 0"):
        trained.predict(x, group=0)
    with pytest.raises(ValueError, match="task must be learned first"):
        learner().predict(x)


@pytest.mark.parametrize("method", INFERENCES)
def test_no_inputs_have_no_tasks(method: str, trained: Strategy) -> None:
    x = toy_task(0).test().x[:0]
    for group in (None, 1, 64):
        found = infer(trained.nets, x, trained.objective, method, group)
        assert found.tolist() == []
        assert found.dtype == torch.int64


@pytest.mark.parametrize("method", INFERENCES)
def test_candidates_must_be_some(method: str, trained: Strategy) -> None:
    with pytest.raises(ValueError, match="candidates must be at least 1, got 0"):
        infer(trained.nets, toy_task(0).test().x, trained.objective, method, candidates=0)


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
    for method in INFERENCES:
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
        assert (infer(ours.nets, x, ours.objective, method) == 1).all()
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
