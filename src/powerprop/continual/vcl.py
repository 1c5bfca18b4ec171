"""Variational continual learning: a distribution over every weight, and what was learned is the prior of what comes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.now import Rehearsal
from powerprop.continual.objective import Classification, Model
from powerprop.continual.optimiser import OptimizerFactory
from powerprop.continual.strategy import Strategy
from powerprop.continual.view import wearing

__all__ = ["VCL", "gaussian_divergence"]


def gaussian_divergence(mean: Tensor, log_variance: Tensor, prior_mean: Tensor, prior_log_variance: Tensor) -> Tensor:
    """KL(N(μ, σ²) ‖ N(m, s²)) = Σ ½ (log s²/σ² + (σ² + (μ - m)²)/s² - 1)."""
    ratio = log_variance - prior_log_variance
    distance = (mean - prior_mean).square() * (-prior_log_variance).exp()
    return 0.5 * (ratio.exp() - ratio + distance - 1).sum()


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
    Further arguments are those of `Strategy`.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("examples", "samples", "log_variance", "prior_variance", "likelihood_steps")
    PUBLISHED: ClassVar[dict[str, dict[str, Any]]] = {
        name: {
            "samples": 10,
            "log_variance": -6.0,
            "prior_variance": 1.0,
            "reference": "Nguyen et al., 2018, arXiv:1710.10628; first means by maximum likelihood",
        }
        for name in ("permuted-mnist/domain-incremental", "split-mnist/task-incremental")
    }

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, examples: int, samples: int = 10,
        log_variance: float = -6.0, prior_variance: float = 1.0, likelihood_steps: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, **options)
        for name, value, least in (("examples", examples, 1), ("samples", samples, 1), ("likelihood_steps", likelihood_steps, 0)):  # fmt: skip
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not prior_variance > 0:
            raise ValueError(f"prior_variance must be positive, got {prior_variance}")
        self.examples, self.samples, self.likelihood_steps = examples, samples, likelihood_steps
        self.log_variance, self.prior_variance = log_variance, prior_variance
        self.log_variances: dict[str, nn.Parameter] = {}
        self.parts["posterior"] = self
        self._prior: dict[str, tuple[Tensor, Tensor]] = {}
        self._drawn = False

    # --- the verbs ----------------------------------------------------------------------------------------------

    def begin_task(self) -> None:
        """What was learned is the prior; weights that no task has used yet have the first one."""
        weights, first = self._weights(), torch.tensor(math.log(self.prior_variance), device=self.device)
        known = {n: (weights[n].detach().clone(), v.detach().clone()) for n, v in self.log_variances.items()}
        new = {n: torch.full_like(w, self.log_variance) for n, w in weights.items() if n not in known}
        self._add({n: v for n, v in new.items() if (self.head_of(n) or 0) <= self.current})
        self._prior = {n: known.get(n, (torch.zeros_like(first), first)) for n in self.log_variances}
        self._drawn = False

    @contextmanager
    def viewing(self, task: int | None) -> Iterator[Model]:
        """While a task is trained a network drawn from q; otherwise the mean of some."""
        if self.now is None or not torch.is_grad_enabled():
            yield _Mean(self, task)
        elif self._finding_means():
            yield self.bound(task)
        else:
            self._drawn = True
            with wearing(self.model, self.draw(self.generator("weights of steps"))):
                yield self.bound(task)

    def rehearse(self) -> Sequence[Rehearsal] | None:
        """The same batch for as many further networks, each with the same share."""
        now = self._open("rehearse")
        if self.samples == 1 or self._finding_means():
            return None
        if now.batch is None:
            raise ValueError(f"VCL with samples={self.samples} looks at the batch so often: say step(loss, batch)")
        return [Rehearsal(now.batch, now.task, 1 / self.samples)] * (self.samples - 1)

    def penalty(self) -> Tensor | None:
        """KL(q_t ‖ q_{t-1}) / examples, over the weights that the task uses."""
        if self._finding_means():
            return None
        if not self._drawn:
            raise RuntimeError(
                "VCL trains weights that are drawn: compute the loss inside `with learner.viewing(task) as model:`"
            )
        weights, self._drawn = self._weights(), False
        terms = [
            gaussian_divergence(weights[name], log_variance, *self._prior[name])
            for name, log_variance in self.log_variances.items()
            if weights[name].grad is not None
        ]
        return torch.stack(terms).sum() / self.examples if terms else None

    # --- the distribution ---------------------------------------------------------------------------------------

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Weights w = μ + σε; the noise is drawn on the CPU, so that it is the same everywhere."""
        weights = self._weights()
        noise = {n: torch.randn(v.shape, generator=generator).to(v) for n, v in self.log_variances.items()}
        return {n: weights[n] + (0.5 * v).exp() * noise[n] for n, v in self.log_variances.items()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The logarithms of the variances; the means are the model's weights."""
        return {name: each.detach() for name, each in self.log_variances.items()}, {}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self._add(
            {n: torch.empty_like(w) for n, w in self._weights().items() if n in tensors.keys() - self.log_variances}
        )
        with torch.no_grad():
            for name, each in self.log_variances.items():
                each.copy_(tensors[name] if name in tensors else torch.full_like(each, self.log_variance))

    def _add(self, new: dict[str, Tensor]) -> None:
        """More variances, for the optimiser to train; decay would pull their logarithms to 0, which is a variance of 1."""
        if new:
            made = {name: nn.Parameter(each) for name, each in new.items()}
            decay = {"weight_decay": 0.0} if "weight_decay" in self.optimizer.defaults else {}
            self.optimizer.add_param_group({"params": list(made.values()), "lr": self._rates[0], **decay})
            self._rates.append(self._rates[0])
            self.log_variances |= made

    def _weights(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def _finding_means(self) -> bool:
        return self.current == 0 and self.now is not None and self.now.step < self.likelihood_steps


class _Mean:
    """The mean of the answers of some networks, the same ones for all inputs; attributes are the model's."""

    def __init__(self, learner: VCL, task: int | None) -> None:
        self._learner, self._model = learner, learner.bound(task)
        self._seed = learner.generator("weights of answers").initial_seed()

    def __call__(self, *inputs: Any) -> Any:
        generator, found = torch.Generator().manual_seed(self._seed), []
        for _ in range(self._learner.samples):
            with wearing(self._learner.model, self._learner.draw(generator)):
                found.append(self._model(*inputs))
        if isinstance(self._learner.objective, Classification):
            return torch.stack([each.log_softmax(1) for each in found]).logsumexp(0) - math.log(len(found))
        if isinstance(found[0], Tensor):
            return torch.stack(found).mean(0)
        return type(found[0])(torch.stack(parts).mean(0) for parts in zip(*found, strict=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
