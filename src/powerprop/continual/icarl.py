"""iCaRL: exemplars of every class that stand for its mean in feature space, by which the network answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from powerprop.continual.data import Source, join_rows, take_rows, to_device
from powerprop.continual.layers import inputs_noted
from powerprop.continual.lwf import Distilling, running_statistics_kept
from powerprop.continual.objective import PART, Classification, Model, Objective, OneVsRest, binary_cross_entropy
from powerprop.continual.replay import Replay
from powerprop.continual.strategy import OptimizerFactory, Progress, Rehearsal, TaskId, check_between
from powerprop.continual.task import Prediction, are_labels, no_answers
from powerprop.eval_mode import evaluating

__all__ = ["ICaRL", "features_of", "herd", "linear_layers", "same_tensors"]


def linear_layers(network: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers by name; a network without any is an error."""
    found = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    if not found:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in network.modules()}))
        raise ValueError(f"features are what goes into the last nn.Linear: expected one in the model, got {kinds}")
    return found


@torch.no_grad()
def features_of(network: nn.Module, model: Model, x: Tensor) -> Tensor:
    """What goes into the last linear layer that gives the outputs, each row divided by its length.

    model: the network as a function of the inputs alone, in evaluation mode.
    """
    layers, noted, found = linear_layers(network), list[tuple[str, Tensor]](), []
    with inputs_noted(layers, lambda name, inputs: noted.append((name, inputs))):
        for part in torch.split(x, PART):
            outputs = model(part).shape[1]
            name, inputs = noted[-1] if noted else ("none that is called", part)
            if not noted or layers[name].out_features != outputs:
                last = f"{name!r} with {layers[name].out_features} outputs" if noted else "none that is called"
                text = f"expected it to give the {outputs} outputs of the model, got {last}"
                raise ValueError(f"features are what goes into the last nn.Linear: {text}")
            found.append(F.normalize(inputs.flatten(1)))
            noted.clear()
    return torch.cat(found)


def herd(features: Tensor, count: int | None) -> Tensor:
    """Rows whose running means stay as near as can be to the mean μ of all, each taken once (Rebuffi et al., 2017,
    algorithm 4):

        p_k = argmin_x ‖μ - (φ(x) + Σ_{j<k} φ(p_j)) / k‖

    count: how many; None is all of them, as they come.
    """
    if count is None:
        return torch.arange(len(features))
    features = features.double().cpu()
    mean, half = features.mean(0), features.square().sum(1) / 2
    total, chosen = torch.zeros_like(mean), list[int]()
    for k in range(1, min(count, len(features)) + 1):
        nearness = features @ (k * mean - total) - half  # -k²/2 times the squared distance, up to a constant
        nearness[chosen] = -torch.inf
        chosen.append(int(nearness.argmax()))
        total = total + features[chosen[-1]]
    return torch.tensor(chosen)


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """The same names with the same values, on the same devices."""
    pairs = [(tensor, other.get(name)) for name, tensor in one.items()]
    return len(one) == len(other) and all(
        b is not None and (a.device, a.dtype) == (b.device, b.dtype) and torch.equal(a, b) for a, b in pairs
    )


ClassMeans = dict[tuple[int, int], Tensor]
"""By task and class within it."""


