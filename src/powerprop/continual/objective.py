"""What is learned: a loss to minimise, a score to keep, an answer to give."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from powerprop.continual.data import count_rows
from powerprop.continual.task import Prediction, are_labels, entropy, no_answers

__all__ = [
    "OBJECTIVES", "Called", "Classification", "Elbo", "Function", "Model", "MultiLabel", "Objective", "OneVsRest",
    "Regression", "as_objective", "binary_cross_entropy",
]  # fmt: skip

Model = Callable[..., Any]
"""The network as one task sees it: called as model(x), with the head of the task where there are heads."""

PART = 1000
"""Inputs that are evaluated at a time."""


class Objective:
    """What a network learns. Strategies know its loss and its score and nothing else of it: no classes, no labels.

    A batch is whatever the data yields; (inputs, targets) for the objectives here.
    """

    shared_outputs: bool = True
    """True if outputs mean the same in all tasks, so that one that was never learned can be answered for."""

    mixes_tasks: bool = False
    """True if `loss` takes a batch of examples of several tasks, with a tensor (N,) of their tasks as the task.

    A class with a loss of its own must say so for itself."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "loss" in vars(cls) and "mixes_tasks" not in vars(cls):
            cls.mixes_tasks = False
        if "outputs" not in vars(cls):
            if "inputs" in vars(cls) or "information" in vars(cls):
                cls.outputs = _of_the_inputs  # type: ignore[method-assign]
            elif "loss" in vars(cls):
                cls.outputs = Objective.outputs  # type: ignore[method-assign]

    def begin(self, task: int, classes: Sequence[int] | None) -> None:
        """A task is about to be learned; classes are the numbers of its classes in the stream, if it has any."""

    @abstractmethod
    def loss(self, model: Model, batch: Any, task: int) -> Tensor:
        """What is minimised: the mean over a batch."""

    def score(self, model: Model, data: Iterable[Any], task: int) -> float:
        """How well a task is done, higher is better; it may be negative. By default minus the mean loss."""
        total, count = 0.0, 0
        for batch in data:
            size = count_rows(batch)
            total, count = total + float(self.loss(model, batch, task).detach()) * size, count + size
        return -total / max(1, count)

    def predict(self, model: Model, x: Any, task: int | None) -> Any:
        """The answer for some inputs: by default the outputs of the network; inputs that are no tensor go in as one."""
        if not isinstance(x, Tensor):
            return model(x)
        return torch.cat([model(part) for part in torch.split(x, PART)])

    def outputs(self, model: Model, batch: Any, task: int) -> Any:
        """What the network answers to a batch: by default all that it answers while the loss is computed, or what it
        says to the inputs where a class has `inputs` or `information` of its own."""
        answers: list[Any] = []

        def noted(*inputs: Any, **named: Any) -> Any:
            answers.append(model(*inputs, **named))
            return answers[-1]

        self.loss(Called(model, noted), batch, task)
        return answers

    def uncertainty(self, model: Model, x: Tensor, task: int | None) -> Tensor:
        """How unsure the network of a task is of each input, by which the task of an input is inferred."""
        raise TypeError(f"{type(self).__name__} cannot tell which task an input is of: say predict(x, task)")

    def compared(self, outputs: Any) -> Any:
        """The part of the outputs that the loss looks at: by default all of them."""
        return outputs

    def unused_logits_score(self, model: Model, x: Tensor, task: int | None) -> Tensor:
        """What outputs that stand for nothing say about each input: they are low where it is of the network's task."""
        raise TypeError(f"{type(self).__name__} has no superfluous outputs to tell a task by: use another method")

    def information(self) -> Sequence[Callable[[Model, Any, int], Tensor]]:
        """Functions of (model, batch, task) whose squared gradients, of each input, add up to the Fisher information.

        Of a loss alone it cannot be told: there must be a likelihood, of which the loss need not be the logarithm.
        """
        text = f"the Fisher information of {type(self).__name__} is not known: give the objective an `information`"
        raise TypeError(f"{text}, or say labels='empirical' for squared gradients of the loss as it is")

    def natural(self, outputs: Any) -> Tensor | None:
        """For every input numbers whose squared gradients add up to the Fisher information, if outputs have such."""
        return None

    def inputs(self, batch: Any) -> Tensor:
        """The inputs of a batch."""
        found = batch[0] if isinstance(batch, (tuple, list)) else batch
        if not isinstance(found, Tensor):
            kind = type(self).__name__
            raise TypeError(f"{kind} expects batches (inputs, …) of tensors, got {type(batch).__name__}")
        return found

    def options(self) -> dict[str, Any] | None:
        """The arguments that make this objective again, as plain data; None if that cannot be told."""
        return {}


