"""What keeps a sub-network as it is: nothing moves it, whatever the model does in training and whenever it is asked."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nets import same
from powerprop.continual import BoundaryFinder, Strategy
from tasks import CLASSES, FEATURES, learner, toy_task

decaying = pytest.mark.parametrize("optimizer", ["momentum", "adamw"])


def seeded(model: nn.Module) -> nn.Module:
    """The model with weights that do not depend on what was drawn before."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    return model


def layers(*between: nn.Module) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(FEATURES, 32), *between, nn.ReLU(), nn.Linear(32, CLASSES)))


def learned(ours: Strategy, tasks: int = 3) -> list[Tensor]:
    """Learn some tasks; the logits of each right after it was learned."""
    seen = []
    for t in range(tasks):
        ours.learn(toy_task(t))
        seen.append(ours.logits(toy_task(t).test().x, t))
    return seen


def unchanged(ours: Strategy, seen: list[Tensor]) -> bool:
    return all(torch.equal(ours.logits(toy_task(t).test().x, t), logits) for t, logits in enumerate(seen))


class Heard:
    """A performance that remembers the outputs it was shown: those of the networks that the search tries."""

    def __init__(self) -> None:
        self.shown: list[Tensor] = []

    def __call__(self, logits: Tensor, y: Tensor) -> float:
        self.shown.append(logits)
        return float((logits.argmax(1) == y).double().mean())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Heard) and all(map(torch.equal, self.shown, other.shown))


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("method", ["shortlist", "oneshot"])
def test_a_prediction_while_a_task_is_trained_changes_nothing(alpha: float, method: str) -> None:
    heard = Heard(), Heard()
    quiet, asked = (learner(alpha=alpha, steps=110, model=layers(nn.Dropout(0.2)), score=score) for score in heard)
    x = toy_task(0).test().x
    for t in range(2):
        quiet.learn(toy_task(t))
        asked.learn(
            toy_task(t), lambda phase, step, loss: step == 100 and asked.tasks and asked.predict(x, method=method)
        )
    assert heard[0] == heard[1]
    assert same(quiet.model, asked.model)
    assert all(quiet.nets.masks.mask(t) == asked.nets.masks.mask(t) for t in range(2))


def test_a_prediction_inside_an_unbroken_stream_changes_nothing() -> None:
    heard = Heard(), Heard()
    for score in heard:
        ours = learner(retrain_steps=5, score=score)
        finder = BoundaryFinder(ours, least=30, memory=60, classes=range(CLASSES))
        for t in range(2):
            x, y = toy_task(t, 32 * 80).train()
            for i in range(80):
                finder.observe(x[32 * i : 32 * (i + 1)], y[32 * i : 32 * (i + 1)])
                if score is heard[1] and ours.tasks and i == 20:
                    ours.predict(x[:8], 0)
        finder.finish()
        assert len(ours.tasks) == 2
    assert heard[0] == heard[1]


class AllHeads(nn.Module):
    """Evaluates every head and takes one: the others get gradients of zero, which decay moves all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(FEATURES, 24), nn.ModuleList(nn.Linear(24, CLASSES) for _ in range(3))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return torch.stack([head(torch.relu(self.fc(x))) for head in self.out])[task]


class SharedInHeads(nn.Module):
    """A norm that all heads share lives among them."""

    def __init__(self) -> None:
        super().__init__()
        heads = {str(t): nn.Linear(24, CLASSES) for t in range(3)}
        self.fc, self.out = nn.Linear(FEATURES, 24), nn.ModuleDict({**heads, "norm": nn.LayerNorm(24)})

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.out[str(task)](self.out["norm"](torch.relu(self.fc(x))))


class NormedHeads(AllHeads):
    """Every head has running statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.ModuleList(nn.Sequential(nn.BatchNorm1d(24), nn.Linear(24, CLASSES)) for _ in range(3))


@decaying
@pytest.mark.parametrize("model", [AllHeads, SharedInHeads, NormedHeads])
def test_only_the_head_of_the_task_is_trained(model: type[nn.Module], optimizer: str) -> None:
    ours = learner(optimizer=optimizer, model=seeded(model()), heads="out")
    assert unchanged(ours, learned(ours))


def test_the_statistics_of_a_head_are_those_of_its_task() -> None:
    ours = learner(model=seeded(NormedHeads()), heads="out")
    learned(ours, 2)
    first, second = (ours.model.out[t][0].running_mean for t in range(2))
    assert second.any()
    assert not torch.equal(first, second)


@decaying
@pytest.mark.filterwarnings("ignore:not chosen as weights")
def test_buffers_of_any_kind_freeze(optimizer: str) -> None:
    last = nn.utils.parametrizations.spectral_norm(nn.Linear(32, CLASSES))
    ours = learner(optimizer=optimizer, model=nn.Sequential(layers(nn.BatchNorm1d(32))[0], nn.ReLU(), seeded(last)))
    assert unchanged(ours, learned(ours))


@pytest.mark.parametrize("method", ["naive", "packnet", "epn"])
def test_the_model_is_ready_for_use(method: str, tmp_path: Path) -> None:
    ours = learner(method, model=layers(nn.BatchNorm1d(32), nn.Dropout(0.5)))
    seen = learned(ours, 2)
    x = toy_task(1).test().x
    assert torch.equal(ours.model(x), seen[1])
    ours.save(tmp_path / "l")
    ours.model.train()
    ours.load(tmp_path / "l")
    assert torch.equal(ours.model(x), seen[1])
    if method != "naive":
        ours.model.train()
        ours.nets.show(0)
        assert torch.equal(ours.model(toy_task(0).test().x), seen[0])


def test_the_taylor_estimate_leaves_statistics_alone() -> None:
    ours = learner(search="taylor", steps=20, retrain_steps=0, model=layers(nn.BatchNorm1d(32)))
    ours.learn(toy_task(0))
    assert int(ours.model[1].num_batches_tracked) == 20


def test_layers_frozen_by_the_user_are_left_alone() -> None:
    model = layers()
    model[0].weight.requires_grad_(False)
    weight = model[0].weight.clone()
    ours = learner(alpha=1.0, search="taylor", model=model)
    learned(ours, 2)
    assert list(ours.nets.masters) == ["2.weight"]
    assert torch.equal(model[0].weight, weight)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no weight to give alpha to: .* do they train \(requires_grad\)"):
        learner(model=model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_a_model_may_move_between_tasks() -> None:
    ours = learner()
    for device in ("cuda", "cpu", "cuda"):
        ours.model.to(device)
        task = toy_task(ours.current)
        ours.learn(task)
        ours.predict(task.test().x)
    assert ours.current == 3