class ICaRL(Distilling, Replay):
    """Incremental classifier and representation learning (Rebuffi et al., CVPR 2017).

        L(x, y) = Σ_{k new} BCE(f_k(x), [k = y]) + Σ_{k old} BCE(f_k(x), σ(f_k(x; θ_old)))

    for the batch and for exemplars of earlier classes, θ_old the weights before the task. When a task ends `memory` is
    divided among all classes so far: lists of earlier ones are cut from their ends, each new one gets the examples that
    herding chooses. Without a task the answer is the class whose mean is nearest,

        argmin_c ‖φ(x) - μ_c‖,    φ the input of the last linear layer, μ_c the mean of the exemplars', both of length 1

    with the network as it is when it is asked; `predict(x, by="head")` is the answer of the outputs.

    A `Classification` is learned as `OneVsRest`; one of your own by its own loss. In a loop of one's own take the loss
    from `learner.objective`, and show the batch: learner.step(loss, batch). Classes of other tasks are others, unless
    tasks share their outputs (labels of a "task", no heads): then exemplars are learned by their labels.

    memory: exemplars of all classes together; None keeps all data.
    loss_weight: of the loss that exemplars have.
    Further arguments are those of `Replay`.

    Examples:
        >>> learner = continual.ICaRL(model, sgd, memory=100, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    traits: ClassVar[tuple[str, ...]] = ("once", "fills memory", "asks before")

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *,
        objective: Objective | Callable[[Model, Any, int], Tensor] | None = None, loss_weight: float = 0.5,
        **options: Any,
    ) -> None:  # fmt: skip
        linear_layers(model)
        check_between(loss_weight=(loss_weight, 0, 1))
        super().__init__(model, optimizer, objective=_one_vs_rest(objective), **options)
        self.loss_weight = loss_weight
        self._means: tuple[list[Tensor], dict[str, Tensor], ClassMeans] | None = None

    # --- learning -----------------------------------------------------------------------------------------------

    def begin_task(self) -> None:
        """The network as it is now says what earlier classes are to answer."""
        now = self._open("begin_task")
        self._quota(len(self.exemplars()) + len(now.classes or (0,)))
        Distilling.begin_task(self)

    def rehearse(self) -> list[Rehearsal] | None:
        """Exemplars of all earlier classes; the batch must be there, and features to be found."""
        batch = self.shown_batch("looks at the inputs of a step again")
        if not self._open("rehearse").step:
            self.features(self.objective.inputs(batch)[:1], self.current)
        if self.teacher is None:
            return None
        rows = self.drawn()
        return [Rehearsal(self.buffer.batch(rows), self.buffer.tasks[rows], self.loss_weight, self._of_exemplars)]

    def penalty(self) -> Tensor | None:
        """What earlier classes answered to the batch in hand."""
        if self.teacher is None:
            return None
        x = self.objective.inputs(to_device(self._open("penalty").batch, self.device))
        with running_statistics_kept(self.model):
            old, _ = self._logits(self.model, x)
        return (1 - self.loss_weight) * self._as_before(old, x)

    def _of_exemplars(self, model: Model, batch: Any, tasks: Tensor) -> Tensor:
        x, y = batch
        old, new = self._logits(self.model, x)
        targets = torch.zeros_like(new)
        if not self.sees_task:
            numbers = self.classification.targets(y, tasks)
            targets = numbers[:, None] == torch.tensor(self._outputs_of(self.current, new.shape[1])).to(numbers)
        return self._as_before(old, x) + binary_cross_entropy(new, targets)

    def _as_before(self, old: Tensor, x: Tensor) -> Tensor:
        assert self.teacher is not None
        with torch.no_grad():
            before, _ = self._logits(self.teacher, x)
        return binary_cross_entropy(old, before.sigmoid())

    def _logits(self, network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of the classes of earlier tasks, and of those of the task in hand."""
        tasks = range(self.current + 1)
        if self.sees_task:
            of_tasks = [self.classification.own(self.bound(t, network)(x), t) for t in tasks]
            return torch.cat(of_tasks[:-1], 1), of_tasks[-1]
        outputs = network(x)
        *earlier, new = (self._outputs_of(t, outputs.shape[1]) for t in tasks)
        old = dict.fromkeys(column for own in earlier for column in own if column not in new)
        return outputs[:, list(old)], outputs[:, new]

    def _outputs_of(self, task: int, outputs: int) -> list[int]:
        """The outputs of a task's own classes, where all tasks have one output layer."""
        own = self.classification.classes_of(task)
        if own is None:
            return list(range(outputs))
        return list(own if self.classification.labels == "stream" else range(len(own)))

    # --- exemplars ----------------------------------------------------------------------------------------------

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """All classes get their part of the memory; the task's data is held in memory meanwhile."""
        batch = join_rows(list(data.in_order()))
        x, y = batch
        if not are_labels(y):
            raise ValueError(f"ICaRL keeps exemplars of classes: expected labels (N,), got {y.dtype} {tuple(y.shape)}")
        features, labels, lists = self.features(x, self.current).cpu(), y.cpu(), self.exemplars()
        new = [(labels == label).nonzero()[:, 0] for label in sorted(set(labels.tolist()))]
        quota = self._quota(len(lists) + len(new))
        kept = torch.cat([rows[:quota] for rows in lists.values()] or [torch.arange(0)])
        chosen = torch.cat([rows[herd(features[rows], quota)] for rows in new])
        self.buffer.put_behind(kept, take_rows(batch, chosen), self.current)
        Distilling.end_task(self, data, validation, progress)

    def exemplars(self) -> dict[tuple[int, int], Tensor]:
        """Rows of the memory by task and class within it, in the order in which herding chose them."""
        if not len(self.buffer):
            return {}
        tasks, labels = self.buffer.tasks, self.buffer.columns[1].cpu()
        pairs = sorted(set(zip(tasks.tolist(), labels.tolist(), strict=True)))
        return {(t, k): ((tasks == t) & (labels == k)).nonzero()[:, 0] for t, k in pairs}

    def _quota(self, classes: int) -> int | None:
        """Exemplars of each class; None is all there are."""
        if self.memory is not None and self.memory < classes:
            raise ValueError(f"memory={self.memory} has no room for one exemplar of each of {classes} classes")
        return None if self.memory is None else self.memory // classes

    # --- features and answers -----------------------------------------------------------------------------------

    def features(self, x: Tensor, task: int | None = None) -> Tensor:
        """What goes into the last linear layer, in evaluation mode, each row divided by its length."""
        with self.viewing(task) as model, evaluating(self.model):
            return features_of(self.model, model, to_device(x, self.device))

    def class_means(self) -> ClassMeans:
        """The mean of each class's exemplars in feature space, of length 1, with the network as it is now."""
        known, weights = self._means, self.model.state_dict()
        if known is None or known[0] is not self.buffer.columns or not same_tensors(weights, known[1]):
            found = {
                (task, label): F.normalize(self.features(self.buffer.batch(rows)[0], task).mean(0), dim=0)
                for (task, label), rows in self.exemplars().items()
            }
            known = self.buffer.columns, {name: each.clone() for name, each in weights.items()}, found
            self._means = known
        return known[2]

    def predict(self, x: Any, task: TaskId | None = None, *, by: Literal["means", "head"] | None = None) -> Prediction:
        """The class with the nearest mean, of all or of the task; or what the outputs say.

        by: by default "means" without a task and "head" with one. The entropy of the first is that of
            softmax(-‖φ(x) - μ_c‖²).
        """
        self.check_predict_options(by=by)
        place = self.place_of(task)
        if by == "head" or (by is None and place is not None):
            found: Prediction = super().predict(x, task)
            return found
        means = {pair: mean for pair, mean in self.class_means().items() if place in (None, pair[0])}
        if not means:
            raise ValueError(f"by='means' needs exemplars, which are chosen when a task ends; {task!r} has none yet")
        return self._nearest(x, means) if len(x) else no_answers(self.device)

    def check_predict_options(self, **options: Any) -> None:
        """By what to answer is the one option."""
        by = options.pop("by", None)
        super().check_predict_options(**options)
        if by not in (None, "means", "head"):
            raise ValueError(f"by must be 'means' or 'head', got {by!r}")

    def _nearest(self, x: Tensor, means: ClassMeans) -> Prediction:
        seen = {task: task if self.sees_task else None for task, _ in means}
        features = {view: self.features(x, view) for view in set(seen.values())}
        scores = [-(features[seen[task]] - mean).square().sum(1) for (task, _), mean in means.items()]
        classes = self.classification.classes_of
        return self.classification.largest(
            torch.stack(scores, 1), [(t, k, (classes(t) or range(k + 1))[k]) for t, k in means]
        )


def _one_vs_rest(objective: Any) -> Any:
    """A `Classification` as iCaRL learns it; kinds of one's own stay as they are."""
    objective = Classification() if objective is None else objective
    if not isinstance(objective, Classification):
        return objective  # which is refused with the others
    if objective.label_smoothing:
        found = objective.label_smoothing
        raise ValueError(f"ICaRL learns labels as they are: expected label_smoothing=0, got {found}")
    return OneVsRest(objective.labels, objective.among) if type(objective) is Classification else objective
