"""GPM and OWM: a new task moves weights only in directions that the inputs of earlier tasks do not have."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from powerprop.continual.data import Source, in_pieces, take_rows
from powerprop.continual.freezing import SharedFreezer
from powerprop.continual.layers import inputs_noted, joined, loose_layers, own_layers, patches, put, warn_of_loose
from powerprop.continual.strategy import OptimizerFactory, Progress, Strategy, check_least, refuse_alpha

__all__ = ["GPM", "OWM", "Projection"]

PART = 256
"""Inputs that go through the network at a time."""


class Directions:
    """One matrix for every layer: a basis of what to keep (GPM), or a projector onto the rest (OWM).

    loose: the layers that cannot be seen, which are held.
    """

    def __init__(self) -> None:
        self.matrix: dict[str, Tensor] = {}
        self.loose: list[str] = []

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return dict(self.matrix), {"loose": self.loose}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        self.matrix = {name: matrix.clone() for name, matrix in tensors.items()}
        self.loose = list(data["loose"])


class Projection(Strategy):
    """What GPM and OWM share: steps of the linear and convolutional layers that all tasks share are projected.

        ΔW ← ΔW P,    P x ≈ 0 for the inputs x that the layer had in earlier tasks, so that (W + ΔW) x ≈ W x

    What is projected is the step that the optimiser takes, not only the gradient, so that momentum, decay and the
    scaling of Adam leave no trace in the directions to be kept; for SGD it is the same. That happens in the optimiser,
    whatever loop calls its `step`. A bias is the weight of an input that is always 1, and is projected with the others.
    Everything else (norms, embeddings, grouped and other layers, and those that are used by other ways than their own
    `forward`, as attention does) is trained with the first task only, every head with its own.

    α > 1 is refused: it multiplies each entry of a step by its own slope, which leads out of any subspace.
    """

    traits: ClassVar[tuple[str, ...]] = ("once", "rewrites weights", "sees layers", "starts anew")

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, **options: Any) -> None:
        reason = "a projected step does not stay in its subspace"
        refuse_alpha(type(self), optimizer, options.get("alpha"), reason)
        super().__init__(model, optimizer, **options)
        refuse_alpha(type(self), self.optimizer, None, reason)  # groups may have an alpha of their own
        kinds = own_layers(model, (nn.Linear, nn.Conv2d))
        self.layers: dict[str, Any] = {n: m for n, m in kinds.items() if self.head_of(f"{n}.") is None}
        if not self.layers:
            raise ValueError("the model has no linear or two-dimensional convolutional layer that tasks share")
        self.directions = Directions()
        self.parts["directions"] = self.directions
        self.freezer: SharedFreezer = SharedFreezer(model, self.optimizer, self.head_of)
        self._unprojected: dict[str, Tensor] = {}
        self._hook_up()

    def _hook_up(self) -> None:
        self.optimizer.register_step_pre_hook(self._remember_weights)
        self.optimizer.register_step_post_hook(self._project_step)

    @abstractmethod
    def project(self, name: str, rows: Tensor) -> Tensor:
        """Rows of a layer's weight, with the bias as a last entry, in the directions that may be changed."""

    @abstractmethod
    def learn_directions(self, data: Source) -> None:
        """Add the inputs that layers have in the task in hand to what is kept."""

    def begin_task(self) -> None:
        """Layers move in free directions, everything else stays; in the first task all is free."""
        self.freezer.hold(self._projected(), self.current)

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """What the layers see now is kept from now on; a layer that cannot be seen is held."""
        self._hold_loose(data)
        with torch.no_grad():
            self.learn_directions(data)
        self.freezer.hold(self._projected(), None)

    def settle(self) -> None:
        """A copy holds the same in its own model."""
        super().settle()
        self._hook_up()

    def _hold_loose(self, data: Source) -> None:
        row = take_rows(next(data.in_order()), torch.zeros(1, dtype=torch.long))
        model, task = self.bound(self.current), self.current
        found = loose_layers(lambda: self.objective.outputs(model, row, task), self.layers).items()
        loose = {n: how for n, how in found if n not in self.directions.loose}
        loose = {n: how for n, how in loose.items() if n not in self.directions.matrix or "outside" in how}
        warn_of_loose(self.name, loose)
        self.directions.loose += loose

    def _projected(self) -> set[str]:
        seen = [name for name in self.layers if name not in self.directions.loose]
        return {f"{name}.{kind}".lstrip(".") for name in seen for kind in ("weight", "bias")}

    def _remember_weights(self, *_: Any) -> None:
        known = set(self.directions.matrix) - set(self.directions.loose)
        self._unprojected = {name: joined(layer) for name, layer in self.layers.items() if name in known}

    @torch.no_grad()
    def _project_step(self, *_: Any) -> None:
        for name, before in self._unprojected.items():
            layer = self.layers[name]
            put(layer, before + self.project(name, joined(layer) - before))
        self._unprojected = {}

    def _matrix(self, name: str, like: Tensor) -> Tensor:
        """The matrix of a layer where the layer is."""
        self.directions.matrix[name] = self.directions.matrix[name].to(like.device)
        return self.directions.matrix[name].to(like.dtype)

    def _noting(self, batch: Any) -> dict[str, list[Tensor]]:
        """What goes into each layer in one pass, as (rows, places, entries) for each of its calls."""
        noted: dict[str, list[Tensor]] = {}
        with inputs_noted(self.layers, lambda name, found: noted.setdefault(name, []).append(found)):
            self.objective.outputs(self.bound(self.current), batch, self.current)
        return {n: [patches(self.layers[n], each) for each in found] for n, found in noted.items()}


