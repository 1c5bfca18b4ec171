"""Generative replay by hand: what is made up, how it is labelled, what it weighs."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.continual import DGR, Classification, Regression, RtF, Strategy, load_learner, make_task
from powerprop_paper.models import VAE, mlp, replay_vae, vae
from strategies import make, tensors


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def dgr(outputs: int = 3, heads: int = 0, **options: object) -> DGR:
    model = mlp([8, 16, outputs], heads=heads, generator=seeded())
    options = {
        "hidden": (12,),
        "latent": 3,
        "steps": 10,
        "batch_size": 16,
        "heads": "heads" if heads else None,
    } | options
    return DGR(model, adam, **options)


def in_the_second_task(learner: Strategy) -> Strategy:
    """A learner with one task behind it and the first batch of the next in hand."""
    x, y = tensors("classification", 0)
    learner.learn(make_task((x, y), classes=(2, 1, 0)))
    learner.begin(classes=(3, 4, 5))
    learner.now.batch = tensors("classification", 1, 16)
    return learner


def test_the_models_have_the_published_shape() -> None:
    model = replay_vae([784, 400, 400], 10, generator=seeded())
    shapes = [tuple(p.shape) for n, p in model.named_parameters() if n.endswith("weight")]
    encoder, decoder = [(400, 784), (400, 400), (200, 400)], [(400, 100), (400, 400), (784, 400)]
    assert shapes == [*encoder, *decoder, (10, 400)]
    x = torch.rand(2, 1, 28, 28)
    assert model(x).shape == (2, 10)
    mean, log_variance = model.encode(x)
    assert mean.shape == log_variance.shape == (2, 100)
    assert model.decode(mean).shape == (2, 784)
    assert vae([784, 400], 50, generator=seeded()).latent == 50
    with pytest.raises(ValueError, match=r"latent one, got \[784\], 3"):
        VAE([784], 3)


def test_the_bound_per_pixel_by_hand() -> None:
    class Flat(nn.Module):
        latent = 1

        def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.full((len(x), 1), 2.0), torch.zeros(len(x), 1)

        def decode(self, z: Tensor) -> Tensor:
            return torch.zeros(len(z), 8)

    bound = dgr().bound_of(Flat(), torch.rand(5, 2, 4))
    assert bound.tolist() == pytest.approx(5 * [(8 * math.log(2) + 0.5 * 4) / 8])  # ½(μ² + σ² - log σ² - 1) = 2


def test_what_dgr_replays_is_labelled_by_the_network_of_before_among_its_own_classes() -> None:
    learner = in_the_second_task(dgr(6, objective=Classification("stream")))
    with torch.no_grad():
        learner.teacher.fc2.bias[3:] += 1000  # classes of the task in hand, of which the network of before knew nothing
    (rehearsal,) = learner.rehearse()
    x, y = rehearsal.batch
    assert x.shape == (16, 8)
    assert float(x.min()) >= 0
    assert float(x.max()) <= 1
    assert rehearsal.weight == 0.5
    best = learner.teacher(x)[:, :3].argmax(1)
    assert torch.equal(learner.objective.targets(y, rehearsal.task), best)
    assert not rehearsal.task.any()


def test_with_heads_every_earlier_task_labels_what_is_replayed() -> None:
    learner = dgr(3, heads=3, replayed=5)
    for task in range(2):
        learner.learn(tensors("classification", task))
    learner.begin()
    learner.now.batch = tensors("classification", 2, 16)
    found = learner.rehearse()
    assert [each.task for each in found] == [0, 1]
    assert [each.weight for each in found] == pytest.approx([1 / 3, 1 / 3])
    for each in found:
        x, y = each.batch
        assert len(x) == 5
        assert torch.equal(y, learner.teacher(x, each.task).argmax(1))


def test_rtf_replays_probabilities_at_a_temperature() -> None:
    learner = in_the_second_task(
        RtF(replay_vae([8, 16], 6, 3, generator=seeded()), adam, objective=Classification("stream"), steps=10)
    )
    (rehearsal,) = learner.rehearse()
    x, p = rehearsal.batch
    assert torch.allclose(p[:, :3], (learner.teacher(x)[:, :3] / 2).softmax(1))
    assert not p[:, 3:].any()
    loss = rehearsal.loss(learner.model, rehearsal.batch, 0)
    assert torch.allclose(loss, 4 * F.cross_entropy(learner.model(x) / 2, p))
    penalty = learner.penalty()
    learner.now.generators.pop("noise")
    shown = learner.now.batch[0]
    bounds = learner.bound_of(learner.model, torch.cat([shown, x]))
    assert torch.allclose(penalty, 0.5 * bounds[: len(shown)].mean() + 0.5 * bounds[len(shown) :].mean())


def test_the_generator_learns_and_is_what_is_kept() -> None:
    learner = dgr(steps=200)
    learner.begin(steps=1)
    data = tensors("classification", 0)
    learner.step(learner.objective.loss(learner.model, data, 0), data)
    first = learner.bound_of(learner.vae.net, data[0]).mean().item()
    learner.give_up()
    learner.learn(data)
    assert learner.teacher is learner.vae_before is learner.vae_optimizer is None
    learner.begin()
    assert learner.bound_of(learner.vae.net, data[0]).mean().item() < first
    learner.give_up()
    assert learner.memory_bytes() == sum(4 * p.numel() for p in learner.vae.net.parameters())
    assert make("rtf").memory_bytes() == 0


def test_a_generator_of_ones_own_is_given_again_to_a_file(tmp_path: Path) -> None:
    def own() -> VAE:
        return vae([8, 5], 2, generator=seeded(1))

    learner = dgr(vae=own())
    learner.learn(tensors("classification", 0))
    learner.save(tmp_path / "learner")
    with pytest.raises(ValueError, match="weights that differ"):
        load_learner(tmp_path / "learner", mlp([8, 16, 3]))
    made = load_learner(tmp_path / "learner", mlp([8, 16, 3]), vae=own())
    assert torch.equal(made.vae.net.code.weight, learner.vae.net.code.weight)
    for each in (learner, made):
        each.learn(tensors("classification", 1))
    assert torch.equal(made.vae.net.code.weight, learner.vae.net.code.weight)


def test_what_generative_replay_cannot_do_is_refused() -> None:
    model = mlp([8, 16, 3], generator=seeded())
    with pytest.raises(TypeError, match="DGR asks for classes: objective must be Classification, got Regression"):
        DGR(model, adam, objective=Regression())
    with pytest.raises(TypeError, match="model must have encode, decode and latent, but MLP has no encode"):
        RtF(model, adam)
    with pytest.raises(TypeError, match="vae must have encode, decode and latent, but MLP has no encode"):
        DGR(model, adam, vae=mlp([8, 3]))
    with pytest.raises(ValueError, match="replayed must be at least 1, got 0"):
        dgr(replayed=0)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        RtF(replay_vae([8, 16], 3), adam, temperature=0.0)
    learner, (x, y) = dgr(), tensors("classification", 0)
    with pytest.raises(ValueError, match=r"pixels in \[0, 1\], got torch.float32 in"):
        learner.learn((x - 3, y))
    learner.learn((x, y))
    with pytest.raises(ValueError, match=r"makes inputs of shape \(8,\), got \(2, 4\)"):
        learner.learn((torch.rand(32, 2, 4), torch.zeros(32, dtype=torch.long)))
