"""SupSup: scores, masks of fixed weights, and inference among them."""

import pytest
import torch
from torch import Tensor, nn

from powerprop.continual import INFERENCES, SupSup
from powerprop.continual.packing.subnetworks import RATES
from powerprop.continual.packing.task_masks import BitMasks
from powerprop.masks import Masks
from tasks import FEATURES, NormNet, toy_model, toy_task


def adam(parameters: list[nn.Parameter], lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr)


def test_the_gradient_goes_straight_through() -> None:
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -2.0, 3.0, -4.0]]))
    ours = SupSup(model, lambda p: torch.optim.SGD(p, lr=1.0), kept=0.5, weights="given")
    ours.begin(0)
    score = ours.scores["0.weight"]
    score.detach().copy_(torch.tensor([[0.3, 0.2, 0.1, 0.0]]))
    ours._supermask.put_on()
    assert model[0].weight.tolist() == [[1.0, -2.0, 0.0, 0.0]]
    ours.step(model(torch.tensor([[0.0, 0.0, -1.0, 0.0]])).sum())  # ∂L/∂w = (0, 0, -1, 0), ∂L/∂s = -3
    torch.testing.assert_close(score.detach(), torch.tensor([[0.3, 0.2, 3.1, 0.0]]))
    assert model[0].weight.tolist() == [[1.0, 0.0, 3.0, 0.0]]


def test_weights_are_signed_constants_and_stay() -> None:
    model = toy_model(seed=1)
    signs = model.fc1.weight.detach() < 0
    ours = SupSup(model, adam, steps=10, batch_size=16)
    fixed = {n: m.theta().clone() for n, m in ours.nets.masters.items()}
    assert torch.equal(fixed["fc1.weight"] < 0, signs)
    torch.testing.assert_close(fixed["fc1.weight"].abs(), torch.full((32, FEATURES), (2 / FEATURES) ** 0.5))
    rest = {n: p.detach().clone() for n, p in model.named_parameters() if "bias" in n}
    for task in range(2):
        ours.learn(toy_task(task))
    assert all(torch.equal(m.theta(), fixed[n]) for n, m in ours.nets.masters.items())
    assert all(torch.equal(p, rest[n]) for n, p in model.named_parameters() if n in rest)


def test_every_task_keeps_its_share_and_a_bit_for_each_weight() -> None:
    ours = SupSup(toy_model(), adam, kept=0.25, steps=10, batch_size=16)
    before = ours.memory_bytes()
    for task in range(2):
        ours.learn(toy_task(task))
        masks = ours.nets.masks.mask(task)
        assert [int(m.sum()) for m in masks.values()] == [12 * 32 // 4, 32 * 32 // 4, 32 * 3 // 4]
    bits = 2 * (12 * 32 + 32 * 32 + 32 * 3) // 8
    # tasks of means, inputs of each; two means and a variance each; limits of unknown inputs
    stats = 8 * 2 * 2 + 4 * FEATURES * (2 + 2) + 4 * 2 * len(RATES)
    assert ours.memory_bytes() - before == bits + stats


def test_learns_and_finds_the_task() -> None:
    model = toy_model(width=256, outputs=30)  # one-shot inference needs width, and outputs that no class has
    ours = SupSup(model, lambda p: adam(p, 3e-3), kept=None, steps=150, batch_size=64)
    for task in range(3):
        ours.learn(toy_task(task))
    for task in range(3):
        x, y = toy_task(task).test()
        assert (ours.predict(x, task).label == y).float().mean() > 0.9
        for method in INFERENCES:
            assert (ours.predict(x, method=method, group=None).task == task).all(), method


def test_heads_are_trained_and_norms_are_not() -> None:
    model = NormNet()
    ours = SupSup(model, adam, heads="out", steps=10, batch_size=16)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    x, logits = toy_task(0).test().x, []
    for task in range(2):
        ours.learn(toy_task(task))
        logits.append(ours.logits(x, task))
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n]) and n not in ours.nets.masters}
    heads = {f"out.{t}.{kind}" for t in range(2) for kind in ("weight", "bias")}
    assert moved == heads | {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    assert torch.equal(ours.logits(x, 0), logits[0])


def test_mixture_and_sums_are_those_of_the_masks() -> None:
    masks = BitMasks({"w": torch.zeros(2, 5)})
    generator = torch.Generator().manual_seed(0)
    each = torch.rand(3, 2, 5, generator=generator) > 0.5
    for mask in each:
        masks.add_chosen(Masks({"w": mask}))
    pi, values = torch.tensor([0.5, 0.3, 0.2]), torch.rand(2, 5, generator=generator)
    mixed: Tensor = (pi[:, None, None] * each).sum(0)
    torch.testing.assert_close(masks.mixture("w", pi), mixed)
    torch.testing.assert_close(masks.sums("w", values), (each * values).sum((1, 2)).double())


def test_many_tasks() -> None:
    ours = SupSup(toy_model(), adam, kept=None, steps=1, batch_size=8)
    x, y = toy_task(0).train()
    for _ in range(200):
        ours.learn((x[:8], y[:8]))
    assert len(ours.predict(x[:4], 199).label) == 4
    assert int(ours.predict(x[:4], method="oneshot").task[0]) in range(200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kept": 1.5}, r"kept must be in \(0, 1\], .* got 1.5"),
        ({"weights": "normal"}, "weights must be one of signed, given, got 'normal'"),
        ({"distribution": "global"}, "distribution must be one of uniform, erk, got 'global'"),
        ({"alpha": 2.0}, "SupSup needs alpha = 1, got alpha = 2"),
    ],
)
def test_bad_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SupSup(toy_model(), adam, **options)
