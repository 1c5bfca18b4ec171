"""The generator of generative replay: what it must know, and how it is made, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from powerprop.continual.saving import check_shapes
from powerprop.continual.vae import vae

__all__ = ["Autoencoder", "Generator", "check_autoencoder"]


class Autoencoder(Protocol):
    """A generator: `encode(x)` gives (μ, log σ²), `decode(z)` the logits of x, `latent` is the width of z."""

    latent: int

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]: ...

    def decode(self, z: Tensor) -> Tensor: ...


def check_autoencoder(name: str, net: nn.Module) -> None:
    """An error with what a module lacks to be a generator."""
    if missing := [verb for verb in ("encode", "decode", "latent") if not hasattr(net, verb)]:
        text = f"{name} must have encode, decode and latent, but {type(net).__name__} has no {', '.join(missing)}"
        raise TypeError(f"{text}; see powerprop.continual.vae")


class Generator:
    """The generator of DGR as a part that is saved: given, or made as soon as the size of inputs is known."""

    trained = True
    """Steps change it, so that a task which diverges must be taken back."""

    def __init__(self, hidden: Sequence[int], latent: int, net: nn.Module | None) -> None:
        if net is not None:
            check_autoencoder("vae", net)
        self.hidden, self.latent, self.net, self.given = hidden, latent, net, net is not None
        self.shape: tuple[int, ...] = ()

    def fit_to(self, x: Tensor, generator: torch.Generator) -> None:
        """Be there, for inputs like these."""
        shape = tuple(x.shape[1:])
        if self.shape and shape != self.shape:
            raise ValueError(f"the generator makes inputs of shape {self.shape}, got {shape}")
        self.shape = shape
        if self.net is None:
            self.net = self._made(generator)
        self.net.to(x.device)

    def _made(self, generator: torch.Generator | None) -> nn.Module:
        return vae([torch.Size(self.shape).numel(), *self.hidden], self.latent, generator=generator)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its weights, and the shape of what it makes."""
        return {} if self.net is None else dict(self.net.state_dict()), {"shape": list(self.shape)}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """What `state` gave."""
        self.shape = tuple(data["shape"])
        if not self.given:
            self.net = self._made(torch.Generator()) if tensors else None
        check_shapes(tensors, {} if self.net is None else self.net.state_dict())
        if self.net is not None:
            self.net.load_state_dict(dict(tensors))
