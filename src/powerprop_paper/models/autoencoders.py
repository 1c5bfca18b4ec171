"""Variational autoencoders: one that is the classifier too, and one for tasks that come one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from powerprop.continual.generative_replay import VAE
from powerprop_paper.models.networks import answer, build, linear_layers, output_layer


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


def replay_vae(
    sizes: Sequence[int], classes: int, latent: int = 100, *, heads: int = 0, init: str = "glorot_normal",
    generator: torch.Generator | None = None,
) -> ReplayVAE:  # fmt: skip
    """A classifier with a generator inside; replay_vae([784, 400, 400], 10) is the published one for split MNIST."""
    return build(lambda: ReplayVAE(sizes, classes, latent, heads), init, generator)


class TaskPart(nn.Module):
    """What one task has for itself: the encoder, and the first layers of the decoder."""

    def __init__(self, encoder: Sequence[int], head: Sequence[int]) -> None:
        super().__init__()
        self.encoder, self.head = linear_layers(encoder, last=False), linear_layers(head, last=True)


class TaskParts(nn.Module):
    """One `TaskPart` for each task, called `<name>.0`, `<name>.1`, ... in the state dict."""

    def __init__(self, encoder: Sequence[int], head: Sequence[int], tasks: int, init: str) -> None:
        super().__init__()
        self.encoder, self.head, self.init = tuple(encoder), tuple(head), init
        for task in range(tasks):
            self.add_module(str(task), TaskPart(encoder, head))

    def add(self, generator: torch.Generator | None = None) -> TaskPart:
        """The part of the next task, on the device and in the precision of the others."""
        part = build(lambda: TaskPart(self.encoder, self.head), self.init, generator)
        like = next(self.parameters(), None)
        self.add_module(str(len(self._modules)), part if like is None else part.to(like))
        return part

    def of(self, task: int) -> TaskPart:
        """The part of a task."""
        if not 0 <= task < len(self._modules):
            raise ValueError(f"task must be in 0..{len(self._modules) - 1} (a part for each), got {task}")
        return self.get_submodule(str(task))  # type: ignore[return-value]


class TaskVAE(nn.Module):
    """A fully connected variational autoencoder of Bernoulli pixels for a sequence of tasks (Nguyen et al., 2018).

        q(z|x) = N(μ, σ²),  (μ, log σ²) = encoder of the task (x)        p(x|z): logits = shared(head of the task (z))

    model(x, task) gives (logits, μ, log σ²) with z drawn from q, as `powerprop.continual.Elbo` takes them; the noise is
    that of torch's generator, which a learner seeds. Images are flattened. With `heads="parts"` a learner adds the part
    of every task when it begins, and `where="shared.*.weight"` are the weights that tasks share.

    encoder: widths of each encoder, inputs first, 2·latent last.
    head: widths of the task's first decoder layers, latent first.
    shared: widths of the decoder that all tasks share, from the head's last to the inputs.
    tasks: how many there are parts for.
    """

    def __init__(
        self, encoder: Sequence[int], head: Sequence[int], shared: Sequence[int], tasks: int = 1,
        init: str = "glorot_normal",
    ) -> None:  # fmt: skip
        super().__init__()
        fits = min(len(encoder), len(head), len(shared)) > 1 and min(*encoder, *head, *shared, tasks + 1) > 0
        fits = fits and encoder[-1] == 2 * head[0] and head[-1] == shared[0] and shared[-1] == encoder[0]
        if not fits:
            text = "encoder [inputs, …, 2·latent], head [latent, …, h], shared [h, …, inputs] and tasks >= 0"
            raise ValueError(f"expected {text}, got {list(encoder)}, {list(head)}, {list(shared)} and {tasks}")
        self.latent = head[0]
        self.parts = TaskParts(encoder, head, tasks, init)
        self.shared = linear_layers(shared, last=False)

    def encode(self, x: Tensor, task: int) -> tuple[Tensor, Tensor]:
        """μ and log σ² of every input."""
        mean, log_variance = self.parts.of(task).encoder(x.flatten(1)).chunk(2, 1)
        return mean, log_variance

    def decode(self, z: Tensor, task: int) -> Tensor:
        """The logits of every pixel."""
        return self.shared(self.parts.of(task).head(z))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, task: int) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x, task)
        z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        return self.decode(z, task), mean, log_variance


def task_vae(
    pixels: int = 784, width: int = 500, latent: int = 50, *, tasks: int = 1, init: str = "glorot_normal",
    generator: torch.Generator | None = None,
) -> TaskVAE:  # fmt: skip
    """The paper's: encoders 784-500-500-500-100, heads 50-500-500, the shared decoder 500-500-784 (appendix C)."""
    encoder, head = [pixels, width, width, width, 2 * latent], [latent, width, width]
    return build(lambda: TaskVAE(encoder, head, [width, width, pixels], tasks, init), init, generator)
