"""HAT: gates, what they protect, and how it is found out what units reach."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.continual import HAT, Regression, combine
from powerprop.continual.hat import Anneal
from powerprop.continual.layers import units_seen
from powerprop.continual.strategy import Strategy
from powerprop_paper.models import mlp
from tasks import NormNet, learner, toy_task


def two_units(**options: object) -> HAT:
    """2 inputs, 2 hidden units, 1 output, all weights known."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return HAT(model, lambda p: torch.optim.SGD(p, lr=0.1), objective=Regression(), **options)


def after_one_task(ours: HAT, embeddings: list[float]) -> HAT:
    """One task learned without a step, with these embeddings."""
    ours.begin(steps=1)
    with torch.no_grad():
        ours.embeddings["2"].copy_(torch.tensor(embeddings))
    ours.end((torch.ones(4, 2), torch.ones(4, 1)))
    return ours


def test_weights_between_used_units_are_held_and_no_others() -> None:
    ours = after_one_task(two_units(), [3.0, -3.0])  # the first hidden unit is used, the second is not
    free = ours.optimizer.trainable
    assert free["0.weight"].tolist() == [[False, False], [True, True]]  # rows of the used unit
    assert free["0.bias"].tolist() == [False, True]
    assert free["2.weight"].tolist() == [[False, True]]  # the output is used, of its inputs one
    assert free["2.bias"].tolist() == [False]


def test_gates_of_a_task_stop_what_they_close() -> None:
    ours = after_one_task(two_units(), [3.0, -3.0])
    x = torch.tensor([[1.0, 1.0]])
    assert ours.predict(x, 0).tolist() == [[0.5 * 1.5 + 0.5]]
    with torch.no_grad():
        ours.model[0].bias[1] = torch.nan  # a later task may diverge
    assert ours.predict(x, 0).tolist() == [[0.5 * 1.5 + 0.5]]
    assert ours.model(x).isnan().all()  # outside of a view the model has no gates


def test_penalty_counts_units_that_no_task_has_used() -> None:
    ours = two_units(strength=0.75, s_max=400.0)
    ours.begin(steps=1)
    ours.embeddings["2"].detach().zero_()
    assert float(ours.penalty().detach()) == pytest.approx(0.75 * (0.5 + 0.5) / 2)
    ours.give_up()
    after_one_task(ours, [3.0, -3.0])
    ours.begin(steps=1)
    ours.embeddings["2"].detach().zero_()
    assert float(ours.penalty().detach()) == pytest.approx(0.75 * 0.5)  # the first unit costs nothing any more


@pytest.mark.parametrize("s", [1 / 400, 0.3, 1.0, 20.0])
def test_gradient_is_compensated_as_in_the_paper(s: float) -> None:
    e = torch.linspace(-0.5, 0.5, 7, dtype=torch.float64).requires_grad_()
    (plain,) = torch.autograd.grad(torch.sigmoid(s * e).sum(), e)
    (ours,) = torch.autograd.grad(Anneal.apply(e, s, 400.0).sum(), e)
    torch.testing.assert_close(ours, 400 / s * (torch.cosh(s * e) + 1) / (torch.cosh(e) + 1) * plain)


def test_s_goes_from_one_end_to_the_other_in_every_period() -> None:
    ours = two_units(s_max=100.0, periods=2)
    ours.begin(steps=8)
    found = []
    for _ in range(8):
        found.append(ours._s())
        ours.step(ours.model(torch.ones(4, 2)).square().mean())
    assert found[:4] == pytest.approx([0.01, 0.01 + 99.99 / 3, 0.01 + 99.99 * 2 / 3, 100.0])
    assert found[4:] == found[:4]


def test_the_number_of_steps_must_be_known() -> None:
    ours = two_units()
    with pytest.raises(ValueError, match="say begin"):
        ours.begin(0)
    ours.begin(0, steps=3)


