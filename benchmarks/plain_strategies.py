"""EWC, SI, PackNet and EfficientPackNet as one would write them in a script: no wrapper, no safety, nothing saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Data(NamedTuple):
    """Inputs and labels."""

    x: Tensor
    y: Tensor


class Plain:
    """Naive training; the methods add to it."""

    def __init__(self, model: nn.Module, factory: Factory, steps: int, batch: int, grid: Sequence[float]) -> None:
        self.model, self.factory, self.steps, self.batch, self.grid = model, factory, steps, batch, grid
        self.generator = torch.Generator().manual_seed(0)
        self.named = dict(model.named_parameters())
        self.weights = {n: p for n, p in self.named.items() if p.ndim > 1}

    def learn(self, data: Data, held_out: Data) -> None:
        self.train(data, self.steps)

    def train(self, data: Data, steps: int) -> None:
        optimizer = self.factory(list(self.model.parameters()))
        for _ in range(steps):
            rows = torch.randint(len(data.x), (self.batch,), generator=self.generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(self.model(data.x[rows]), data.y[rows])
            (loss + self.penalty()).backward()
            self.before_step()
            optimizer.step()
            self.after_step()

    def penalty(self) -> Tensor | float:
        return 0.0

    def before_step(self) -> None:
        pass

    def after_step(self) -> None:
        pass

    def accuracy(self, data: Data) -> float:
        with torch.no_grad():
            return float((self.model(data.x).argmax(1) == data.y).float().mean())


class PlainEWC(Plain):
    """λ/2 Σ F (θ - θ*)², F from the squared gradients of single images."""

    fisher: dict[str, Tensor] | None = None
    anchor: dict[str, Tensor]

    def penalty(self) -> Tensor | float:
        if self.fisher is None:
            return 0.0
        return 5.0 * sum((self.fisher[n] * (p - self.anchor[n]).square()).sum() for n, p in self.named.items())

    def learn(self, data: Data, held_out: Data) -> None:
        super().learn(data, held_out)
        fisher = {n: torch.zeros_like(p) for n, p in self.named.items()}
        for x in data.x.split(1):
            logits = self.model(x)
            label = torch.multinomial(logits.detach().softmax(1), 1, generator=self.generator).squeeze(1)
            self.model.zero_grad()
            F.cross_entropy(logits, label).backward()
            for n, p in self.named.items():
                fisher[n] += p.grad.square() / len(data.x)
        self.fisher, self.anchor = fisher, {n: p.detach().clone() for n, p in self.named.items()}


class PlainSI(Plain):
    """ω += -g·Δθ along the way, Ω += ω / (Δ² + ξ) at its end."""

    importance: dict[str, Tensor] | None = None
    anchor: dict[str, Tensor]

    def penalty(self) -> Tensor | float:
        if self.importance is None:
            return 0.0
        return sum((self.importance[n] * (p - self.anchor[n]).square()).sum() for n, p in self.named.items())

    def before_step(self) -> None:
        self.gradients = {n: p.grad.clone() for n, p in self.named.items()}
        self.before = {n: p.detach().clone() for n, p in self.named.items()}

    def after_step(self) -> None:
        for n, p in self.named.items():
            self.path[n] -= self.gradients[n] * (p.detach() - self.before[n])

    def learn(self, data: Data, held_out: Data) -> None:
        self.path = {n: torch.zeros_like(p) for n, p in self.named.items()}
        start = {n: p.detach().clone() for n, p in self.named.items()}
        super().learn(data, held_out)
        found = {n: self.path[n] / ((p.detach() - start[n]).square() + 0.1) for n, p in self.named.items()}
        old = self.importance or {n: torch.zeros_like(p) for n, p in self.named.items()}
        self.importance = {n: old[n] + found[n].relu() for n in found}
        self.anchor = {n: p.detach().clone() for n, p in self.named.items()}


class PlainPackNet(Plain):
    """Train the free weights, keep the largest half of them, train these again; gradients are masked."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.free = {n: torch.ones_like(p, dtype=torch.bool) for n, p in self.weights.items()}
        self.trained = self.free

    def before_step(self) -> None:
        for n, p in self.weights.items():
            p.grad *= self.trained[n]

    def learn(self, data: Data, held_out: Data) -> None:
        self.trained = self.free
        self.train(data, self.steps)
        self.choose(held_out)
        self.train(data, self.steps // 2)
        self.free = {n: free & ~self.trained[n] for n, free in self.free.items()}

    def choose(self, held_out: Data) -> None:
        self.trained = {n: free & self.largest(self.weights[n] * free, 0.5) for n, free in self.free.items()}
        with torch.no_grad():
            for n, p in self.weights.items():
                p[self.free[n] & ~self.trained[n]] = 0

    @staticmethod
    def largest(values: Tensor, share: float) -> Tensor:
        size = values.detach().abs().flatten()
        mask = torch.zeros_like(size, dtype=torch.bool)
        mask[size.topk(int(share * size.numel())).indices] = True
        return mask.view(values.shape)


class PlainEfficientPackNet(PlainPackNet):
    """The sparsest global mask that keeps γ of the accuracy; reused weights cost nothing."""

    def choose(self, held_out: Data) -> None:
        whole = {n: p.detach().clone() for n, p in self.weights.items()}
        wanted = 0.95 * self.accuracy(held_out)
        best = None
        for share in self.grid:
            masks = self.ranked(whole, share)
            with torch.no_grad():
                for n, p in self.weights.items():
                    p.copy_(whole[n] * masks[n])
            if self.accuracy(held_out) < wanted:
                break
            best = masks
        best = best or self.ranked(whole, self.grid[0])
        with torch.no_grad():
            for n, p in self.weights.items():
                p.copy_(whole[n] * best[n])
        self.trained = {n: best[n] & self.free[n] for n in best}

    def ranked(self, weights: dict[str, Tensor], share: float) -> dict[str, Tensor]:
        flat = torch.cat([w.flatten() for w in weights.values()])
        parts = self.largest(flat, share).split([w.numel() for w in weights.values()])
        return {n: part.view(w.shape) for (n, w), part in zip(weights.items(), parts, strict=True)}


PLAIN: dict[str, type[Plain]] = {
    "EWC": PlainEWC,
    "SI": PlainSI,
    "PackNet": PlainPackNet,
    "EfficientPackNet": PlainEfficientPackNet,
}
