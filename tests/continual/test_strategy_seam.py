"""Any data, any precision, heads that come later: what the seam between objective, strategy and loop has to bear."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from powerprop import Powerprop
from powerprop.continual import ER, EWC, Classification, EfficientPackNet, Naive, Strategy, combine, load_learner
from powerprop_paper.models import mlp
from strategies import make, same_bits, state, tensors
from tasks import CLASSES, FEATURES, learner, toy_model, toy_task


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3)


# --- data -------------------------------------------------------------------------------------------------------


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A data set that hands out one row at a time."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Rows that come by themselves, whose number nobody knows."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (self.rows[i] for i in range(len(self.rows)))


@pytest.mark.parametrize("kind", ["tensors", "dataset", "iterable", "loader"])
def test_learn_takes_data_of_any_kind(kind: str) -> None:
    ours = learner(steps=60)
    for task in range(2):
        x, y = toy_task(task).train()
        rows = Rows(x, y)
        data = {"tensors": (x, y), "dataset": rows, "iterable": Stream(rows), "loader": DataLoader(rows, 32)}[kind]
        ours.learn(data)
    x, y = toy_task(0).test()
    assert (ours.predict(x, 0).label == y).double().mean() > 0.8
    assert (ours.predict(x, group=None).task == 0).all()


def test_epochs_go_through_all_the_data() -> None:
    seen: list[int] = []
    ours = Naive(
        toy_model(), sgd, objective=lambda model, batch, task: seen.append(len(batch[0])) or model(batch[0]).mean()
    )  # type: ignore[func-returns-value]
    x, y = toy_task(0).train()
    ours.learn(DataLoader(TensorDataset(x, y), 100), epochs=2)
    assert seen == [100, 100, 56] * 2
    with pytest.raises(TypeError, match="say how many steps, not epochs"):
        ours.learn(Stream(Rows(x, y)), epochs=1)


def test_a_dictionary_of_tensors_is_a_batch() -> None:
    x, y = toy_task(0).train()
    batches = [{"x": x[i : i + 32], "y": y[i : i + 32]} for i in range(0, 256, 32)]
    ours = EfficientPackNet(
        toy_model(), sgd, steps=30, gamma=None, grid=(0.3,), retrain_steps=0,
        objective=lambda model, batch, task: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
    )  # fmt: skip
    ours.begin(0)
    for batch in batches:
        ours.step(ours.objective.loss(ours.model, batch, 0), batch)
    ours.end()
    assert ours.used() == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize(
    ("data", "message"),
    [(3, "got int"), (iter([1]), "got list_iterator"), ((torch.ones(3), torch.ones(2)), r"\[3, 2\]")],
)
def test_data_that_cannot_be_learned_is_refused(data: Any, message: str) -> None:
    ours = learner()
    with pytest.raises((TypeError, ValueError), match=message):
        ours.learn(data)
    assert ours.current == 0
    ours.learn(toy_task(0))


def test_a_method_that_needs_the_data_says_so() -> None:
    ours = make("ewc")
    x, y = tensors("classification", 0)
    ours.begin(0)
    ours.step(nn.functional.cross_entropy(ours.model(x), y))
    with pytest.raises(ValueError, match=r"EWC looks at the data of a task when it ends: say end\(loader\)"):
        ours.end()
    ours.end((x, y))
    assert ours.current == 1


# --- loops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["naive", "ewc", "efficient-packnet"])
def test_a_gradient_scaler_changes_nothing_but_rounding(name: str) -> None:
    plain, scaled = make(name, "regression"), make(name, "regression")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    data = tensors("regression", 0)
    for each, tool in ((plain, None), (scaled, scaler)):
        each.begin(0)
        for _ in range(5):
            each.step(each.objective.loss(each.model, data, 0), data, tool)
        each.end(data)
    first, second = state(plain), state(scaled)
    assert all(torch.allclose(first[n], second[n], atol=1e-5) for n in first)


def test_gradients_are_accumulated() -> None:
    whole, parts = (Naive(toy_model(), sgd) for _ in range(2))
    x, y = toy_task(0).train()
    whole.begin(0)
    whole.step(nn.functional.cross_entropy(whole.model(x), y))
    parts.begin(0)
    parts.optimizer.zero_grad()
    for half in (slice(0, 128), slice(128, 256)):
        parts.backward(nn.functional.cross_entropy(parts.model(x[half]), y[half]) / 2)
    parts.update()
    assert all(torch.allclose(state(whole)[n], t, atol=1e-6) for n, t in state(parts).items())


def test_an_optimiser_or_a_powerprop_serves_as_well_as_a_factory() -> None:
    made = []
    for kind in ("factory", "optimizer", "powerprop"):
        model = toy_model()
        base = torch.optim.SGD(model.parameters(), lr=0.3)
        given: Any = sgd if kind == "factory" else base if kind == "optimizer" else Powerprop(base, model, 1.5)
        ours = Naive(model, given, steps=20, alpha=None if kind == "powerprop" else 1.5)
        ours.learn(toy_task(0))
        made.append(state(ours))
    assert same_bits(made[0], made[1])
    assert same_bits(made[0], made[2])
    with pytest.raises(TypeError, match="alpha, where and rate belong to the Powerprop"):
        Naive(model, Powerprop(torch.optim.SGD(model.parameters(), lr=0.3), model, 1.5), alpha=2.0)


def test_pruning_in_a_loop_of_ones_own() -> None:
    ours = learner(retrain_steps=0, grid=(0.4,), gamma=None)
    assert isinstance(ours, EfficientPackNet)
    x, y = toy_task(0).train()

    def steps(count: int) -> None:
        for _ in range(count):
            ours.step(nn.functional.cross_entropy(ours.model(x), y))

    ours.begin(0)
    steps(40)
    ours.prune((x, y))
    assert sum(int(m.param.count_nonzero()) for m in ours.nets.masters.values()) == ours._chosen.count()
    steps(10)
    ours.end((x, y))
    assert ours.used() == pytest.approx(0.4, abs=0.01)
    assert (ours.predict(x, 0).label == y).double().mean() > 0.8


def test_gradual_pruning_takes_fewer_weights() -> None:
    once, gradually = (learner(steps=100, retrain_steps=90, gamma=0.9, prunings=p, pruning_steps=30) for p in (0, 3))
    for each in (once, gradually):
        each.learn(toy_task(0))
    assert gradually.used() < once.used()
    with pytest.raises(ValueError, match="3 prunings 30 steps apart do not fit into retrain_steps=50"):
        learner(retrain_steps=50, prunings=3, pruning_steps=30)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_reusing_the_output_layer_alone(alpha: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {"alpha": alpha, "steps": 80, "retrain_steps": 60, "gamma": 0.95}
    options |= {"reuse": "output", "prunings": 2, "pruning_steps": 20}
    ours, again = learner(**options), learner(**options)
    seen = []
    for t in range(3):
        ours.learn(toy_task(t))
        seen.append(ours.logits(toy_task(t).test().x, t))
    masks = [ours.nets.masks.mask(t) for t in range(3)]
    for hidden in ("fc1.weight", "fc2.weight"):
        assert not (masks[2][hidden] & (masks[0][hidden] | masks[1][hidden])).any()
    assert (masks[2]["fc3.weight"] & masks[0]["fc3.weight"]).equal(masks[0]["fc3.weight"])
    assert all(torch.equal(ours.logits(toy_task(t).test().x, t), logits) for t, logits in enumerate(seen))
    ours.save(tmp_path / "l")
    again.load(tmp_path / "l")
    assert all(torch.equal(again.logits(toy_task(t).test().x, t), logits) for t, logits in enumerate(seen))


def test_a_task_takes_no_more_than_its_share_of_a_layer() -> None:
    ours = learner(max_layer_fraction=0.1, gamma=0.6, grid=(0.5, 0.3), retrain_steps=20)
    for t in range(3):
        ours.learn(toy_task(t))
        own = ours.nets.masks.owner
        assert all(int((owner == t).sum()) <= math.ceil(0.1 * owner.numel()) for owner in own.values())


# --- heads and tasks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Naive, EfficientPackNet])
def test_heads_are_added_while_learning(kind: type[Strategy], tmp_path: Path) -> None:
    model = mlp([FEATURES, 24, CLASSES], heads=1, generator=torch.Generator().manual_seed(0))
    ours = kind(model, sgd, heads="heads", steps=60, alpha=1.5)
    for t in range(3):
        ours.learn(toy_task(t))
    assert sorted(name for name, _ in model.heads.named_children()) == ["0", "1", "2"]
    x, y = toy_task(2).test()
    assert (ours.predict(x, 2).label == y).double().mean() > 0.8
    ours.save(tmp_path / "l")
    again = load_learner(tmp_path / "l", mlp([FEATURES, 24, CLASSES], heads=1))
    assert torch.equal(again.logits(x, 2), ours.logits(x, 2))


def test_without_the_task_all_heads_are_asked() -> None:
    ours = learner("naive", head_count=3, steps=80)
    for t in range(3):
        ours.learn(toy_task(t))
    x = toy_task(2).test().x
    found = ours.predict(x)
    logits = torch.cat([ours.logits(x, t) for t in range(3)], 1)
    assert torch.equal(found.number, logits.argmax(1))
    assert torch.equal(found.task, logits.argmax(1) // CLASSES)


class Shifted(nn.Module):
    """Takes the task without having heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.shift = toy_model(), nn.Embedding(4, FEATURES)

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.body(x + self.shift.weight[task])  # type: ignore[no-any-return]


