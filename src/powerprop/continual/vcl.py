"""Variational continual learning: a distribution over every weight, and what was learned is the prior of what comes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.data import Source
from powerprop.continual.layers import check_protect, protected, swapped_parameters
from powerprop.continual.objective import Classification, Model
from powerprop.continual.strategy import OptimizerFactory, Progress, Rehearsal, Strategy, check_least

__all__ = ["VCL", "Posterior", "gaussian_divergence"]


def gaussian_divergence(mean: Tensor, log_variance: Tensor, prior_mean: Tensor, prior_log_variance: Tensor) -> Tensor:
    """KL(N(μ, σ²) ‖ N(m, s²)) = Σ ½ (log s²/σ² + (σ² + (μ - m)²)/s² - 1)."""
    ratio = log_variance - prior_log_variance
    distance = (mean - prior_mean).square() * (-prior_log_variance).exp()
    return 0.5 * (ratio.exp() - ratio + distance - 1).sum()


class Posterior:
    """The distribution of the weights: means are the model's, the logarithms of the variances are here.

    Those of a weight that no task has used yet are made when one begins, and count as learned when it ends.
    """

    trained = True
    """Steps change it, so that a task which diverges must be taken back."""

    def __init__(self, learner: Strategy, protect: list[str] | None = None) -> None:
        self.learner, self.protect = learner, protect
        self.log_variance: dict[str, nn.Parameter] = {}
        self.learned: set[str] = set()

    def means(self) -> dict[str, nn.Parameter]:
        """The weights of the model that are trained and have a distribution."""
        return {n: p for n, p in protected(self.learner.model, self.protect).items() if p.requires_grad}

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Weights w = μ + σε; the noise is drawn on the CPU, so that it is the same everywhere."""
        known = [(n, mean, self.log_variance[n]) for n, mean in self.means().items() if n in self.log_variance]
        noise = [torch.randn(mean.shape, generator=generator).to(mean) for _, mean, _ in known]
        return {name: mean + (0.5 * v).exp() * each for (name, mean, v), each in zip(known, noise, strict=True)}

    def add(self, names: Collection[str]) -> None:
        """Variances for the optimiser to train; without decay, which would pull them to a variance of 1."""
        new = {n: nn.Parameter(torch.zeros_like(p)) for n, p in self.means().items() if n in names}
        new = {n: each for n, each in new.items() if n not in self.log_variance}
        if new:
            decay = {"weight_decay": 0.0} if "weight_decay" in self.learner.optimizer.defaults else {}
            self.learner.add_parameters(list(new.values()), **decay)
            self.log_variance |= new

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {n: each.detach() for n, each in self.log_variance.items() if n in self.learned}, {}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        self.learned = set(tensors)
        self.add(self.learned)
        for name, each in tensors.items():
            self.log_variance[name].detach().copy_(each)