class Called:
    """A model that is called in another way; its attributes are the model's."""

    def __init__(self, model: Model, call: Callable[..., Any]) -> None:
        self._model, self._call = model, call

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._call(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _of_the_inputs(self: Objective, model: Model, batch: Any, task: int) -> Any:
    return model(self.inputs(batch))


class Function(Objective):
    """Any loss: function(model, batch, task) gives the mean over a batch; the score is minus its mean."""

    def __init__(self, function: Callable[[Model, Any, int], Tensor]) -> None:
        self.function = function

    def loss(self, model: Model, batch: Any, task: int) -> Tensor:
        return self.function(model, batch, task)

    def options(self) -> dict[str, Any] | None:
        return None


class Classification(Objective):
    """One class for every input, learned by cross-entropy; the score is the accuracy.

    labels: what the outputs count: the classes of a "task", or those of the whole "stream". Targets count those of the
        task, from 0.
    label_smoothing: as `torch.nn.functional.cross_entropy` takes it.
    among: the outputs that a class is told from, where they count those of the stream: "all" of them, or those of the
        classes that were "seen" so far, as Hsu et al. (2018) and van de Ven & Tolias (2019) learn them. What a class
        that is yet to come answers is not learned then.

    Examples:
        >>> objective = continual.Classification(label_smoothing=0.1)
        >>> learner = continual.EWC(model, sgd, objective=objective)
    """

    mixes_tasks = True
    outputs = _of_the_inputs

    def __init__(
        self, labels: Literal["task", "stream"] = "task", label_smoothing: float = 0.0,
        among: Literal["all", "seen"] = "all",
    ) -> None:  # fmt: skip
        for name, value, known in (("labels", labels, ("task", "stream")), ("among", among, ("all", "seen"))):
            if value not in known:
                raise ValueError(f"{name} must be {known[0]!r} or {known[1]!r}, got {value!r}")
        if among == "seen" and labels == "task":
            raise ValueError("among='seen' is of outputs that count the classes of the stream, got labels='task'")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
        self.labels, self.label_smoothing, self.shared_outputs = labels, label_smoothing, labels == "task"
        self.among = among
        self.classes: list[tuple[int, ...] | None] = []

    def begin(self, task: int, classes: Sequence[int] | None) -> None:
        if classes is None and self.labels == "stream":
            raise ValueError(f"labels='stream' needs the classes of task {task}: begin({task}, classes=…)")
        self.classes[task:] = [None if classes is None else tuple(classes)]

    def loss(self, model: Model, batch: Any, task: int | Tensor) -> Tensor:
        outputs, y = self._answered(model, batch, task)
        columns = self.columns(self.targets(y, task))
        return F.cross_entropy(self.compared(outputs), columns, label_smoothing=self.label_smoothing)

    def _answered(self, model: Model, batch: Any, task: int | Tensor) -> tuple[Tensor, Tensor]:
        """The outputs to a batch and its labels, if these are labels and there is an output for each."""
        x, y = batch
        if not are_labels(y):
            raise ValueError(f"Classification expects labels that are integers (N,), got {y.dtype} {tuple(y.shape)}")
        outputs = model(x)
        self._check_outputs(outputs.shape[1], task)
        return outputs, y

    def score(self, model: Model, data: Iterable[Any], task: int) -> float:
        right = [self.compared(model(x)).argmax(1) == self.columns(self.targets(y, task)) for x, y in data]
        return float(torch.cat(right).double().mean())

    def predict(self, model: Model, x: Tensor, task: int | None) -> Prediction:
        """The class of every input. Without a task it is read off the class, if the outputs count those of the stream;
        otherwise all tasks share their classes and the task in the answer means nothing."""
        if not len(x):
            return no_answers(x.device)
        logits = super().predict(model, x, task)
        if task is None and self.labels == "stream":
            pairs = [(t, k, number) for t, own in enumerate(self.classes) for k, number in enumerate(own or ())]
            return self.largest(logits[:, self._numbers()], pairs)
        own, task = logits if task is None else self.own(logits, task), task or 0
        label = own.argmax(1)
        return Prediction(torch.full_like(label, task), label, entropy(own), self.numbers(label, task))

    def uncertainty(self, model: Model, x: Tensor, task: int | None) -> Tensor:
        """The entropy of the answer, among the task's own classes or all outputs."""
        outputs = model(x)
        return entropy(outputs if task is None else self.own(outputs, task))

    def unused_logits_score(self, model: Model, x: Tensor, task: int | None) -> Tensor:
        """The log-sum-exp of the outputs beyond the classes, which cross-entropy pushes down on a task's own data."""
        outputs = model(x)
        if self.labels == "stream":
            counted = 1 + max(self._numbers(), default=-1)
        else:
            own = [outputs.shape[1] if each is None else len(each) for each in self.classes]
            counted = max(own, default=outputs.shape[1])
        if outputs.shape[1] <= counted:
            text = f"expected superfluous outputs, more than the {counted} classes, got {outputs.shape[1]} outputs"
            raise ValueError(f"{text}; give the network more, or use 'oneshot', 'binary' or 'exhaustive'")
        return torch.logsumexp(outputs[:, counted:], 1)

    def targets(self, y: Tensor, task: int | Tensor) -> Tensor:
        """Labels of a task, or each of its own, as the outputs count them."""
        if self.labels == "task":
            return y
        if isinstance(task, int):
            return torch.tensor(self.classes_of(task), device=y.device)[y]
        first, numbers = list(accumulate((len(own or ()) for own in self.classes), initial=0)), self._numbers()
        return torch.tensor(numbers, device=y.device)[torch.tensor(first, device=y.device)[task.to(y.device)] + y]

    def compared(self, outputs: Tensor) -> Tensor:
        """The columns of the classes that a class is told from."""
        return outputs[:, self._seen()] if self.among == "seen" else outputs

    def columns(self, numbers: Tensor) -> Tensor:
        """Where classes, as the outputs count them, stand among those that are compared."""
        return torch.searchsorted(numbers.new_tensor(self._seen()), numbers) if self.among == "seen" else numbers

    def classes_of(self, task: int) -> tuple[int, ...] | None:
        """The classes of a task; of one that comes later, those of the last one known."""
        return self.classes[min(task, len(self.classes) - 1)] if self.classes else None

    def own(self, outputs: Tensor, task: int) -> Tensor:
        """The columns of a task's own classes."""
        classes = self.classes_of(task)
        if classes is None:
            return outputs
        return outputs[:, list(classes)] if self.labels == "stream" else outputs[:, : len(classes)]

    def numbers(self, label: Tensor, task: int) -> Tensor:
        """Classes within a task as numbers of the whole stream; the same where the task has none."""
        classes = self.classes_of(task)
        return label if classes is None else torch.tensor(classes, device=label.device)[label]

    def likeliest(self, logits: Sequence[Tensor]) -> Prediction:
        """The class with the largest output among those of all tasks, one head each."""
        return self.largest(torch.cat([self.own(of_task, t) for t, of_task in enumerate(logits)], 1), [
            (t, k, number)
            for t, of_task in enumerate(logits)
            for k, number in enumerate(self.classes_of(t) or range(of_task.shape[1]))
        ])  # fmt: skip

    def _numbers(self) -> list[int]:
        """The classes of all tasks, one task after the other."""
        return [number for own in self.classes for number in own or ()]

    def _seen(self) -> list[int]:
        return sorted(set(self._numbers()))

    def largest(self, logits: Tensor, columns: list[tuple[int, int, int]]) -> Prediction:
        """The class with the largest output; columns: (task, class within it, number in the stream) of every output."""
        tasks, labels, numbers = (torch.tensor(each, device=logits.device) for each in zip(*columns, strict=True))
        best = logits.argmax(1)
        return Prediction(tasks[best], labels[best], entropy(logits), numbers[best])

    def _check_outputs(self, outputs: int, task: int | Tensor) -> None:
        """An error if there are fewer outputs than classes; a GPU's own would take the whole process with it."""
        if not isinstance(task, int):
            return  # of tasks that were learned before, and passed this check
        classes = self.classes_of(task) or ()
        needed = len(classes) if self.labels == "task" else max(classes, default=-1) + 1
        if outputs < needed:
            text = f"task {task} with labels={self.labels!r} needs {needed} outputs for its classes {classes}"
            raise ValueError(f"{text}, the model has {outputs}")

    def options(self) -> dict[str, Any]:
        return {"labels": self.labels, "label_smoothing": self.label_smoothing, "among": self.among}


class OneVsRest(Classification):
    """One class for every input, learned by a sigmoid for each class of its task; the score is the accuracy.

        L(x, y) = -Σ_k [k = y] log σ(f_k(x)) + [k ≠ y] log(1 - σ(f_k(x))),    k the classes of the task

    Outputs of other tasks' classes are left alone. The Fisher information is that of `MultiLabel`.

    labels, among: see `Classification`; among is what an answer is chosen from.
    """

    outputs = _of_the_inputs

    def __init__(self, labels: Literal["task", "stream"] = "task", among: Literal["all", "seen"] = "all") -> None:
        super().__init__(labels, among=among)

    def loss(self, model: Model, batch: Any, task: int) -> Tensor:  # type: ignore[override]
        outputs, y = self._answered(model, batch, task)
        own = self.own(outputs, task)
        return binary_cross_entropy(own, F.one_hot(y.long(), own.shape[1]))

    def natural(self, outputs: Tensor) -> Tensor:
        return _of_sigmoids(self.compared(outputs))

    def options(self) -> dict[str, Any]:
        return {"labels": self.labels, "among": self.among}


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-Σ_k p_k log σ(f_k) + (1 - p_k) log(1 - σ(f_k)), the mean over inputs."""
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="sum") / len(logits)


class Regression(Objective):
    """Numbers for every input, learned by the squared error; the score is minus its mean.

    As means of Gaussians of variance 1 outputs f have the Fisher information E Σ_k (∂f_k)², whatever the targets are.
    """

    mixes_tasks = True
    outputs = _of_the_inputs

    def loss(self, model: Model, batch: Any, task: int | Tensor) -> Tensor:
        x, y = batch
        outputs = model(x)
        if outputs.shape != y.shape:
            raise ValueError(
                f"Regression expects targets like the outputs {tuple(outputs.shape)}, got {tuple(y.shape)}"
            )
        return F.mse_loss(outputs, y)

    def natural(self, outputs: Tensor) -> Tensor:
        return outputs.flatten(1)


class MultiLabel(Objective):
    """Any number of yes-or-no labels for every input, by binary cross-entropy; the score is the fraction right.

    The Fisher information of logits z with probabilities p is E Σ_k p_k (1 - p_k) (∂z_k)².
    """

    mixes_tasks = True
    outputs = _of_the_inputs

    def loss(self, model: Model, batch: Any, task: int | Tensor) -> Tensor:
        x, y = batch
        return F.binary_cross_entropy_with_logits(model(x), y.to(torch.get_default_dtype()))

    def score(self, model: Model, data: Iterable[Any], task: int) -> float:
        right = [((model(x) > 0) == (y > 0.5)).double().mean(1) for x, y in data]
        return float(torch.cat(right).mean())

    def predict(self, model: Model, x: Tensor, task: int | None) -> Tensor:
        """The probability of every label."""
        return torch.sigmoid(super().predict(model, x, task))

    def natural(self, outputs: Tensor) -> Tensor:
        return _of_sigmoids(outputs)


def _of_sigmoids(outputs: Tensor) -> Tensor:
    p = torch.sigmoid(outputs.detach())
    return ((p * (1 - p)).sqrt() * outputs).flatten(1)


class Elbo(Objective):
    """A variational autoencoder's evidence lower bound, of Bernoulli pixels in [0, 1] (Kingma & Welling, 2013).

        L(x) = Σ log p(x|z) - KL(q(z|x) ‖ N(0, 1)),    z ~ q(z|x) = N(μ, σ²)

    The network gives (logits of x, μ, log σ²). The loss is -L, the score L, means over the inputs; targets are ignored.
    """

    mixes_tasks = True
    outputs = _of_the_inputs

    def loss(self, model: Model, batch: Any, task: int | Tensor) -> Tensor:
        return self.uncertainty(model, self.inputs(batch), None).mean()

    def uncertainty(self, model: Model, x: Tensor, task: int | None) -> Tensor:
        """-L of each input: what a network has learned is likely to it."""
        logits, mean, log_variance = model(x)
        pixels = F.binary_cross_entropy_with_logits(logits.flatten(1), x.flatten(1), reduction="none").sum(1)
        divergence: Tensor = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).flatten(1).sum(1)
        return divergence + pixels

    def predict(self, model: Model, x: Tensor, task: int | None) -> Tensor:
        """The inputs as the network sees them again."""
        return torch.cat([torch.sigmoid(model(part)[0]).view_as(part) for part in torch.split(x, PART)])

    def information(self) -> Sequence[Callable[[Model, Any, int], Tensor]]:
        """The bound, which stands for the likelihood of the inputs themselves."""
        return [self.loss]


OBJECTIVES: dict[str, type[Objective]] = {
    kind.__name__: kind for kind in (Classification, OneVsRest, Regression, MultiLabel, Elbo)
}
"""Those that a saved learner can be given again."""


def as_objective(objective: Objective | Callable[[Model, Any, int], Tensor] | None) -> Objective:
    """Classification by default; a plain function of (model, batch, task) is a loss."""
    if objective is None:
        return Classification()
    if isinstance(objective, Objective):
        return objective
    if isinstance(objective, (type, nn.Module)) or not callable(objective):
        raise TypeError(f"objective must be an Objective or a function of (model, batch, task), got {objective!r}")
    return Function(objective)