def test_a_model_may_take_the_task_without_heads() -> None:
    ours = learner(model=Shifted(), takes_task=True, steps=60)
    for t in range(2):
        ours.learn(toy_task(t))
    x, y = toy_task(1).test()
    assert (ours.predict(x, 1).label == y).double().mean() > 0.8


def test_clipping_does_not_depend_on_heads_that_are_not_there_yet() -> None:
    few, many = (learner("naive", head_count=heads, clip=0.1, steps=20, model=None) for heads in (2, 40))
    for each in (few, many):
        each.learn(toy_task(0))
    assert torch.allclose(few.model.fc1.weight, many.model.fc1.weight, atol=1e-6)


def test_several_tasks_are_kept_at_hand() -> None:
    ours = learner(steps=20)
    for t in range(3):
        ours.learn(toy_task(t))
    first = [ours.nets.weights(t) for t in range(3)]
    assert all(ours.nets.weights(t) is first[t] for t in (2, 0, 1, 0))


# --- strategies together ----------------------------------------------------------------------------------------


def test_strategies_that_act_in_different_verbs_go_together() -> None:
    both = combine(ER, EWC)(toy_model(), sgd, memory=50, strength=10.0, steps=40)
    for t in range(2):
        both.learn(toy_task(t))
    assert set(both.parts) >= {*ER(toy_model(), sgd, memory=50).parts, *EWC(toy_model(), sgd, strength=1.0).parts}
    assert both.memory_bytes() > EWC(toy_model(), sgd, strength=1.0).memory_bytes()


