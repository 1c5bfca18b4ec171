"""Replay by hand: what a memory keeps, how steps are rehearsed and projected."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor, nn

from powerprop.continual import (
    AGEM,
    ER,
    GEM,
    Classification,
    JointTraining,
    Memory,
    PerfectMemory,
    Regression,
    Rehearsal,
    Strategy,
    combine,
    make_task,
)
from powerprop.continual.gem import Gradients, least_above, least_nonnegative
from powerprop.continual.memory import reservoir
from powerprop.reparam import psi_inverse, slope
from powerprop_paper.models import mlp
from strategies import make, tensors


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sgd(rate: float = 0.1):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


# --- the memory -------------------------------------------------------------------------------------------------


def test_a_reservoir_keeps_every_example_with_the_same_probability() -> None:
    times = torch.zeros(60)
    generator = seeded(1)
    for _ in range(2000):
        memory = Memory(6)
        memory.add((torch.arange(start, start + 12) for start in range(0, 60, 12)), 0, generator)
        times[memory.columns[0]] += 1
    expected = 2000 * 6 / 60
    assert times.sum() == 2000 * 6
    # Examples of one reservoir are drawn without replacement, so that the statistic is below chi-square's, 59 degrees.
    assert float(((times - expected) ** 2 / expected).sum()) < 87.2  # its 99th percentile


def test_later_examples_take_the_slots_that_they_draw() -> None:
    slots, which = reservoir(0, 3, 4, seeded())
    assert slots.tolist() == which.tolist() == [0, 1, 2]
    slots, which = reservoir(3, 100, 4, seeded())
    assert sorted(slots.tolist()) == sorted(set(slots.tolist()))
    assert set(slots.tolist()) <= {0, 1, 2, 3}
    assert len(which) == len(slots)
    assert reservoir(7, 2, None, seeded())[0].tolist() == [7, 8]


def test_an_equal_memory_has_the_same_number_of_every_task() -> None:
    memory = Memory(12, equal=True)
    for task in range(3):
        memory.add([(torch.full((50, 2), float(task)), torch.arange(50))], task, seeded(task))
        assert memory.tasks.bincount().tolist() == [12 // (task + 1)] * (task + 1)
    assert torch.equal(memory.columns[0][:, 0].long(), memory.tasks)
    with pytest.raises(ValueError, match="memory=2 has no room for one example of each of 3 tasks"):
        Memory(2, equal=True).add([torch.zeros(3)], 2, seeded())


@pytest.mark.parametrize(
    "batch",
    [
        torch.rand(5, 2),
        (torch.rand(5, 2), torch.arange(5)),
        [torch.rand(5, 2)],
        {"x": torch.rand(5), "y": torch.rand(5)},
    ],
)
@pytest.mark.parametrize("capacity", [3, None])
def test_batches_come_back_in_their_form_and_after_saving(batch: object, capacity: int | None) -> None:
    memory, again = Memory(capacity), Memory(capacity)
    memory.add([batch, batch], 0, seeded())
    again.load_state(*memory.state())
    rows = torch.tensor([2, 0])
    for each in (memory, again):
        assert len(each) == (10 if capacity is None else 3)
        found = each.batch(rows)
        assert type(found) is type(batch)
        assert not isinstance(batch, dict) or list(found) == list(batch)
    assert torch.equal(memory.columns[0], again.columns[0])


def test_a_memory_says_what_it_cannot_keep_and_stays_as_it_was() -> None:
    memory = Memory(4)
    memory.add([(torch.zeros(3, 2), torch.zeros(3))], 0, seeded())
    for batch, kind, message in (
        ((torch.zeros(3, 2), ["a", "b", "c"]), TypeError, "row for each example, got .*list"),
        ((torch.zeros(3, 2), torch.zeros(2)), TypeError, "row for each example"),
        (torch.zeros(3, 2), ValueError, "batches of the form tuple, got tensor"),
        ((torch.zeros(3, 5), torch.zeros(3)), ValueError, "all must be alike"),
    ):
        with pytest.raises(kind, match=message):
            memory.add([(torch.ones(9, 2), torch.ones(9)), batch], 1, seeded())
        assert memory.columns[0].sum() == 0
        assert len(memory) == memory.seen == 3
    with pytest.raises(ValueError, match="task 1: there is no data"):
        memory.add([], 1, seeded())
    with pytest.raises(ValueError, match="has 3 examples, this one has room for 2"):
        Memory(2).load_state(*memory.state())
    with pytest.raises(ValueError, match="at least one example, got 0"):
        Memory(0)


# --- the quadratic program --------------------------------------------------------------------------------------


def test_the_program_by_hand() -> None:
    one = np.eye(1)
    assert least_nonnegative(one, np.array([-3.0])).tolist() == [3.0]  # against the memory: project
    assert least_nonnegative(one, np.array([2.0])).tolist() == [0.0]  # along with it: leave
    # Two memories at 60°, ½v'Pv + q'v with P = [[1, ½], [½, 1]]: both bind for q = (-1, -1), at v = (⅔, ⅔).
    p = np.array([[1.0, 0.5], [0.5, 1.0]])
    np.testing.assert_allclose(least_nonnegative(p, np.array([-1.0, -1.0])), [2 / 3, 2 / 3])
    np.testing.assert_allclose(least_nonnegative(p, np.array([-1.0, 0.0])), [1.0, 0.0])  # the second holds by itself
    np.testing.assert_allclose(least_above(0.5, p, np.array([1.0, 1.0])), [0.5, 0.5])  # the margin
    np.testing.assert_allclose(least_above(0.5, p, np.array([-2.0, 0.0])), [1.75, 0.5])


@settings(max_examples=200)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 10**6), st.booleans(), st.sampled_from([0.0, 0.5]))
def test_the_program_agrees_with_scipy(tasks: int, size: int, seed: int, twins: bool, margin: float) -> None:
    """½‖Gᵀu + g + margin Gᵀ1‖² over u ≥ 0 is non-negative least squares; the step is unique, u need not be."""
    rng = np.random.default_rng(seed)
    memories, gradient = rng.normal(size=(tasks, size)), rng.normal(size=size)
    if twins:
        memories[-1] = memories[0]
        memories[0] *= 0 if tasks > 2 else 1
    v = least_above(margin, memories @ memories.T, memories @ gradient)
    other = margin + nnls(memories.T, -gradient - margin * memories.sum(0))[0]
    np.testing.assert_allclose(memories.T @ v, memories.T @ other, atol=1e-7)
    assert (v >= margin).all()
    assert (memories @ (gradient + memories.T @ v)).min() > -1e-8


# --- projections ------------------------------------------------------------------------------------------------


class Pull(Regression):
    """The loss of a batch c is c·w: its gradient is c."""

    mixes_tasks = True

    def loss(self, model: nn.Module, batch: Tensor, task: int | Tensor) -> Tensor:  # type: ignore[override]
        return (batch.mean(0) * model.weight[0]).sum()


def pulled(kind: type[Strategy], first: list[list[float]], then: list[float], **options: object) -> Tensor:
    """The gradient of a step along `then`, after tasks with these gradients."""
    model = nn.Linear(2, 1, bias=False)
    learner = kind(model, sgd(), objective=Pull(), batch_size=1, **options)
    for task, gradient in enumerate(first):
        learner.begin(task)
        learner.end(torch.tensor([gradient]))
    learner.begin()
    learner.step(Pull().loss(model, torch.tensor([then]), 0))
    return model.weight.grad[0]


def test_a_gem_by_hand() -> None:
    # g·r = -1, r·r = 2: g + ½r
    assert torch.allclose(pulled(AGEM, [[1.0, 1.0]], [1.0, -2.0]), torch.tensor([1.5, -1.5]))
    assert torch.equal(pulled(AGEM, [[1.0, 1.0]], [2.0, -1.0]), torch.tensor([2.0, -1.0]))
    assert torch.equal(pulled(AGEM, [], [2.0, -1.0]), torch.tensor([2.0, -1.0]))


def test_gem_by_hand() -> None:
    corner = [[1.0, 0.0], [0.0, 1.0]]
    assert torch.allclose(pulled(GEM, corner, [-3.0, -2.0], margin=0.0), torch.zeros(2), atol=1e-6)
    assert torch.allclose(pulled(GEM, corner, [-3.0, 2.0], margin=0.0), torch.tensor([0.0, 2.0]), atol=1e-6)
    assert torch.allclose(pulled(GEM, corner, [-3.0, 2.0], margin=0.5), torch.tensor([0.0, 2.5]), atol=1e-6)
    assert torch.equal(pulled(GEM, corner, [3.0, 2.0], margin=0.5), torch.tensor([3.0, 2.0]))


def violations(
    kind: type[Strategy], options: dict[str, float], weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Steps that go against the memory to first order, Σ (∂M/∂φ) Δφ > 0, and steps that were projected."""
    if not weighed:
        plain = lambda self, name: torch.ones_like(self.masters[name].param)  # noqa: E731
        monkeypatch.setattr("powerprop.optim.Powerprop.slope", plain)
    options = {"memory": 30, "rehearsed": 30, "steps": 60, "alpha": 1.5} | options
    learner = kind(mlp([8, 16, 3], generator=seeded()), sgd(0.05), **options)
    learner.learn(make_task(tensors("classification", 0, 128)))
    learner.begin()
    against = projected = 0
    x, y = tensors("classification", 1, 128)
    for step in range(100):
        rows = slice(step % 8 * 16, step % 8 * 16 + 16)
        loss = learner.objective.loss(learner.model, (x[rows], y[rows]), 1)
        memory = learner.loss_again(torch.arange(30))
        masters = learner.optimizer.masters
        before = {n: (m.slope(), psi_inverse(m.theta(), m.alpha)) for n, m in masters.items()}
        biases = {n: p.detach().clone() for n, p in learner.model.named_parameters() if n not in masters}
        named = dict(learner.model.named_parameters())
        grads = dict(zip(named, torch.autograd.grad(memory, list(named.values())), strict=True))
        own = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
        learner.step(loss)
        projected += not all(torch.equal(a, p.grad) for a, p in zip(own, named.values(), strict=True))
        change = sum(
            (grads[n] * s * (psi_inverse(masters[n].theta(), masters[n].alpha) - phi)).sum()
            for n, (s, phi) in before.items()
        )
        change += sum((grads[n] * (named[n] - b)).sum() for n, b in biases.items())
        size = sum(
            (grads[n] * s * (psi_inverse(masters[n].theta(), masters[n].alpha) - phi)).abs().sum()
            for n, (s, phi) in before.items()
        )
        against += bool(change > 1e-4 * size)
    return against, projected


