"""VCL: a Gaussian over every weight, whose prior is what was learned before."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from powerprop.continual import VCL
from powerprop.continual.vcl import gaussian_divergence
from tasks import toy_model, toy_task


def learner(model: nn.Module | None = None, **options: Any) -> VCL:
    options = {"steps": 40, "batch_size": 32, "examples": 256, "samples": 2, **options}
    return VCL(toy_model() if model is None else model, lambda p: torch.optim.Adam(p, lr=1e-2), **options)


def test_divergence_by_hand() -> None:
    """KL(N(1, 4) ‖ N(0, 1)) = ½ (log ¼ + 4 + 1 - 1); of N(0, 1) from N(1, 4): ½ (log 4 + (1 + 1)/4 - 1)."""
    first, second = (torch.tensor([1.0]), torch.tensor([math.log(4)])), (torch.zeros(1), torch.zeros(1))
    assert gaussian_divergence(*first, *second).item() == pytest.approx(0.5 * (4 - math.log(4)))
    assert gaussian_divergence(*second, *first).item() == pytest.approx(0.5 * (math.log(4) - 0.5))
    assert gaussian_divergence(*first, *first).item() == 0


def test_divergence_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, log_variance, other, log_other = torch.randn(4, 50, generator=generator)
    kinds = [torch.distributions.Normal(m, (0.5 * v).exp()) for m, v in ((mean, log_variance), (other, log_other))]
    wanted = torch.distributions.kl_divergence(*kinds).sum()
    torch.testing.assert_close(gaussian_divergence(mean, log_variance, other, log_other), wanted)


def test_drawn_weights_have_the_mean_and_the_variance() -> None:
    ours = learner(toy_model(width=256), log_variance=-2.0)
    ours.begin(0)
    drawn, own = ours.posterior.draw(torch.Generator().manual_seed(0)), dict(ours.model.named_parameters())
    assert drawn.keys() == own.keys()
    noise = (drawn["fc2.weight"] - own["fc2.weight"]).detach()
    assert noise.mean().abs() < 0.01
    assert noise.var().item() == pytest.approx(math.exp(-2), rel=0.05)


def test_the_penalty_is_the_divergence_from_what_was_learned() -> None:
    ours = learner(prior_variance=4.0)
    ours.begin(0)
    with ours.viewing(0) as model:
        loss = F.cross_entropy(model(toy_task(0).train().x[:8]), torch.zeros(8, dtype=torch.long))
    loss.backward()
    found = ours.penalty()
    first = sum(
        gaussian_divergence(p, torch.full_like(p, -6.0), torch.zeros(()), torch.tensor(math.log(4)))
        for p in ours.model.parameters()
    )
    assert found is not None
    torch.testing.assert_close(found, first / 256)
    ours.give_up()
    ours.learn(toy_task(0))
    ours.begin(1)
    for parameter in ours.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = ours.penalty()
    assert found is not None
    assert found.item() == pytest.approx(0, abs=1e-6)


def test_a_task_that_was_given_up_is_no_prior() -> None:
    ours, fresh = learner(), learner()
    ours.begin(0)
    ours.give_up()
    for each in (ours, fresh):
        each.learn(toy_task(0))
    assert all(torch.equal(*pair) for pair in zip(ours.model.parameters(), fresh.model.parameters(), strict=True))


def test_variances_are_trained_and_stay_with_the_weights_that_tasks_use() -> None:
    ours = learner(toy_model(heads=2), heads="heads")
    ours.learn(toy_task(0))
    named = dict(ours.model.named_parameters())
    used = {name for name in named if not name.startswith("heads.1")}
    assert ours.posterior.log_variance.keys() == used
    assert ours.memory_bytes() == 4 * sum(named[name].numel() for name in used)
    assert all((each != -6).any() for each in ours.posterior.log_variance.values())
    head = {n: p.detach().clone() for n, p in named.items() if n.startswith("heads.0")}
    variances = {n: ours.posterior.log_variance[n].detach().clone() for n in head}
    ours.learn(toy_task(1))
    assert ours.memory_bytes() == 4 * sum(p.numel() for p in named.values())
    assert all(
        torch.equal(named[n], head[n]) and torch.equal(ours.posterior.log_variance[n], variances[n]) for n in head
    )


def test_holds_on_to_the_first_task() -> None:
    """The more the prior counts, the less the answers of the first task move."""
    moved, x = [], toy_task(0).test().x
    for second in (10**9, 16):
        ours = learner(samples=1)
        ours.learn(toy_task(0))
        before, ours.examples = ours.logits(x, 0).exp(), second
        ours.learn(toy_task(1))
        moved.append(float((ours.logits(x, 0).exp() - before).square().mean()))
    assert moved[1] < 0.3 * moved[0]


def test_answers_are_means_over_the_same_networks() -> None:
    ours = learner(samples=3, log_variance=-1.0)
    ours.learn(toy_task(0))
    x = toy_task(0).test().x
    found = ours.logits(x, 0)
    generator, total = torch.Generator().manual_seed(ours.generator("weights of answers").initial_seed()), 0
    for _ in range(3):
        drawn = ours.posterior.draw(generator)
        total = total + torch.func.functional_call(ours.model, drawn, (x,)).softmax(1)
    torch.testing.assert_close(found.exp(), total.detach() / 3)  # type: ignore[attr-defined]
    assert torch.equal(found[:50], ours.logits(x[:50], 0))
    assert torch.equal(found, ours.logits(x, 0))


def test_means_may_begin_with_maximum_likelihood() -> None:
    ours = learner(likelihood_steps=40)
    ours.learn(toy_task(0))
    assert all((each == -6).all() for each in ours.posterior.log_variance.values())
    ours.learn(toy_task(1))
    assert all((each != -6).any() for each in ours.posterior.log_variance.values())


def test_heads_go_on_bit_for_bit(tmp_path: Path) -> None:
    ours, again = (learner(toy_model(heads=2), heads="heads", clip=1.0) for _ in range(2))
    ours.learn(toy_task(0))
    ours.save(tmp_path / "learner")
    again.load(tmp_path / "learner")
    for each in (ours, again):
        each.learn(toy_task(1))
    assert all(torch.equal(*pair) for pair in zip(ours.model.parameters(), again.model.parameters(), strict=True))
    assert torch.equal(ours.logits(toy_task(0).test().x, 0), again.logits(toy_task(0).test().x, 0))


def test_a_loss_of_the_means_is_refused() -> None:
    ours, (x, y) = learner(), toy_task(0).train()
    ours.begin(0)
    before = [p.detach().clone() for p in ours.model.parameters()]
    with pytest.raises(RuntimeError, match=r"compute the loss inside `with learner.viewing\(0\) as model:`"):
        ours.step(F.cross_entropy(ours.model(x), y), (x, y))
    with ours.viewing(0) as model:
        loss = F.cross_entropy(model(x), y)
    with pytest.raises(ValueError, match=r"VCL with samples=2 looks at the batch so often: say step\(loss, batch\)"):
        ours.step(loss)
    assert all(torch.equal(*pair) for pair in zip(before, ours.model.parameters(), strict=True))
    ours.step(loss, (x, y))
    with pytest.raises(RuntimeError, match="compute the loss inside"):
        ours.step(F.cross_entropy(ours.model(x), y), (x, y))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"examples": 0}, "examples must be at least 1, got 0"),
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"likelihood_steps": -1}, "likelihood_steps must be at least 0, got -1"),
        ({"prior_variance": 0.0}, "prior_variance must be positive, got 0.0"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learner(**options)