def test_packing_with_a_penalty_keeps_both() -> None:
    class Both(EfficientPackNet, EWC):
        """A sub-network for every task, and a Fisher."""

    ours = Both(toy_model(), sgd, strength=1.0, steps=40, gamma=0.9)
    for t in range(2):
        ours.learn(toy_task(t))
    assert ours.used() > 0
    assert ours.penalty() is not None or ours.now is None
    assert any(t.any() for part in ours.parts.values() for t in part.state()[0].values() if t.is_floating_point())


def test_two_that_answer_are_refused_when_the_class_is_made() -> None:
    from powerprop.continual import HAT

    with pytest.raises(TypeError, match="both have .*, and a learner can have one only"):
        combine(HAT, EfficientPackNet)
    with pytest.raises(TypeError, match="combine takes two or more strategies, got 1"):
        combine(EWC)


def test_labels_of_the_stream_need_classes() -> None:
    ours = Naive(toy_model(outputs=6), sgd, objective=Classification("stream"))
    with pytest.raises(ValueError, match="labels='stream' needs the classes of task 0"):
        ours.begin(0)
    ours.begin(0, classes=(0, 1, 2))


def test_a_class_is_told_from_those_that_were_seen() -> None:
    """Cross-entropy by hand among the classes 4, 0 | 2, wherever they stand; other outputs get no gradient."""
    objective, outputs = Classification("stream", among="seen"), torch.arange(18.0).sin().view(3, 6).requires_grad_()
    objective.begin(0, (4, 0))
    y, tasks = torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1])
    objective.loss(lambda x: outputs, (torch.zeros(3, 1), y), 0).backward()
    assert outputs.grad.ne(0).any(0).tolist() == [True, False, False, False, True, False]
    objective.begin(1, (2,))
    loss = objective.loss(lambda x: outputs, (torch.zeros(3, 1), y), tasks)
    columns = outputs[:, [0, 2, 4]].log_softmax(1)
    assert float(loss.detach()) == pytest.approx(float(-columns[[0, 1, 2], [2, 0, 1]].mean().detach()))
    assert objective.score(lambda x: torch.eye(6)[[4, 0]], [(torch.zeros(2, 1), torch.tensor([0, 1]))], 0) == 1.0