@pytest.mark.parametrize(("kind", "options"), [(AGEM, {}), (GEM, {"margin": 0.0}), (GEM, {"margin": 0.5})])
def test_no_step_goes_against_the_memory_at_alpha_above_1(
    kind: type[Strategy], options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    against, projected = violations(kind, options, True, monkeypatch)
    assert against == 0
    assert projected > 10
    assert violations(kind, options, False, monkeypatch)[0] > 0  # without the slope in the inner product


def test_what_cannot_move_has_no_part_in_inner_products() -> None:
    learner = AGEM(mlp([8, 4, 3], generator=seeded()), sgd(), alpha=1.5)
    model, optimizer = learner.model, learner.optimizer
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[0] = True
    optimizer.set_masks(None, {"fc1.weight": mask})
    optimizer.freeze([model.fc2.bias])
    model(torch.rand(2, 8)).sum().backward()
    space = Gradients(optimizer, model)
    assert len(space.metric) == 4 * 8 + 4 + 12
    expected = slope(psi_inverse(optimizer.masters["fc1.weight"].theta(), 1.5), 1.5).square() * mask
    assert torch.allclose(space.metric[:32], expected.flatten())
    assert torch.equal(space.metric[32:36], torch.ones(4))


# --- rehearsal --------------------------------------------------------------------------------------------------


class Watching(ER):
    """Experience replay that tells what it rehearsed."""

    def rehearse(self) -> list[Rehearsal] | None:
        self.found = super().rehearse()
        return self.found


def classes(task: int) -> tuple[Tensor, Tensor]:
    x, y = tensors("classification", task)
    return x, y


def test_er_rehearses_half_of_the_loss_with_the_task_of_every_example() -> None:
    learner = Watching(
        mlp([8, 16, 6], generator=seeded()), sgd(), objective=Classification("stream"), memory=40, steps=5
    )
    for task in range(3):
        numbers = [(0, 1, 2), (5, 4, 3), (2, 0, 1)][task]
        learner.learn(make_task(classes(task), classes=numbers, index=task))
        if task:
            (rehearsal,) = learner.found
            assert rehearsal.weight == 0.5
            assert set(rehearsal.task.tolist()) == set(range(task))
    _, y = rehearsal.batch
    wanted = [[(0, 1, 2), (5, 4, 3)][t][k] for t, k in zip(rehearsal.task.tolist(), y.tolist(), strict=True)]
    assert learner.objective.targets(y, rehearsal.task).tolist() == wanted


@pytest.mark.parametrize("kind", ["heads", "function"])
def test_examples_are_grouped_by_task_where_the_network_or_the_loss_must_know_it(kind: str) -> None:
    heads = kind == "heads"
    objective = None if heads else (lambda model, batch, task: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    model = mlp([8, 16, 3], heads=3 * heads, generator=seeded())
    learner = Watching(model, sgd(), memory=40, steps=5, objective=objective, heads="heads" if heads else None)
    for task in range(3):
        learner.learn(classes(task))
    assert [each.task for each in learner.found] == [0, 1]
    assert sum(each.weight for each in learner.found) == pytest.approx(0.5)
    sizes = [len(each.batch[0]) for each in learner.found]
    assert [each.weight for each in learner.found] == pytest.approx([0.5 * size / sum(sizes) for size in sizes])


def test_a_mixed_batch_and_groups_of_its_tasks_have_the_same_gradient() -> None:
    learner = ER(mlp([8, 16, 6], generator=seeded()), sgd(), objective=Classification("stream"), memory=40, steps=5)
    for task in range(3):
        learner.learn(make_task(classes(task), classes=range(3 * (task % 2), 3 * (task % 2) + 3), index=task))
    rows = torch.arange(len(learner.buffer))
    mixed = learner.loss_again(rows)
    learner.objective.mixes_tasks = False
    assert len(learner.rehearsals(rows, 1.0)) == 3
    assert torch.allclose(mixed, learner.loss_again(rows))


class Shrink(Strategy):
    """A penalty of a few lines, as other methods have one."""

    def penalty(self) -> Tensor:
        return 0.5 * sum(p.square().sum() for p in self.model.parameters())


class Halve(Strategy):
    """Changes the gradient."""

    def after_backward(self) -> None:
        for p in self.model.parameters():
            p.grad *= 0.5


def test_replay_goes_together_with_a_penalty_and_neither_is_dropped() -> None:
    made = {kind: kind(mlp([8, 16, 3], generator=seeded()), sgd(), steps=1) for kind in (ER, combine(ER, Shrink))}
    for learner in made.values():
        learner.begin()
        learner.end(classes(0))
        learner.begin()
        loss = learner.objective.loss(learner.model, classes(1), 1)
        learner.step(loss)
    alone, both = ([p.grad for p in learner.model.parameters()] for learner in made.values())
    first = mlp([8, 16, 3], generator=seeded())
    assert all(torch.allclose(b - a, p, atol=1e-6) for a, b, p in zip(alone, both, first.parameters(), strict=True))
    plain = torch.autograd.grad(
        nn.functional.cross_entropy(first(classes(1)[0]), classes(1)[1]), list(first.parameters())
    )
    assert not torch.allclose(plain[0], alone[0])


def test_two_projections_do_not_go_together() -> None:
    for pair in ((GEM, AGEM), (GEM, Halve)):
        with pytest.raises(TypeError, match="both have after_backward"):
            combine(*pair)
    assert combine(ER, AGEM) is not None


def test_shares_that_leave_nothing_for_the_task_are_refused() -> None:
    with pytest.raises(TypeError, match="both rehearse, and what PerfectMemory rehearses leaves no room in the loss"):
        combine(PerfectMemory, Watching)

    class Half(Strategy):
        """Rehearses its own batch again."""

        def rehearse(self) -> list[Rehearsal]:
            return [Rehearsal(classes(0), 0, 0.5)]

    learner = combine(ER, Half)(mlp([8, 16, 3], generator=seeded()), sgd(), loss_weight=0.5, steps=3)
    learner.learn(classes(0))
    with pytest.raises(ValueError, match="leave none for the task in hand"):
        learner.learn(classes(1))


# --- everything kept --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PerfectMemory, JointTraining])
def test_everything_is_kept_and_all_tasks_count_alike(kind: type[Strategy]) -> None:
    learner = kind(mlp([8, 16, 3], generator=seeded()), sgd(), batch_size=16, steps=5)
    for task in range(3):
        learner.learn(classes(task))
    assert len(learner.buffer) == 3 * 64
    weights = sum(p.numel() * 4 for p in learner.model.parameters()) if kind is JointTraining else 0
    assert learner.memory_bytes() == 3 * 64 * (8 * 4 + 8 + 8) + weights
    learner.begin()
    (rehearsal,) = learner.rehearse()
    assert rehearsal.weight == pytest.approx(3 / 4)
    assert len(rehearsal.task) == (48 if kind is JointTraining else 16)
    with pytest.raises(ValueError, match="keeps everything, got memory=3"):
        kind(mlp([8, 16, 3], generator=seeded()), sgd(), memory=3)


def test_joint_training_begins_from_the_first_weights() -> None:
    learner = JointTraining(mlp([8, 16, 3], heads=1, generator=seeded()), sgd(), heads="heads", alpha=1.5, steps=5)
    first = {n: p.detach().clone() for n, p in learner.model.named_parameters()}
    for task in range(2):
        learner.learn(classes(task))
        assert not torch.equal(learner.model.fc1.weight, first["fc1.weight"])
    learner.begin()
    assert all(torch.equal(p, first[n]) for n, p in learner.model.named_parameters() if n in first)


@pytest.mark.parametrize("name", ["er", "gem", "agem"])
def test_bytes_are_those_of_the_examples(name: str) -> None:
    learner = make(name)
    learner.learn(tensors("classification", 0))
    assert learner.memory_bytes() == 40 * (8 * 4 + 8 + 8)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ER, {"memory": 0}, "memory must be at least one example, got 0"),
        (ER, {"rehearsed": 0}, "rehearsed must be at least 1, got 0"),
        (ER, {"loss_weight": 1.0}, "loss_weight must be between 0 and 1, got 1.0"),
        (GEM, {"margin": -1.0}, "margin must be at least 0, got -1.0"),
    ],
)
def test_bad_arguments_are_repeated(kind: type[Strategy], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(mlp([8, 4, 3]), sgd(), **options)
