"""Variational autoencoders for generative replay: one beside a classifier, one that is the classifier too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from powerprop.models.heads import answer, output_layer
from powerprop.models.init import build


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


class ReplayVAE(VAE):
    """A classifier on the encoder of its own generator (van de Ven & Tolias, 2018); model(x) gives logits of classes.

    With `heads` > 0 there is one output layer for each task, `heads.0`, `heads.1`, ...
    """

    def __init__(self, sizes: Sequence[int], classes: int, latent: int = 100, heads: int = 0) -> None:
        super().__init__(sizes, latent)
        self.add_module("heads" if heads else "output", output_layer(sizes[-1], classes, heads))

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        *_, output = self.children()
        return answer(output, self.features(x), task)


def vae(
    sizes: Sequence[int], latent: int = 100, *, init: str = "glorot_normal", generator: torch.Generator | None = None
) -> VAE:
    """A variational autoencoder of the given widths, inputs first: vae([784, 400, 400])."""
    return build(lambda: VAE(sizes, latent), init, generator)


def replay_vae(
    sizes: Sequence[int],
    classes: int,
    latent: int = 100,
    *,
    heads: int = 0,
    init: str = "glorot_normal",
    generator: torch.Generator | None = None,
) -> ReplayVAE:
    """A classifier with a generator inside; replay_vae([784, 400, 400], 10) is the published one for split MNIST."""
    return build(lambda: ReplayVAE(sizes, classes, latent, heads), init, generator)
