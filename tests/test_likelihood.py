"""The likelihood by importance sampling, held to exact integrals on tiny models."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from powerprop.continual import Elbo
from powerprop_paper.likelihood import log_likelihood

INPUTS = 7


def tiny(latent: int) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Callable[[Tensor], Tensor]]:
    """A nonlinear decoder of five pixels, and an encoder that fits it badly."""
    generator = torch.Generator().manual_seed(latent)
    first, last = torch.randn(latent, 6, generator=generator), torch.randn(6, 5, generator=generator)
    mean, log_variance = torch.randn(5, latent, generator=generator), 0.3 * torch.randn(5, latent, generator=generator)
    return lambda x: (0.3 * x @ mean, x @ log_variance), lambda z: 2 * torch.tanh(z @ first) @ last


def inputs() -> Tensor:
    return torch.rand(INPUTS, 5, generator=torch.Generator().manual_seed(3))


def exact(decode: Callable[[Tensor], Tensor], x: Tensor, latent: int) -> Tensor:
    """log ∫ p(x|z) N(z; 0, 1) dz by the rule of trapezoids, which is exact to rounding for such integrands."""
    line = torch.linspace(-9, 9, 601, dtype=torch.float64)
    z = torch.cartesian_prod(*[line] * latent).reshape(-1, latent)
    prior = (
        -0.5 * z.square().sum(1) - 0.5 * latent * math.log(2 * math.pi) + latent * math.log(float(line[1] - line[0]))
    )
    logits = decode(z.float()).double()
    pixels = logits @ x.double().T - F.softplus(logits).sum(1, keepdim=True)
    return (pixels + prior[:, None]).logsumexp(0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("latent", [1, 2])
def test_many_samples_give_the_exact_integral(latent: int) -> None:
    (encode, decode), x = tiny(latent), inputs()
    found = log_likelihood(encode, decode, x, 30_000, generator=seeded())
    assert found.shape == (INPUTS,)
    torch.testing.assert_close(found, exact(decode, x, latent), atol=0.02, rtol=0)


def test_few_samples_are_a_lower_bound_that_rises_with_their_number() -> None:
    (encode, decode), x = tiny(2), inputs()
    many = x.repeat(400, 1)
    means = [log_likelihood(encode, decode, many, k, generator=seeded()).mean() for k in (1, 5, 50)]
    assert means[0] < means[1] < means[2] < exact(decode, x, 2).mean() + 0.01


def test_one_sample_is_the_elbo_on_average() -> None:
    (encode, decode), x = tiny(2), inputs().repeat(4000, 1)
    generator = seeded(1)

    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = encode(x)
        z = mean + (0.5 * log_variance).exp() * torch.randn(mean.shape, generator=generator)
        return decode(z), mean, log_variance

    elbo = -Elbo().loss(model, (x,), 0)
    assert float(log_likelihood(encode, decode, x, 1, generator=seeded()).mean()) == pytest.approx(
        float(elbo), abs=0.03
    )


@pytest.mark.parametrize("pixels", [1, 5, 33, 100, 5 * 64, 5 * 64 * 3, 5 * 64 * 4 + 1])
def test_the_same_however_the_work_is_cut(pixels: int) -> None:
    """Parts of the samples of an input, one input at a time, several, and a last part that is smaller."""
    (encode, decode), x = tiny(2), inputs()
    sizes: list[int] = []

    def counted(z: Tensor) -> Tensor:
        sizes.append(len(z))
        return decode(z)

    whole = log_likelihood(encode, decode, x, 64, generator=seeded())
    torch.testing.assert_close(log_likelihood(encode, counted, x, 64, generator=seeded(), pixels=pixels), whole)
    assert max(sizes) <= max(1, pixels // 5)
    assert sum(sizes) == INPUTS * 64


def test_unlikely_images_do_not_underflow() -> None:
    x = torch.ones(2, 784)
    found = log_likelihood(
        lambda x: (torch.zeros(len(x), 3),) * 2, lambda z: torch.full((len(z), 784), -50.0), x, 10, generator=seeded()
    )
    torch.testing.assert_close(found, torch.full((2,), -50.0 * 784, dtype=torch.float64))


def test_images_keep_their_shape_and_none_gives_none() -> None:
    encode, decode = tiny(1)
    x = inputs()
    whole = log_likelihood(encode, decode, x, 9, generator=seeded())
    pictures = log_likelihood(lambda x: encode(x.flatten(1)), decode, x.view(INPUTS, 1, 5, 1), 9, generator=seeded())
    assert torch.equal(whole, pictures)
    assert log_likelihood(encode, decode, x[:0], 9, generator=seeded()).shape == (0,)


def test_bad_arguments() -> None:
    encode, decode = tiny(1)
    with pytest.raises(ValueError, match="samples and pixels must be at least 1, got 0 and"):
        log_likelihood(encode, decode, inputs(), 0, generator=seeded())
    with pytest.raises(TypeError, match="generator must be a torch.Generator on the CPU, got None"):
        log_likelihood(encode, decode, inputs(), generator=None)  # type: ignore[arg-type]