class Wide(nn.Module):
    """Convolutions, a skip connection, pooling, a comparison in the place of a ReLU, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(n, 3, 3, padding=1) for n in (1, 3, 3))
        self.d, self.e = nn.Linear(3 * 4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.where((x := self.a(x)) > 0, x, 0)
        c = F.max_pool2d(a + F.relu(self.c(F.relu(self.b(a)))), 2)
        d = torch.tanh(self.d(c.flatten(1)))
        return self.e(d), d[:, 4:]


def test_units_are_seen_through_anything() -> None:
    model, nothing = Wide().eval(), torch.zeros(3, dtype=torch.bool)
    layers = {n: m for n, m in model.named_modules() if n}
    third = torch.zeros(12, dtype=torch.bool)
    third[9] = True  # of the twelve inputs of d, one pixel of channel 2
    gates = {"b": nothing, "c": torch.tensor([True, False, False]), "d": third, "e": torch.ones(5) < 0}
    seen = units_seen(model, torch.ones(1, 1, 4, 4), layers, gates)
    assert seen["a"].tolist() == [False, False, True]  # past b and c, to d
    assert seen["b"].tolist() == [True, False, False]
    assert seen["c"].tolist() == [False, False, True]
    assert seen["d"].tolist() == [False] * 4 + [True]  # e lets nothing in, but the last unit is an output
    assert seen["e"].tolist() == [True, True]


def test_layers_that_are_not_called_are_held() -> None:
    model, unused = nn.Linear(2, 2), nn.Linear(2, 3)
    assert units_seen(model, torch.ones(1, 2), {"used": model, "unused": unused}, {})["unused"].all()


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_nothing_is_forgotten_with_norms_and_heads(optimizer: str, alpha: float) -> None:
    base = learner("naive", optimizer, alpha)  # for its factory alone
    factory = type(base.optimizer.base)
    ours = HAT(
        NormNet(), lambda p: factory(p, lr=0.01, weight_decay=0.1), alpha=alpha, heads="out", steps=30, batch_size=32
    )
    before, x = [], toy_task(0).test().x
    for task in range(3):
        ours.learn(toy_task(task))
        before.append(ours.logits(x, task))
        assert all(torch.equal(ours.logits(x, t), logits) for t, logits in enumerate(before))


def test_what_it_keeps_is_a_bit_for_every_gate_and_unit() -> None:
    ours = HAT(mlp([12, 32, 16, 3]), lambda p: torch.optim.Adam(p), steps=3)
    ours.learn(toy_task(0))
    assert ours.memory_bytes() == 2 * (32 + 16) // 8 + (32 + 16 + 8) // 8  # gates and those in use; units in use
    ours.learn(toy_task(1))
    assert ours.memory_bytes() == 3 * (32 + 16) // 8 + (32 + 16 + 8) // 8


def test_a_task_that_is_not_known_is_refused_and_copies_have_no_gates() -> None:
    ours = HAT(mlp([12, 32, 16, 3]), lambda p: torch.optim.Adam(p), steps=3)
    ours.learn(toy_task(0))
    with pytest.raises(ValueError, match=r"in 0\.\.0 .*got 5"):
        ours.predict(toy_task(0).test().x, 5)
    with pytest.raises(ValueError, match="got None"):
        ours.predict(toy_task(0).test().x)
    assert not any(m._forward_pre_hooks for m in ours.model.modules())
    with pytest.raises(ValueError, match="inputs must be among the layers fc1, fc2, fc3, got"):
        HAT(mlp([12, 32, 16, 3]), lambda p: torch.optim.Adam(p), inputs=["fc0"])


def test_goes_together_with_another_method() -> None:
    class Decay(Strategy):
        """A penalty beside that of HAT."""

        def penalty(self) -> Tensor:
            return 1e-3 * sum(p.square().sum() for p in self.model.parameters())

    ours = combine(HAT, Decay)(mlp([12, 32, 16, 3]), lambda p: torch.optim.Adam(p), steps=3)
    ours.learn(toy_task(0))
    assert ours.gates.tasks
