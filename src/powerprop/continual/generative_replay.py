"""Learning again from inputs that a generator makes up: no example of an earlier task is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.data import Source
from powerprop.continual.lwf import Distilling
from powerprop.continual.objective import Elbo
from powerprop.continual.saving import check_shapes
from powerprop.continual.strategy import OptimizerFactory, Progress, Rehearsal, check_between, check_least

__all__ = ["DGR", "VAE", "GenerativeReplay", "Generator", "RtF", "check_autoencoder", "vae"]


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


def check_autoencoder(name: str, net: nn.Module) -> None:
    """An error with what a module lacks to be a generator: `encode(x)` gives (μ, log σ²), `decode(z)` the logits of x,
    `latent` is the width of z."""
    if missing := [verb for verb in ("encode", "decode", "latent") if not hasattr(net, verb)]:
        text = f"{name} must have encode, decode and latent, but {type(net).__name__} has no {', '.join(missing)}"
        raise TypeError(f"{text}; see powerprop.continual.generative_replay")


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
        return {} if self.net is None else dict(self.net.state_dict()), {"shape": list(self.shape)}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        self.shape = tuple(data["shape"])
        if not self.given:
            self.net = self._made(torch.Generator()) if tensors else None
        check_shapes(tensors, {} if self.net is None else self.net.state_dict())
        if self.net is not None:
            self.net.load_state_dict(dict(tensors))


class GenerativeReplay(Distilling):
    """What DGR and RtF share: the networks of the task before, of which one makes up inputs and one labels them.

        L = 1/t L(batch) + (1 - 1/t) L(replayed batch)   in the t-th task

    Inputs are pixels in [0, 1]. Steps must show their batch: learner.step(loss, batch).

    replayed: inputs that are made up for a step; by default `batch_size`.
    Further arguments are those of `Strategy`; the objective is `Classification`.
    """

    traits: ClassVar[tuple[str, ...]] = ("once", "fills the loss")

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, replayed: int | None = None, **options: Any
    ) -> None:
        check_least(replayed=(1 if replayed is None else replayed, 1))
        super().__init__(model, optimizer, **options)
        self.replayed = replayed
        self.again: Tensor | None = None

    @property
    def weight_now(self) -> float:
        """1/t, the weight of the task in hand."""
        return 1 / (self.current + 1)

    def shown(self) -> Tensor:
        """The inputs of the step, in [0, 1]."""
        x: Tensor = self.objective.inputs(self.shown_batch("learns its generator from the inputs")).to(self.device)
        low, high = (float(end) for end in torch.aminmax(x.detach()))
        if not (x.is_floating_point() and 0 <= low <= high <= 1):
            raise ValueError(f"{type(self).__name__} generates pixels in [0, 1], got {x.dtype} in [{low:g}, {high:g}]")
        return x

    def made_up(self, generator: Any, like: Tensor) -> Tensor:
        """Inputs from noise, of the shape of others: x = σ(decode(z)), z ~ N(0, 1)."""
        count = self.replayed or self.batch_size
        z = torch.randn(count, generator.latent, generator=self.generator("replayed")).to(like)
        with torch.no_grad():
            return torch.sigmoid(generator.decode(z)).view(count, *like.shape[1:])

    def bound_of(self, generator: Any, x: Tensor) -> Tensor:
        """Minus the evidence lower bound of every input, per pixel."""

        def seen(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_variance = generator.encode(x)
            noise = torch.randn(mean.shape, generator=self.generator("noise")).to(mean)
            return generator.decode(mean + (0.5 * log_variance).exp() * noise), mean, log_variance

        return Elbo().uncertainty(seen, x, None) / x[0].numel()

    def learn_to_generate(self, generator: Any) -> Tensor:
        """The generator's loss of a step, both batches in one pass: 1/t VAE(batch) + (1 - 1/t) VAE(replayed batch)."""
        shown, again = self.shown(), self.again
        bounds = self.bound_of(generator, shown if again is None else torch.cat([shown, again]))
        loss = self.weight_now * bounds[: len(shown)].mean()
        return loss if again is None else loss + (1 - self.weight_now) * bounds[len(shown) :].mean()

    @torch.no_grad()
    def outputs_before(self, x: Tensor) -> dict[int | None, Tensor]:
        """What the network of the tasks before answers: by task, if it takes the task."""
        tasks = range(self.current) if self.sees_task else [None]
        return {task: self.bound(task, self.teacher)(x) for task in tasks}


