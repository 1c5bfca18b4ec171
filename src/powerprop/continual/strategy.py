"""The one loop over tasks, and what a method says in it: six verbs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from powerprop.continual.saving import (
    below,
    check_settings,
    check_shapes,
    load_weights,
    read_learner,
    weights,
    write_learner,
)
from powerprop.continual.task import Prediction, Task, derived_seed, drawing_from, entropy, no_answers
from powerprop.data.batches import Batches
from powerprop.data.images import Part
from powerprop.entries import count
from powerprop.modes import in_parts
from powerprop.optim import Powerprop
from powerprop.select import Where
from powerprop.train.fit import LossTally

__all__ = ["Learned", "OptimizerFactory", "Progress", "Stateful", "Strategy"]

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes the base optimiser: `lambda params: torch.optim.SGD(params, lr=0.1)`."""

Progress = Callable[[str, int, float], None]
"""Hears the phase of the work, its step and the mean loss since it last heard."""

HEARD_EVERY = 100
BATCHES, LAYERS, WEIGHTS, DRAWN_LABELS, REVIVED = range(5)
"""Purposes of random numbers; each has a generator of its own for every task."""


class Stateful(Protocol):
    """A part of a method whose state is saved with the learner: masks, importances, a memory."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None: ...


class Learned(NamedTuple):
    """What is remembered of a task: its name and the numbers of its classes in the stream."""

    name: str
    classes: tuple[int, ...]


class Strategy:
    """Learns one task after the other; by itself it is naive fine-tuning, which forgets.

    A method overrides some of six verbs: `begin_task`, `loss`, `after_backward`, `after_step`, `end_task`, `predict`.
    Random numbers are drawn from (seed, task, purpose), so that a learner that was saved after a task and loaded goes
    on bit for bit. The optimiser starts every task without memory.

    model: called as model(x), or as model(x, task) if it has heads.
    optimizer: makes the base optimiser from a list of parameters.
    alpha: the power of Powerpropagation; 1 is ordinary training.
    steps: of training per task.
    batch_size: inputs per step.
    seed: of batches, dropout and new weights; the model's own first weights are the caller's.
    labels: what the outputs count: the classes of a "task", or those of the whole "stream".
    heads: the name of the submodule whose child "0", "1", … is the output layer of task 0, 1, …; None is a shared one.
    where: which weights get α; by default those of all linear, convolutional and attention layers.
    schedule: factor of the learning rate, given the phase ("training", "retraining") and the fraction of it done.
    clip: the largest norm of the gradient while all weights are trained; of a fraction of them, its root times that. A
        new task starts with the large weights of all tasks before it, so that its first gradients can be far larger
        than the later ones.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        *,
        alpha: float = 1.0,
        steps: int = 1000,
        batch_size: int = 64,
        seed: int = 0,
        labels: Literal["task", "stream"] = "task",
        heads: str | None = None,
        where: Where | None = None,
        schedule: Callable[[str, float], float] | None = None,
        clip: float | None = None,
    ) -> None:
        for name, number, least in (("steps", steps, 1), ("batch_size", batch_size, 1), ("seed", seed, 0)):
            if number < least:
                raise ValueError(f"{name} must be at least {least}, got {number}")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be a positive norm, got {clip}")
        if labels not in ("task", "stream"):
            raise ValueError(f"labels must be 'task' or 'stream', got {labels!r}")
        if heads is not None:
            model.get_submodule(heads)
        self.model, self.steps, self.batch_size, self.seed = model, steps, batch_size, seed
        self.labels, self.heads, self.schedule, self.clip = labels, heads, schedule, clip
        self.optimizer = Powerprop(optimizer(list(model.parameters())), model, alpha, where)
        if self.optimizer.asks_for_closure:
            kind = type(self.optimizer.base).__name__
            raise TypeError(f"optimizer must step from one gradient, but {kind} asks for a closure")
        self.parts: dict[str, Stateful] = {}
        self.tasks: list[Learned] = []
        self.records: dict[str, Any] = {}
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._classes: tuple[int, ...] = ()

    # --- the loop -----------------------------------------------------------------------------------------------

    def learn(self, task: Task, progress: Progress | None = None) -> None:
        """Learn the next task of the stream."""
        with drawing_from(derived_seed(self.seed, self.current, LAYERS), self.device):
            self.open_task(task)
            batches = self.batches(task.train())
            self.train(batches, self.steps, progress)
            self.close_task(task, batches, progress)

    def open_task(self, task: Task) -> None:
        """Begin a task: the optimiser forgets what it remembers of the last one."""
        if task.index != self.current:
            raise ValueError(f"{task.name}: expected the task with index {self.current}, got {task.index}")
        self._check_head(task)
        self._classes = tuple(task.classes)
        self.optimizer.base.state.clear()
        self.model.train()
        self.begin_task(task)

    def close_task(self, task: Task, batches: Batches, progress: Progress | None = None) -> None:
        """End a task: from now on it is one of those learned."""
        self.end_task(task, batches, progress)
        self.tasks.append(Learned(task.name, tuple(task.classes)))
        self._classes = ()
        self.model.eval()

    def batches(self, part: Part) -> Batches:
        """Endless batches of a task's data, the same whenever this task is learned."""
        size = min(self.batch_size, len(part.x))
        return Batches(part.x, part.y, size, self.generator(BATCHES))

    def train(self, batches: Batches, steps: int, progress: Progress | None = None, phase: str = "training") -> None:
        """Some steps of the loop, in which four of the verbs have their place."""
        tally = LossTally(self.device)
        for step in range(1, steps + 1):
            self._set_rates(phase, (step - 1) / steps)
            tally.add(self.step(*next(batches)))
            if step % HEARD_EVERY == 0 or step == steps:
                mean = tally.take(step)
                if progress is not None:
                    progress(phase, step, mean)
        self._set_rates("", 0.0)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss, gradient and update for one batch; returns the loss."""
        self.optimizer.zero_grad()
        loss = self.loss(x.to(self.device), y.to(self.device))
        loss.backward()  # type: ignore[no-untyped-call]
        self.after_backward()
        if self.clip is not None:
            self._clip(self.clip)
        self.optimizer.step()
        self.after_step()
        return loss.detach()

    def _clip(self, norm: float) -> None:
        """Frozen weights take no part: their gradients grow with every task and would leave nothing for the others.

        The norm that is allowed falls with the root of the fraction of weights that is trained, so that a weight moves
        no farther when it is one of few: otherwise each task has larger weights than the one before.
        """
        masters = self.optimizer.masters.values()
        for master in masters:
            master.confine_gradient()
        moving = [m for m in masters if m.param.grad is not None]
        trained = sum(m.param.numel() if m.trainable is None else count(m.trainable) for m in moving)
        share = trained / sum(m.param.numel() for m in masters)
        nn.utils.clip_grad_norm_(self.model.parameters(), norm * math.sqrt(share))

    def _set_rates(self, phase: str, done: float) -> None:
        """The rates of the schedule; outside of a phase, those of the optimiser."""
        if self.schedule is not None:
            factor = self.schedule(phase, done) if phase else 1.0
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor

    # --- the six verbs ------------------------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """Before the first step on a task."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """What is minimised on a batch: the cross-entropy of the current task."""
        outputs = self.outputs(x, self.current)
        self._check_outputs(outputs.shape[1])
        return F.cross_entropy(outputs, self.targets(y))

    def after_backward(self) -> None:
        """Between the gradient and the update: gradients may be changed or dropped here."""

    def after_step(self) -> None:
        """After the update."""

    def end_task(self, task: Task, batches: Batches, progress: Progress | None = None) -> None:
        """After the last step on a task: consolidate it. batches goes on where training stopped."""

    def predict(self, x: Tensor, task: int | None = None) -> Prediction:
        """The task and the class within it of every input; a task that is given is not questioned.

        Without a task it is read off the class if the outputs count the classes of the stream; otherwise all tasks
        share their classes and the task in the answer means nothing. A task that comes later is answered by the network
        as it is, which is what forward transfer measures, if the outputs count the classes of a task.
        """
        self._check_task(task)
        if not len(x):
            return no_answers(self.device)
        logits = self.logits(x, task)
        if task is not None:
            logits = self.own_classes(logits, task)
        elif self.labels == "stream":
            return self._of_stream(logits)
        label = logits.argmax(1)
        return Prediction(torch.full_like(label, task or 0), label, entropy(logits))

    def check_how(self, **how: Any) -> None:
        """Further arguments that `predict` does not take are an error, before anything is trained."""
        if how:
            raise TypeError(f"{type(self).__name__}.predict takes the inputs and a task, got also {', '.join(how)}")

    # --- what methods share -------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def current(self) -> int:
        """The number of the task that is being learned, or will be next."""
        return len(self.tasks)

    def generator(self, purpose: int) -> torch.Generator:
        """Random numbers of the current task for one purpose; on the CPU, the same on every machine."""
        return torch.Generator().manual_seed(derived_seed(self.seed, self.current, purpose))

    def outputs(self, x: Tensor, task: int) -> Tensor:
        """The model as it is now."""
        return self.model(x) if self.heads is None else self.model(x, task)  # type: ignore[no-any-return]

    def targets(self, y: Tensor) -> Tensor:
        """Labels of the current task as the outputs count them."""
        return y if self.labels == "task" else torch.tensor(self._classes, device=y.device)[y]

    def logits(self, x: Tensor, task: int | None) -> Tensor:
        """The outputs of the model as it is now, in evaluation mode."""
        return in_parts(self.model, lambda part: self.outputs(part, 0 if task is None else task), x)

    def own_classes(self, logits: Tensor, task: int) -> Tensor:
        """The columns of a task's own classes."""
        classes = self.tasks[task].classes if task < len(self.tasks) else self._classes or self.tasks[-1].classes
        return logits[:, list(classes)] if self.labels == "stream" else logits[:, : len(classes)]

    def _check_task(self, task: int | None) -> None:
        """An error that names the tasks there are, if this one cannot be answered for."""
        known = self.current + bool(self._classes)  # the one that is being learned has classes too
        if not self.tasks and (task is None or not known):
            raise ValueError(f"task must be learned first: none is yet, got {task}")
        if task is not None and not 0 <= task < (known if self.labels == "stream" else math.inf):
            raise ValueError(f"task must be in 0..{known - 1} (the tasks learned so far), got {task}")

    def _check_outputs(self, outputs: int) -> None:
        """An error if there are fewer outputs than classes; a GPU's own would take the whole process with it."""
        needed = len(self._classes) if self.labels == "task" else max(self._classes, default=-1) + 1
        if outputs < needed:
            text = f"task {self.current} with labels={self.labels!r} needs {needed} outputs for its classes"
            raise ValueError(f"{text} {self._classes}, the model has {outputs}")

    def _check_head(self, task: Task) -> None:
        if self.heads is None:
            return
        heads = [name for name, _ in self.model.get_submodule(self.heads).named_children()]
        if str(self.current) not in heads:
            raise ValueError(f"{task.name}: {self.heads!r} has no head '{self.current}', it has {', '.join(heads)}")

    def _of_stream(self, logits: Tensor) -> Prediction:
        pairs = [(t, label, number) for t, task in enumerate(self.tasks) for label, number in enumerate(task.classes)]
        tasks, labels, numbers = (torch.tensor(column, device=logits.device) for column in zip(*pairs, strict=True))
        known = logits[:, numbers]
        best = known.argmax(1)
        return Prediction(tasks[best], labels[best], entropy(known))

    # --- saving -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that was learned, as tensors and as plain data, with that of the method's own parts."""
        tensors = weights(self.model, self.optimizer)
        data = {**self.settings(), "tasks": [list(task) for task in self.tasks], "records": self.records}
        for name, part in self.parts.items():
            own, data[name] = part.state()
            tensors |= {f"{name}/{key}": tensor for key, tensor in own.items()}
        return tensors, data

    def settings(self) -> dict[str, Any]:
        """What a saved learner and the one that takes it up must have in common, besides the model."""
        own = {"method": type(self).__name__, "alpha": self.optimizer.alpha, "seed": self.seed}
        alphas = {name: master.alpha for name, master in self.optimizer.masters.items()}  # of groups with their own
        return own | {"labels": self.labels, "heads": self.heads, "alphas": alphas}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Take up what `state` gave, in a learner made with the same arguments; all of it or nothing."""
        check_settings(data, self.settings())
        now, plain = self.state()
        check_shapes(*({n: t for n, t in each.items() if n.startswith(("model/", "phi/"))} for each in (tensors, now)))
        before = {n: t.clone() for n, t in now.items()}
        try:
            self._take(tensors, data)
        except Exception:
            self._take(before, plain)
            raise
        self.model.eval()

    def _take(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        load_weights(self.model, self.optimizer, tensors)
        self.tasks = [Learned(name, tuple(classes)) for name, classes in data["tasks"]]
        self.records, self._classes = dict(data["records"]), ()
        for name, part in self.parts.items():
            part.load_state(below(name, tensors), data[name])

    def save(self, path: str | Path) -> None:
        """One safetensors file with JSON in its header, written whole or not at all; no pickle."""
        write_learner(path, *self.state())

    def load(self, path: str | Path) -> None:
        """Become the learner that `save` wrote; this one must have the same model and arguments."""
        self.load_state(*read_learner(path))
