"""Layers that a method's hooks do not see all of: attention, weights used by hand, layers replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.continual import GPM, HAT, OWM, EfficientPackNet, PackNet, Strategy, SupSup
from powerprop.continual.layers import loose_layers
from strategies import loss_of, network, tensors
from tasks import CLASSES, FEATURES, toy_task

STEPS = 15


class Attention(nn.Module):
    """The output projection of attention is a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.attention = nn.Linear(4, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.hidden, self.out = nn.Linear(8, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x.view(len(x), 3, 4))
        return self.out(torch.relu(self.hidden(self.attention(h, h, h, need_weights=False)[0].mean(1))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.into(x.view(len(x), 3, 4))).mean(1))  # type: ignore[no-any-return]


class ByHand(nn.Module):
    """The weights of one layer are used without it, those of another also without it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.also = nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = torch.relu(F.linear(h, self.never.weight, self.never.bias))
        return self.out(torch.relu(self.also(h) + 0.5 * F.linear(h.flip(1), self.also.weight)))  # type: ignore[no-any-return]


NETS: dict[str, tuple[type[nn.Module], set[str]]] = {
    "attention": (Attention, {"attention.out_proj"}),
    "encoder": (Encoder, {"encoder.self_attn.out_proj"}),
    "by hand": (ByHand, {"never", "also"}),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*for the tasks to come", "ignore:.*sub-network")
every_net = pytest.mark.parametrize("net", NETS)


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def make(kind: type[Strategy], net: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(NETS[net][0](), adam, steps=STEPS, batch_size=32, **options)


@every_net
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_hat_answers_as_before_where_its_gates_are_not_seen(net: str, alpha: float, tmp_path: Path) -> None:
    ours, x, before = make(HAT, net, alpha=alpha), toy_task(0).test().x, []
    with pytest.warns(UserWarning, match="what goes into it cannot be seen, so it is held"):
        ours.learn(toy_task(0))
    for task in range(3):
        if task:
            ours.learn(toy_task(task))
        before.append(ours.logits(x, task))
        assert all(torch.equal(ours.logits(x, t), logits) for t, logits in enumerate(before))
    assert set(ours.gates.loose) == NETS[net][1]
    ours.save(tmp_path / "l")
    again = make(HAT, net, alpha=alpha)
    again.load(tmp_path / "l")
    for each in (ours, again):
        each.learn(toy_task(3))
        assert torch.equal(each.logits(x, 0), before[0])
    assert torch.equal(ours.logits(x, 3), again.logits(x, 3))


@every_net
@pytest.mark.parametrize("kind", [GPM, OWM])
def test_projections_hold_what_they_do_not_see(kind: type[Strategy], net: str, tmp_path: Path) -> None:
    ours = make(kind, net)
    with pytest.warns(UserWarning, match="what goes into it cannot be seen, so it is held"):
        ours.learn(toy_task(0))
    ours.save(tmp_path / "l")
    again = make(kind, net)
    again.load(tmp_path / "l")
    held = {n: p.detach().clone() for n, p in ours.model.named_parameters() if n.rpartition(".")[0] in NETS[net][1]}
    assert held
    for each in (ours, again):
        each.learn(toy_task(1))
        named = dict(each.model.named_parameters())
        assert all(torch.equal(named[n], before) for n, before in held.items())
    assert not torch.equal(*(dict(ours.model.named_parameters())[n] for n in ("out.weight",)), torch.zeros(()))
    moved = "into.weight" if net != "by hand" else "first.weight"
    assert torch.equal(dict(ours.model.named_parameters())[moved], dict(again.model.named_parameters())[moved])


@every_net
@pytest.mark.parametrize("kind", [EfficientPackNet, PackNet, SupSup])
def test_masks_of_weights_need_no_layer_to_be_called(kind: type[Strategy], net: str) -> None:
    options = {"total_tasks": 4} if kind is PackNet else {}
    ours, x, before = make(kind, net, **options), toy_task(0).test().x, []
    for task in range(3):
        ours.learn(toy_task(task))
        before.append(ours.logits(x, task))
        assert all(torch.equal(ours.logits(x, t), logits) for t, logits in enumerate(before))


@every_net
def test_loose_layers_by_name(net: str) -> None:
    model = NETS[net][0]().eval()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    found = loose_layers(lambda: model(torch.ones(1, FEATURES)), layers)
    assert set(found) == NETS[net][1]
    assert found.get("also", "is used outside of it") == "is used outside of it"
    assert all(isinstance(layer.weight, nn.Parameter) for layer in layers.values())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


# --- layers that are replaced, networks with too few -----------------------------------------------------------------


@pytest.mark.parametrize("kind", [HAT, GPM, OWM, EfficientPackNet, PackNet, SupSup])
def test_a_layer_that_was_replaced_between_tasks_is_refused_by_name(kind: type) -> None:
    options = {"total_tasks": 3} if kind is PackNet else {}
    ours = kind(network(3), adam, steps=3, batch_size=16, **options)
    ours.learn(tensors("classification", 0))
    first, groups = ours.model[2], len(ours.optimizer.param_groups)
    ours.model[2] = nn.Linear(16, 16)
    with pytest.raises(RuntimeError, match="'2.weight', '2.bias' of the model are not what it was when earlier tasks"):
        ours.learn(tensors("classification", 1))
    assert len(ours.optimizer.param_groups) == groups
    ours.model[2] = first
    ours.learn(tensors("classification", 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x.view(len(x), 2, 4))[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(("net", "name"), [(lambda: nn.Linear(8, 3), ""), (Recurrent, "out")])
def test_hat_without_a_layer_for_gates_says_what_to_do(net: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"no layer is left for gates: '{name}' is the only one, .* say inputs="):
        HAT(net(), adam)
    ours, x = HAT(net(), adam, inputs=[], steps=20, batch_size=16), tensors("classification", 0)[0]
    answers = []
    for task in range(3):
        ours.learn(tensors("classification", task))
        answers.append(ours.logits(x, task))
        assert all(torch.equal(ours.logits(x, t), before) for t, before in enumerate(answers))


def test_steps_beyond_those_that_were_announced_have_the_hardest_gates() -> None:
    ours, found = HAT(network(3), adam, periods=2), []
    ours.begin(steps=6)
    batch = tensors("classification", 0)
    for _ in range(10):
        found.append(ours._s())
        ours.step(loss_of(ours, batch))
    assert found[:6] == pytest.approx([1 / 400, 200.00125, 400] * 2)
    assert found[6:] == [400.0] * 4
    ours.end(batch)