class DGR(GenerativeReplay):
    """Deep generative replay: a generator beside the classifier makes up inputs, the classifier of before labels them.

    The generator, a variational autoencoder, learns from the same two batches with the same weights. It is an ordinary
    network with an optimiser of its own; α is the classifier's alone.

    References: Shin et al., Continual Learning with Deep Generative Replay, NeurIPS 2017; van de Ven & Tolias, Three
    scenarios for continual learning, 2019.

    vae: a generator of your own, with `encode`, `decode` and `latent` like a `VAE`, to be given again to a file.
    hidden, latent: otherwise one is made of these widths.
    vae_lr: of its Adam.

    Examples:
        >>> learner = continual.DGR(model, sgd, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    task_state: ClassVar[tuple[str, ...]] = ("vae_before", "vae_optimizer")

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, vae: nn.Module | None = None,
        hidden: Sequence[int] = (400, 400), latent: int = 100, vae_lr: float = 1e-3, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, **options)
        self.hidden, self.latent, self.vae_lr = tuple(hidden), latent, vae_lr
        self.vae = Generator(self.hidden, latent, vae)
        self.parts["generator"] = self.vae
        self.vae_before: nn.Module | None = None
        self.vae_optimizer: Optimizer | None = None

    def begin_task(self) -> None:
        """Copies of both networks."""
        super().begin_task()
        net = self.vae.net
        self.vae_before = None if net is None or not self.current else deepcopy(net).eval()
        self.vae_optimizer = None if net is None else self._adam()

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """The copies have done their work."""
        super().end_task(data, validation, progress)
        self.vae_before = self.vae_optimizer = None

    def _adam(self) -> Optimizer:
        net: Any = self.vae.net
        fused = self.device.type in ("cpu", "cuda")
        return torch.optim.Adam(net.parameters(), lr=self.vae_lr, fused=fused)

    def rehearse(self) -> list[Rehearsal] | None:
        """Inputs that are made up, with the labels that the classifier of before gives them."""
        shown, self.again = self.shown(), None
        self.vae.fit_to(shown, self.generator("generator"))
        if self.vae_before is None:
            return None
        self.again = x = self.made_up(self.vae_before, shown)
        share, found = 1 - self.weight_now, self.outputs_before(x)
        if None not in found:
            own = {t: self.classification.own(outputs, t) for t, outputs in found.items() if t is not None}
            return [Rehearsal((x, of_task.argmax(1)), t, share / len(own)) for t, of_task in own.items()]
        if self.classification.labels == "task":
            return [Rehearsal((x, found[None].argmax(1)), 0, share)]
        answer = self.classification.likeliest([found[None]] * self.current)
        return [Rehearsal((x, answer.label), answer.task, share)]

    def after_step(self) -> None:
        """A step of the generator."""
        net: Any = self.vae.net
        if self.vae_optimizer is None:
            self.vae_optimizer = self._adam()
        net.train()
        self.vae_optimizer.zero_grad()
        self.learn_to_generate(net).backward()  # type: ignore[no-untyped-call]
        self.vae_optimizer.step()


class RtF(GenerativeReplay):
    """Replay through feedback: the classifier sits on the encoder of the generator, so that one network does both.

        L(batch) = cross-entropy + VAE(x),   L(replayed) = T² H(p_before, p) + VAE(x)

    with VAE minus the evidence lower bound per pixel, and p the class probabilities at temperature T: what is made up
    is labelled by the probabilities of the network of before, 0 for the classes of the task in hand. The VAE of both
    batches is this learner's `penalty`.

    Reference: van de Ven & Tolias, Generative replay with feedback connections as a general strategy for continual
    learning, 2018.

    model: model(x) gives the logits of classes; with `encode`, `decode` and `latent`, such as
        `powerprop_paper.models.replay_vae([784, 400, 400], 10)`.
    temperature: T.
    """

    traits: ClassVar[tuple[str, ...]] = ("trains beyond",)

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, temperature: float = 2.0, **options: Any
    ) -> None:
        check_autoencoder("model", model)
        check_between(temperature=(temperature, 0, math.inf))
        super().__init__(model, optimizer, **options)
        self.temperature = temperature

    def rehearse(self) -> list[Rehearsal] | None:
        """Inputs that the network of before makes up, with the probabilities that it gives their classes."""
        shown, self.again = self.shown(), None
        if self.teacher is None:
            return None
        self.again = x = self.made_up(self.teacher, shown)
        found = self.outputs_before(x)
        share = (1 - self.weight_now) / len(found)
        return [
            Rehearsal((x, self._probabilities(outputs)), 0 if task is None else task, share, self._distilled)
            for task, outputs in found.items()
        ]

    def penalty(self) -> Tensor:
        """The generator's part of the loss."""
        return self.learn_to_generate(self.model)

    def _probabilities(self, outputs: Tensor) -> Tensor:
        """Among the classes of the tasks before; where the outputs count those of a task, among all of them."""
        known = torch.ones(outputs.shape[1], dtype=torch.bool, device=outputs.device)
        if self.classification.labels == "stream":
            numbers = [number for own in self.classification.classes[: self.current] for number in own or ()]
            known = torch.zeros_like(known).index_fill_(0, torch.tensor(numbers, device=outputs.device), True)
        outputs = self.classification.compared(outputs.masked_fill(~known, float("-inf")))
        temperature: float = self.option(RtF, "temperature")
        return (outputs / temperature).softmax(1)

    def _distilled(self, model: Any, batch: tuple[Tensor, Tensor], task: int) -> Tensor:
        x, probabilities = batch
        temperature: float = self.option(RtF, "temperature")
        log_p = (self.classification.compared(model(x)) / temperature).log_softmax(1)
        return -(probabilities * log_p).sum(1).mean() * temperature**2