class GPM(Projection):
    """Gradient projection memory (Saha et al. 2021): a basis U of what layers see, grown task by task.

        R = inputs of a layer,    ‖R̂_k‖² + ‖UUᵀR‖² ≥ ε‖R‖²,    g ← g - gUUᵀ

    After a task the leading left singular vectors of R - UUᵀR join U: as few as hold a fraction ε of the squared length
    of all inputs. They are found from RRᵀ, so that no R is kept.

    threshold: ε of the first task, for all layers or by name.
    growth: what is added to ε with every task.
    samples: so many inputs of a task, evenly spaced, stand for all of them; fewer than twice as many are taken.
    Further arguments are those of `Strategy`.

    Examples:
        >>> learner = continual.GPM(model, sgd, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *,
        threshold: float | Mapping[str, float] = 0.97, growth: float = 0.003, samples: int = 300, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, **options)
        self.threshold = dict(threshold) if isinstance(threshold, Mapping) else threshold
        self.growth, self.samples = growth, samples
        check_least(samples=(samples, 1), growth=(growth, 0))
        for name in self.layers:
            if not 0 < (epsilon := self._threshold(name)) <= 1:
                raise ValueError(f"threshold must be in (0, 1], got {epsilon} for {name!r}")

    def _threshold(self, name: str) -> float:
        """ε of a layer in the task in hand."""
        if not isinstance(self.threshold, dict):
            return self.threshold + self.growth * self.current
        if name not in self.threshold:
            raise ValueError(f"threshold has no number for the layer {name!r}, only for {', '.join(self.threshold)}")
        return self.threshold[name] + self.growth * self.current

    def project(self, name: str, rows: Tensor) -> Tensor:
        """g - gUUᵀ."""
        basis = self._matrix(name, rows)
        return rows - rows @ basis @ basis.T

    def after_backward(self) -> None:
        """The gradient is projected too, lest an optimiser scale its steps by directions that they cannot take."""
        for name, layer in self.layers.items():
            if name in self.directions.matrix and layer.weight.grad is not None:
                put(layer, self.project(name, joined(layer, gradient=True)), gradient=True)

    def learn_directions(self, data: Source) -> None:
        """Gram matrices of all layers in one pass over some of the data, then the new directions of each."""
        gram: dict[str, Tensor] = {}
        for batch in (part for some in data.some_rows(self.option(GPM, "samples")) for part in in_pieces(some, PART)):
            for name, found in self._noting(batch).items():
                seen = torch.cat([each.flatten(0, 1) for each in found]).double()
                gram[name] = gram.get(name, 0.0) + seen.T @ seen
        for name, each in gram.items():
            basis = self.directions.matrix.get(name, each.new_zeros(len(each), 0)).to(each)
            self.directions.matrix[name] = grown(basis, each, min(1.0, self._threshold(name))).float().contiguous()


class OWM(Projection):
    """Orthogonal weights modification (Zeng et al. 2019): a projector for every layer, by recursive least squares.

        k = P x̄,    P ← P - k kᵀ / (α_i + x̄ᵀ k),    ΔW ← ΔW P,    α_i = α_0 λ^(i/n)

    When a task ends, x̄ goes through the means of its n batches, of each place of an image by itself; all together
    P = I - A(AᵀA + αI)⁻¹Aᵀ if A has them as columns and α stays.

    ridge: α_0, how little one mean counts.
    decay: λ, by which α falls in the course of a task's batches.
    Further arguments are those of `Strategy`; `batch_size` is also that of the means.

    Examples:
        >>> learner = continual.OWM(model, sgd, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, ridge: float = 0.9, decay: float = 0.001,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, **options)
        if not ridge > 0:
            raise ValueError(f"ridge must be positive, got {ridge}")
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {decay}")
        self.ridge, self.decay = ridge, decay

    def project(self, name: str, rows: Tensor) -> Tensor:
        """ΔW P."""
        return rows @ self._matrix(name, rows)

    def learn_directions(self, data: Source) -> None:
        """The means of all batches, then the recursion of each layer."""
        means: dict[str, list[Tensor]] = {}
        for batch in (part for each in data.in_order() for part in in_pieces(each, self.batch_size)):
            for name, found in self._noting(batch).items():
                means.setdefault(name, []).append(torch.cat([each.double().mean(0) for each in found]))
        decay = self.option(OWM, "decay")
        for name, columns in means.items():
            size = columns[0].shape[-1]
            P = self.directions.matrix.get(name, torch.eye(size)).to(columns[0])
            for i, mean in enumerate(columns):
                P = without(P, mean, self.ridge * decay ** (i / len(columns)))
            self.directions.matrix[name] = P.float().contiguous()


def grown(basis: Tensor, gram: Tensor, fraction: float) -> Tensor:
    """An orthonormal basis with as many leading eigenvectors of what it misses of RRᵀ as hold a fraction of it."""
    rest = torch.eye(len(gram)).to(gram) - basis @ basis.T
    values, vectors = torch.linalg.eigh(rest @ gram @ rest)
    values, total = values.flip(0).clamp(min=0), gram.trace()
    covered = total - values.sum() + torch.cat([values.new_zeros(1), values.cumsum(0)])
    count = min(int((covered < fraction * total).sum()), len(gram) - basis.shape[1])
    both = torch.cat([basis, vectors.flip(1)[:, :count]], 1)
    return torch.linalg.qr(both).Q if count else basis


def without(P: Tensor, means: Tensor, ridge: float) -> Tensor:
    """P - K(αI + RᵀK)⁻¹Kᵀ, K = PR: the recursion for the rows of `means` (the columns of R) at once."""
    K = P @ means.T
    inner = ridge * torch.eye(len(means)).to(P) + means @ K
    removed: Tensor = K @ torch.linalg.solve(inner, K.T)
    return P - removed