class VCL(Strategy):
    """Variational continual learning, without a coreset (Nguyen et al., 2018).

        min  -E_q[log p(D_t|w)] + KL(q_t(w) ‖ q_{t-1}(w)),    q_t = Π_i N(μ_i, σ_i²),    q_0 = N(0, prior_variance)

    The weights of the model are the means μ, whatever their α; the logarithms of σ² are beside them and trained by the
    same optimiser, without weight decay. The loss is seen through sampled weights w = μ + σε, drawn anew each time:

        with learner.viewing(t) as model:
            loss = F.cross_entropy(model(x), y)
        learner.step(loss, (x, y))

    Answers are means over sampled networks, always the same ones: of probabilities for `Classification`, of outputs
    otherwise.

    examples: the number of inputs of a task. The loss is their mean, so the divergence counts 1/examples. Where tasks
        differ in size, set `learner.examples` before each begins.
    samples: networks that are drawn in each step, and for each answer. With more than one in training, the batch must
        be shown: step(loss, batch).
    log_variance: of q where training begins.
    prior_variance: of the first prior.
    likelihood_steps: so many first steps of the first task find the means by maximum likelihood alone.
    protect: name patterns of the parameters that have a distribution, such as `"shared.*"`; by default all. The others
        are trained as they are.
    Further arguments are those of `Strategy`.

    Examples:
        >>> learner = continual.VCL(model, sgd, examples=len(x), steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    traits: ClassVar[tuple[str, ...]] = ("once", "fills the loss", "starts anew")
    task_state: ClassVar[tuple[str, ...]] = ("_prior_mean", "_prior_log_variance", "examples")

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, examples: int, samples: int = 10,
        log_variance: float = -6.0, prior_variance: float = 1.0, likelihood_steps: int = 0,
        protect: str | Sequence[str] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, **options)
        check_least(examples=(examples, 1), samples=(samples, 1), likelihood_steps=(likelihood_steps, 0))
        if not prior_variance > 0:
            raise ValueError(f"prior_variance must be positive, got {prior_variance}")
        self.examples, self.samples, self.likelihood_steps = examples, samples, likelihood_steps
        self.log_variance, self.prior_variance = log_variance, prior_variance
        self.protect = check_protect(model, protect)
        self.posterior = Posterior(self, self.protect)
        self.parts["posterior"] = self.posterior
        self._prior_mean: dict[str, Tensor] = {}
        self._prior_log_variance: dict[str, Tensor] = {}
        self._drawn = False

    # --- the verbs ----------------------------------------------------------------------------------------------

    def begin_task(self) -> None:
        """What was learned is the prior; weights that no task has used yet have the first one."""
        posterior, means = self.posterior, self.posterior.means()
        used = [n for n in means if (self.head_of(n) or 0) <= self.current]
        posterior.add(used)
        first = torch.zeros((), device=self.device), torch.tensor(math.log(self.prior_variance), device=self.device)
        self._prior_mean, self._prior_log_variance = (dict.fromkeys(used, each) for each in first)
        self._drawn = False
        for name, each in posterior.log_variance.items():
            if name in posterior.learned:
                self._prior_mean[name] = means[name].detach().clone()
                self._prior_log_variance[name] = each.detach().clone()
            else:
                each.detach().fill_(self.log_variance)

    @contextmanager
    def viewing(self, task: int | None) -> Iterator[Model]:
        """While a task is trained a network drawn from q; otherwise the mean of some."""
        if self.now is None or not torch.is_grad_enabled():
            yield _Mean(self, task)
        elif self._finding_means():
            yield self.bound(task)
        else:
            self._drawn = True
            with swapped_parameters(self.model, self.posterior.draw(self.generator("weights of steps"))):
                yield self.bound(task)

    def rehearse(self) -> Sequence[Rehearsal] | None:
        """The same batch for as many further networks, each with the same share."""
        now = self._open("rehearse")
        if self._finding_means():
            return None
        if not self._drawn:
            text = "VCL trains weights that are drawn: compute the loss inside"
            raise RuntimeError(f"{text} `with learner.viewing({now.task}) as model:`")
        samples = self.option(VCL, "samples")
        if samples > 1 and now.batch is None:
            raise ValueError(f"VCL with samples={samples} looks at the batch so often: say step(loss, batch)")
        return [Rehearsal(now.batch, now.task, 1 / samples)] * (samples - 1)

    def penalty(self) -> Tensor | None:
        """KL(q_t ‖ q_{t-1}) / examples, over the weights that the task uses."""
        if self._finding_means():
            return None
        means = self.posterior.means()
        terms = [
            gaussian_divergence(means[name], log_variance, self._prior_mean[name], self._prior_log_variance[name])
            for name, log_variance in self.posterior.log_variance.items()
            if means[name].grad is not None
        ]
        return torch.stack(terms).sum() / self.examples if terms else None

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The logarithms of the variances."""
        return self.posterior.log_variance

    def after_step(self) -> None:
        """The next loss must be of a network drawn anew."""
        self._drawn = False

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """From now on these weights have a distribution that was learned."""
        self.posterior.learned |= self.posterior.log_variance.keys()
        self._prior_mean, self._prior_log_variance = {}, {}

    def _finding_means(self) -> bool:
        return self.current == 0 and self.now is not None and self.now.step < self.likelihood_steps


class _Mean:
    """The mean of the answers of some networks, the same ones for all inputs; attributes are the model's."""

    def __init__(self, learner: VCL, task: int | None) -> None:
        self._learner, self._model = learner, learner.bound(task)
        self._seed = learner.generator("weights of answers").initial_seed()

    def __call__(self, *inputs: Any) -> Any:
        generator, found = torch.Generator().manual_seed(self._seed), []
        for _ in range(self._learner.option(VCL, "samples")):
            with swapped_parameters(self._learner.model, self._learner.posterior.draw(generator)):
                found.append(self._model(*inputs))
        if isinstance(self._learner.objective, Classification):
            return torch.stack([each.log_softmax(1) for each in found]).logsumexp(0) - math.log(len(found))
        if isinstance(found[0], Tensor):
            return torch.stack(found).mean(0)
        return type(found[0])(torch.stack(parts).mean(0) for parts in zip(*found, strict=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
