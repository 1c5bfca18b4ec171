"""How likely a generative model finds data: the marginal likelihood of an autoencoder by importance sampling."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["log_likelihood"]

PIXELS = 2**21
"""That are decoded at a time."""


@torch.no_grad()
def log_likelihood(
    encode: Callable[[Tensor], tuple[Tensor, Tensor]], decode: Callable[[Tensor], Tensor], x: Tensor,
    samples: int = 5000, *, generator: torch.Generator, pixels: int = PIXELS,
) -> Tensor:  # fmt: skip
    """log p(x) of every input (N,) under Bernoulli pixels, estimated with K samples of the encoder's q(z|x):

        log p(x) ≈ log 1/K Σ_k p(x|z_k) N(z_k; 0, 1) / q(z_k|x),    z_k ~ q(z|x) = N(μ, σ²)

    (Burda et al., 2016). On average it is a lower bound that rises with K to the exact value; with one sample it is an
    estimate of the ELBO. The sum is taken in logarithms. The samples of an input are the same however the work is cut
    into batches.

    encode: (μ, log σ²) of some inputs, each (n, latent).
    decode: logits of the pixels for some z.
    x: inputs in [0, 1], (N, …).
    samples: K.
    generator: of the samples, on the CPU, so that they are the same on every machine.
    pixels: so many are decoded at a time. About three times as many numbers are in memory, and the layers of `decode`.
    """
    if samples < 1 or pixels < 1:
        raise ValueError(f"samples and pixels must be at least 1, got {samples} and {pixels}")
    if not isinstance(generator, torch.Generator) or generator.device.type != "cpu":
        raise TypeError(f"generator must be a torch.Generator on the CPU, got {generator!r}")
    if not len(x):
        return torch.zeros(0, dtype=torch.float64, device=x.device)
    rows = max(1, pixels // x[0].numel())
    inputs, draws = max(1, rows // samples), min(rows, samples)
    found = [
        _of_some(*encode(part), decode, part.flatten(1), samples, draws, generator) for part in torch.split(x, inputs)
    ]
    return torch.cat(found)


def _of_some(
    mean: Tensor, log_variance: Tensor, decode: Callable[[Tensor], Tensor], x: Tensor, samples: int, draws: int,
    generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """The estimates of some inputs, so many draws of each decoded at a time."""
    shape = (samples, mean.shape[1])
    noise = torch.stack([torch.randn(shape, generator=generator) for _ in x]).to(mean)
    parts = [
        _log_weights(part, mean[:, None], log_variance[:, None], decode, x) for part in torch.split(noise, draws, 1)
    ]
    return torch.cat(parts, 1).logsumexp(1) - math.log(samples)


def _log_weights(
    noise: Tensor, mean: Tensor, log_variance: Tensor, decode: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """log p(x|z) + log p(z) - log q(z|x) for z = μ + σε, in which the normalisers of the Gaussians cancel."""
    z = mean + (0.5 * log_variance).exp() * noise
    logits = decode(z.flatten(0, 1)).reshape(*z.shape[:2], -1)
    pixels = torch.einsum("nkd,nd->nk", logits, x) - F.softplus(logits).sum(2)
    latent = 0.5 * (noise.square() - z.square() + log_variance).sum(2)
    return pixels.double() + latent.double()
