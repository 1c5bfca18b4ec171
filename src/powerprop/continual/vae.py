"""The variational autoencoder that generative replay makes by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["VAE", "vae"]


class VAE(nn.Module):
    """A fully connected variational autoencoder, its decoder the mirror image of its encoder.

        encode(x) = (μ, log σ²) of q(z|x)        decode(z) = logits of p(x|z)

    Images are flattened first.

    sizes: widths of the encoder, the inputs first: [784, 400, 400].
    latent: the width of z.
    """

    def __init__(self, sizes: Sequence[int], latent: int = 100) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1 or latent < 1:
            raise ValueError(f"sizes must be two or more positive widths and latent one, got {list(sizes)}, {latent}")
        self.latent = latent
        self.encoder = nn.Sequential(*(layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())))
        self.code = nn.Linear(sizes[-1], 2 * latent)
        back = pairwise([latent, *reversed(sizes)])
        self.decoder = nn.Sequential(*[layer for pair in back for layer in (nn.Linear(*pair), nn.ReLU())][:-1])

    def features(self, x: Tensor) -> Tensor:
        """The last hidden layer of the encoder."""
        return self.encoder(x.flatten(1))  # type: ignore[no-any-return]

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """μ and log σ² of every input."""
        mean, log_variance = self.code(self.features(x)).chunk(2, 1)
        return mean, log_variance

    def decode(self, z: Tensor) -> Tensor:
        """The logits of every pixel."""
        return self.decoder(z)  # type: ignore[no-any-return]


@torch.no_grad()
def vae(sizes: Sequence[int], latent: int = 100, *, generator: torch.Generator | None = None) -> VAE:
    """One of the given widths, inputs first, with Gaussian Glorot weights: vae([784, 400, 400])."""
    with torch.device("meta"):
        net = VAE(sizes, latent)
    net = net.to_empty(device="cpu")
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.normal_(0.0, math.sqrt(2 / (layer.in_features + layer.out_features)), generator=generator)
            layer.bias.zero_()
    return net
