"""iCaRL: herding, a memory that is divided among classes, binary cross-entropy, the nearest mean of exemplars."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.continual import (
    Classification,
    ICaRL,
    Naive,
    Strategy,
    accuracy_on,
    learn_stream,
    make_task,
)
from powerprop.continual.icarl import features_of, herd
from strategies import make, network, same_bits, state, tensors
from tasks import NormNet, learner, toy_model, toy_task

FEATURES = 8


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def stream_of(size: int = 192) -> list[Any]:
    """Three tasks of two clouds each, six classes in the whole stream."""
    generator = torch.Generator().manual_seed(5)
    centres = 1.5 * torch.randn(6, FEATURES, generator=generator)

    def part(first: int, count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 2, (count,), generator=generator)
        return centres[first + y] + 0.5 * torch.randn(count, FEATURES, generator=generator), y

    return [
        make_task(part(2 * t, size), part(2 * t, 64), part(2 * t, 200), index=t, classes=(2 * t, 2 * t + 1))
        for t in range(3)
    ]


def class_incremental(**options: Any) -> ICaRL:
    torch.manual_seed(0)
    given = {"objective": Classification("stream"), "memory": 30, "steps": 60, "batch_size": 32, **options}
    return ICaRL(network(6), adam, **given)


# --- herding ------------------------------------------------------------------------------------------------------


def test_herding_by_hand() -> None:
    """Of 0, 1, 4, 7 on a line the mean is 3: 4 is the nearest; then 4 and 1 (2.5; 4 and 0 is 2, 4 and 7 is 5.5); then
    with 4, 1 and 0 5/3, with 7 it is 4, which is nearer."""
    rows = torch.tensor([[0.0], [1.0], [4.0], [7.0]])
    assert herd(rows, 4).tolist() == [2, 1, 3, 0]
    assert herd(rows, 2).tolist() == [2, 1]  # a shorter list is the beginning of a longer one
    assert herd(rows, 9).tolist() == [2, 1, 3, 0]
    assert herd(rows, None).tolist() == [0, 1, 2, 3]


def test_herding_is_the_argmin_of_the_paper() -> None:
    x = F.normalize(torch.randn(40, 5, generator=torch.Generator().manual_seed(1))).double()
    mean, chosen = x.mean(0), list[int]()
    for k in range(1, 16):
        total = x[chosen].sum(0)
        distances = ((mean - (x + total) / k) ** 2).sum(1)
        chosen.append(min((i for i in range(40) if i not in chosen), key=lambda i: float(distances[i])))
    assert herd(x, 15).tolist() == chosen
    random = [
        (x[torch.randperm(40, generator=torch.Generator().manual_seed(s))[:15]].mean(0) - mean).norm()
        for s in range(20)
    ]
    assert (x[chosen].mean(0) - mean).norm() < min(random)


def test_features_are_the_normalised_inputs_of_the_last_linear_layer() -> None:
    net, (x, _) = network(3).eval(), tensors("classification", 0)
    assert torch.allclose(features_of(net, net, x), F.normalize(net[:5](x)))  # type: ignore[index]
    ours = make("icarl")
    ours.model.train()
    assert isinstance(ours, ICaRL)
    assert torch.allclose(ours.features(x).norm(dim=1), torch.ones(len(x)))
    assert ours.model.training


# --- the memory ---------------------------------------------------------------------------------------------------


def test_the_budget_is_divided_again_and_lists_are_cut_from_the_end() -> None:
    ours, before = class_incremental(memory=31, steps=5), dict[tuple[int, int], Tensor]()
    for number, task in enumerate(stream_of(), 1):
        ours.learn(task)
        lists = ours.exemplars()
        assert list(lists) == [(t, k) for t in range(number) for k in range(2)]
        assert {len(rows) for rows in lists.values()} == {31 // (2 * number)}
        now = {pair: ours.buffer.batch(rows)[0] for pair, rows in lists.items()}
        assert all(torch.equal(now[pair], x[: 31 // (2 * number)]) for pair, x in before.items())
        before = now
    assert len(ours.buffer) == 30


def test_exemplars_are_those_that_herding_chooses_with_the_network_at_the_end() -> None:
    ours = make("icarl", memory=12)
    assert isinstance(ours, ICaRL)
    x, y = tensors("classification", 0)
    ours.learn((x, y))
    for (_, label), rows in ours.exemplars().items():
        own = x[y == label]
        assert torch.equal(ours.buffer.batch(rows)[0], own[herd(ours.features(own), 4)])


def test_no_room_is_said_before_the_task_is_learned() -> None:
    ours, tasks = class_incremental(memory=3, steps=2), stream_of()
    ours.learn(tasks[0])
    before = state(ours)
    with pytest.raises(ValueError, match="memory=3 has no room for one exemplar of each of 4 classes"):
        ours.begin(tasks[1])
    assert ours.now is None
    assert same_bits(before, state(ours))


def test_a_memory_without_end_keeps_all() -> None:
    ours = class_incremental(memory=None, steps=2)
    for task in stream_of():
        ours.learn(task)
    assert len(ours.buffer) == 3 * 192


# --- the loss -----------------------------------------------------------------------------------------------------


def test_every_step_is_that_of_the_equation() -> None:
    """Against a loop by hand that draws the same exemplars."""
    ours, tasks = class_incremental(rehearsed=10, loss_weight=0.3, steps=4), stream_of()
    ours.learn(tasks[0])
    plain = copy.deepcopy(ours.model).train()
    old_network = copy.deepcopy(plain).eval()
    other, (x, y) = sgd(plain.parameters()), tasks[1].train()
    ours = _again(ours, sgd)
    ours.begin(tasks[1])
    for _ in range(3):
        draw = torch.Generator()
        draw.set_state(ours.generator("rehearsed").get_state())
        bx, _ = ours.buffer.batch(ours.buffer.draw(10, draw))

        def loss(inputs: Tensor, new: Tensor) -> Tensor:
            """Classes 0 and 1 as before, 2 and 3 by their labels, 4 and 5 not at all."""
            targets = torch.cat([old_network(inputs)[:, :2].sigmoid().detach(), new], 1)
            p = plain(inputs)[:, :4].sigmoid()
            return -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(1).mean()

        other.zero_grad()
        (0.7 * loss(x[:32], F.one_hot(y[:32], 2).float()) + 0.3 * loss(bx, torch.zeros(10, 2))).backward()
        other.step()
        ours.model.train()
        batch = x[:32], y[:32]
        ours.step(ours.objective.loss(ours.model, batch, 1), batch)
        pairs = zip(ours.model.parameters(), plain.parameters(), strict=True)
        assert all(torch.allclose(p, q, atol=1e-5) for p, q in pairs)


def _again(learned: ICaRL, optimizer: Any) -> ICaRL:
    """The same learner, with another optimiser."""
    made = class_incremental(rehearsed=10, loss_weight=0.3, steps=4)
    other = ICaRL(
        made.model,
        optimizer,
        objective=Classification("stream"),
        memory=30,
        rehearsed=10,
        loss_weight=0.3,
        batch_size=32,
    )
    other.model.load_state_dict(learned.model.state_dict())
    other.tasks, other.visits = list(learned.tasks), learned.visits
    other.objective.begin(0, (0, 1))
    other.buffer.load_state(*learned.buffer.state())
    return other


# --- answers ------------------------------------------------------------------------------------------------------


class Identity(nn.Module):
    """Features are the inputs; the head says class 0 to all."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 4)
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)  # type: ignore[no-any-return]


def test_the_nearest_mean_by_hand() -> None:
    """Four classes in four directions; lengths do not count, and the head has no say."""
    ours = ICaRL(Identity(), lambda p: torch.optim.SGD(p, lr=0.0), objective=Classification("stream"), memory=8)
    directions = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    for task in range(2):
        x = torch.cat([directions[2 * task : 2 * task + 2] * length for length in (1.0, 3.0)])
        ours.begin(classes=(2 * task, 2 * task + 1))
        ours.end((x, torch.tensor([0, 1, 0, 1])))
    x = torch.tensor([[9.0, 1.0], [0.1, 0.2], [-2.0, 1.9], [0.3, -5.0]])
    found = ours.predict(x)
    assert found.number.tolist() == [0, 1, 2, 3]
    assert (found.task.tolist(), found.label.tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])
    assert ours.predict(x, 1, by="means").number.tolist() == [3, 2, 2, 3]
    assert ours.predict(x, by="head").number.tolist() == [0, 0, 0, 0]
    assert torch.equal(ours.predict(x, 0).number, ours.predict(x, 0, by="head").number)
    assert all(len(part) == 0 for part in ours.predict(x[:0]))


def test_means_are_of_the_network_as_it_is() -> None:
    ours = make("icarl", memory=12)
    assert isinstance(ours, ICaRL)
    ours.learn(tensors("classification", 0))
    first = ours.class_means()
    assert ours.class_means() is first  # nothing has changed
    with torch.no_grad():
        next(ours.model.parameters()).mul_(-1)
    second = ours.class_means()
    assert any(not torch.equal(first[pair], second[pair]) for pair in first)
    x = ours.buffer.batch(ours.exemplars()[0, 1])[0]
    assert torch.allclose(second[0, 1], F.normalize(ours.features(x).mean(0), dim=0))
    other = copy.deepcopy(ours)
    assert torch.equal(other.predict(x).number, ours.predict(x).number)


def test_learns_classes_one_task_after_the_other() -> None:
    tasks, ours = stream_of(), class_incremental()
    torch.manual_seed(0)
    naive: Strategy = Naive(network(6), adam, objective=Classification("stream"), steps=60, batch_size=32)
    found = [learn_stream(each, tasks, ["class-incremental"])["class-incremental"].average() for each in (ours, naive)]
    by_head = sum(accuracy_on(ours, task, "class-incremental", by="head") for task in tasks) / 3
    assert found[0] > 0.9
    assert found[1] < 0.4
    assert by_head > 0.6


@pytest.mark.parametrize("heads", [0, 3])
def test_tasks_with_heads_and_tasks_that_share_their_outputs(heads: int) -> None:
    base = learner("naive", head_count=heads)
    ours = ICaRL(base.model, adam, heads="heads" if heads else None, memory=60, steps=60, batch_size=32)
    for t in range(3):
        ours.learn(toy_task(t), id=f"task {t}")
    for t in range(3):
        test = toy_task(t).test()
        for by in ("head", "means"):
            assert (ours.predict(test.x, f"task {t}", by=by).label == test.y).double().mean() > 0.85  # type: ignore[arg-type]
        assert (ours.predict(test.x).label == test.y).double().mean() > 0.7


def test_statistics_of_batch_norms_and_dropout() -> None:
    ours = ICaRL(NormNet(), adam, heads="out", memory=40, steps=20, batch_size=32)
    for t in range(2):
        ours.learn(toy_task(t))
    for t in range(2):
        test = toy_task(t).test()
        found = ours.predict(test.x)
        assert ((found.task == t) & (found.label == test.y)).double().mean() > 0.9


# --- saving -------------------------------------------------------------------------------------------------------


# --- what cannot be -----------------------------------------------------------------------------------------------


def test_a_network_without_such_a_layer_is_refused() -> None:
    conv = nn.Sequential(nn.Conv1d(1, 3, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    with pytest.raises(ValueError, match="last nn.Linear: expected one in the model, got AdaptiveAvgPool1d, Conv1d"):
        ICaRL(conv, sgd)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.conv = nn.Linear(FEATURES, 1), conv

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x[:, None]) * self.gate(x)  # type: ignore[no-any-return]

    ours = ICaRL(Gated(), sgd)
    before, batch = state(ours), tensors("classification", 0)
    ours.begin()
    with pytest.raises(ValueError, match="expected it to give the 3 outputs of the model, got 'gate' with 1 outputs"):
        ours.step(ours.objective.loss(ours.model, batch, 0), batch)
    assert same_bits(before, state(ours))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_weight must be between 0 and 1, got 1"):
        make("icarl", loss_weight=1)
    with pytest.raises(ValueError, match="expected label_smoothing=0, got 0.1"):
        ICaRL(network(3), sgd, objective=Classification(label_smoothing=0.1))
    with pytest.raises(TypeError, match="objective must be Classification, got Function"):
        ICaRL(toy_model(), sgd, objective=lambda model, batch, task: torch.zeros(()))
    ours = make("icarl")
    assert isinstance(ours, ICaRL)
    x, y = tensors("classification", 0)
    ours.begin()
    with pytest.raises(ValueError, match="ICaRL looks at the data of a task when it ends"):
        ours.end()
    with pytest.raises(ValueError, match=r"expected labels \(N,\), got torch.float32 \(64, 8\)"):
        ours.end((x, x))
    with pytest.raises(ValueError, match="by='means' needs exemplars, which are chosen when a task ends; 0 has none"):
        ours.predict(x, 0, by="means")
    ours.end((x, y))
    with pytest.raises(ValueError, match="by must be 'means' or 'head', got 'votes'"):
        ours.predict(x, by="votes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="predict takes the inputs and a task, got also inference"):
        ours.check_predict_options(inference="oneshot")
