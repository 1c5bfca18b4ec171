"""A learner of one task after the other: three calls of a loop, and the verbs in which methods differ."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from powerprop.continual import saving
from powerprop.continual.combine import check_combination, verbs_of
from powerprop.continual.now import Learned, Now, Rehearsal, Stateful
from powerprop.continual.objective import Classification, Model, Objective, as_objective
from powerprop.continual.optimiser import OptimizerFactory, powerprop_of
from powerprop.continual.source import Missing, Source, to_device
from powerprop.continual.task import Task, derived_seed, drawing_from
from powerprop.continual.view import AsTask
from powerprop.eval_mode import evaluating
from powerprop.select import Where
from powerprop.train.fit import LossTally
from powerprop.train.rates import Rates

__all__ = ["Naive", "Progress", "Strategy"]

Progress = Callable[[str, int, float], None]
"""Hears the phase of the work, its step and the mean loss since it last heard."""

HEARD_EVERY = 100
LEAST_SHARE = 1e-6
"""Of the loss, for the task in hand; less is rounding."""
PURPOSES = ("batches", "layers", "weights", "labels", "revived", "layers at the end")
"""Purposes of random numbers that have kept their seeds; those of other names are derived from the name."""


class Strategy:
    """Learns one task after the other. A method overrides some of the verbs; by itself this is naive fine-tuning.

        learner.begin(0)                                  # or learn(task), which makes the same three calls
        for x, y in loader:
            learner.step(F.cross_entropy(model(x), y))
        learner.end(loader)

    Random numbers are drawn from (seed, task, purpose), so that a learner that was saved after a task and loaded goes
    on bit for bit. The optimiser starts every task without memory.

    model: called as model(x), or as model(x, task) if it has heads or takes the task.
    optimizer: makes the base optimiser from a list of parameters; or an optimiser of the model, which this learner
        steps from now on; or a `Powerprop`, which has its α already.
    objective: what is learned: an `Objective`, or a function of (model, batch, task) that gives the loss; by default
        `Classification`.
    alpha: the power of Powerpropagation; 1 is ordinary training.
    steps: of training per task, in `learn`.
    batch_size: inputs per step, in `learn`, unless the data comes in batches.
    seed: of batches, dropout and new weights; the model's own first weights are the caller's.
    heads: the name of the submodule whose child "0", "1", … is the output layer of task 0, 1, …; None is a shared one.
        Heads may be added while learning.
    takes_task: the model takes the task without having heads.
    where: which weights get α; by default those of all layers that multiply their inputs.
    schedule: factor of the learning rate, given the phase ("training", "retraining") and the fraction of it done.
    clip: the largest norm of the gradient while all weights are trained; of a fraction of them, its root times that. A
        new task starts with the large weights of all tasks before it, so that its first gradients can be far larger
        than the later ones.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("steps", "batch_size", "seed", "heads", "takes_task", "clip")
    """The arguments that a saved learner is made of again; each class names its own."""
    FIXED: ClassVar[tuple[str, ...]] = ("seed", "heads", "takes_task")
    """Those of them that a learner must have in common with the file that it takes up."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory | Optimizer,
        *,
        objective: Objective | Callable[[Model, Any, int], Tensor] | None = None,
        alpha: float | None = None,
        steps: int = 1000,
        batch_size: int = 64,
        seed: int = 0,
        heads: str | None = None,
        takes_task: bool = False,
        where: Where | None = None,
        schedule: Callable[[str, float], float] | None = None,
        clip: float | None = None,
    ) -> None:
        for name, number, least in (("steps", steps, 1), ("batch_size", batch_size, 1), ("seed", seed, 0)):
            if number < least:
                raise ValueError(f"{name} must be at least {least}, got {number}")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be a positive norm, got {clip}")
        if heads is not None:
            model.get_submodule(heads)
        self.model, self.steps, self.batch_size, self.seed = model, steps, batch_size, seed
        self.heads, self.takes_task, self.schedule, self.clip = heads, takes_task, schedule, clip
        self.objective = as_objective(objective)
        self.optimizer = powerprop_of(model, optimizer, alpha, where)
        self.parts: dict[str, Stateful] = {}
        self.tasks: list[Learned] = []
        self.records: dict[str, Any] = {}
        self.now: Now | None = None
        self._known = {id(parameter) for parameter in model.parameters()}
        self._rates = Rates(self.optimizer)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_combination(cls)

    # --- the loop: three calls ----------------------------------------------------------------------------------

    def begin(
        self,
        task: int | Task | None = None,
        *,
        classes: Sequence[int] | None = None,
        steps: int | None = None,
        name: str = "",
    ) -> None:
        """Begin the next task: the optimiser forgets what it remembers of the last one.

        task: its number, which must be that of the next one; or the task itself.
        classes: the numbers of its classes in the whole stream, if the objective needs them.
        steps: how many steps there will be, for methods that follow a schedule.
        name: what messages call it.
        """
        if self.now is not None:
            raise RuntimeError(
                f"{self.now.name} is still being learned: call end() before the next begin(), or give_up()"
            )
        index, name = (task.index, task.name) if isinstance(task, Task) else (task, name or f"task {self.current}")
        if index is not None and index != self.current:
            raise ValueError(f"{name}: expected the task with index {self.current}, got {index}")
        classes = task.classes if isinstance(task, Task) else classes
        self.add_heads(self.current + 1, f"{name}: ")
        self._take_up_new_parameters()
        self.objective.begin(self.current, classes)
        self.optimizer.base.state.clear()
        self.model.train()
        self.now = Now(self.current, name, None if classes is None else tuple(classes), steps)
        self._tally = LossTally(self.device)
        try:
            self._act("begin_task")
        except BaseException:
            self.now = None
            raise

    def step(self, loss: Tensor, batch: Any = None, scaler: GradScaler | None = None) -> Tensor:
        """One step: gradients of the loss, of rehearsed batches and of the penalty, then the optimiser's update.

        batch: what the loss is of, for methods that look at the inputs again (LwF).
        scaler: of mixed precision in float16.
        """
        now = self._open("step")
        now.batch = batch
        self.optimizer.zero_grad()
        self.backward(loss, scaler)
        self.update(scaler)
        return loss.detach()

    def backward(self, loss: Tensor, scaler: GradScaler | None = None) -> None:
        """The first half of a step, to be called several times where gradients are accumulated."""
        self._open("backward")
        self._tally.add(loss)
        rehearsals = [each for found in self._act("rehearse") for each in found or ()]
        share = 1.0 - sum(each.share for each in rehearsals)
        if share < LEAST_SHARE:
            shares = [each.share for each in rehearsals]
            raise ValueError(f"rehearsals have shares of {shares} of the loss, which leave none for the task in hand")
        _scaled(loss if share == 1.0 else share * loss, scaler).backward()  # type: ignore[no-untyped-call]
        for batch, task, share, loss_of in rehearsals:
            with self.viewing(task if isinstance(task, int) else None) as model:
                again = (loss_of or self.objective.loss)(model, to_device(batch, self.device), task)
            _scaled(share * again, scaler).backward()  # type: ignore[no-untyped-call]

    def update(self, scaler: GradScaler | None = None) -> None:
        """The second half: the gradients as the methods want them, the penalty, clipping, the optimiser."""
        now = self._open("update")
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        self.after_backward()
        penalties = [term for term in self._act("penalty") if term is not None]
        if penalties:
            torch.stack(penalties).sum().backward()  # type: ignore[no-untyped-call]
        if self.clip is not None and (share := self.trained_share()) > 0:
            self.optimizer.clip_grad_norm_(self.clip * math.sqrt(share))
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        now.step += 1
        self._act("after_step")
        now.batch = None
        if now.step % HEARD_EVERY == 0:
            self._mean = self._tally.take(now.step)

    def end(self, data: Any = None, validation: Any = None, progress: Progress | None = None) -> None:
        """End a task: from now on it is one of those learned.

        data: what it was trained on, as `learn` takes it, for methods that look at it once more: importances,
            memories, retraining.
        validation: data that choices are made on, such as how sparse a sub-network can be; by default the same.
        """
        now = self._open("end")
        self._tally.mean(now.step)
        source = data if isinstance(data, Source) else self.source(data)
        held = source if validation is None else self.source(validation)
        with self._drawing("layers at the end"):
            self.model.eval()
            self._act("end_task", source, held, progress)
        self.tasks.append(Learned(now.name, now.classes))
        self.now = None
        self.model.eval()

    def learn(self, task: Any, progress: Progress | None = None, *, epochs: int | None = None) -> None:
        """Learn the next task: begin, some steps, end.

        task: a `Task`; or its training data as tensors (inputs, targets), a `Dataset` or a `DataLoader`.
        epochs: go through the data so many times, instead of `steps` steps.
        """
        data, validation = (task.train(), task.validation()) if isinstance(task, Task) else (task, None)
        source = self.source(data)
        steps = self.steps if epochs is None else epochs * source.per_epoch()
        try:
            with self._drawing("layers"):
                self.begin(task if isinstance(task, Task) else None, steps=steps)
                self.train(source, steps, progress)
                self.end(source, validation if validation and len(validation.x) else None, progress)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Leave the task in hand without having learned it; the next `begin` is of the same task."""
        self._set_rates("", 0.0)
        self.now = None
        self.model.eval()

    def train(self, source: Source, steps: int, progress: Progress | None = None, phase: str = "training") -> None:
        """Some steps with the batches of a source."""
        now = self._open("train")
        now.phase, now.step, now.steps = phase, 0, steps
        self.model.train()
        for step in range(1, steps + 1):
            self._set_rates(phase, (step - 1) / steps)
            batch = next(source)
            with self.viewing(now.task) as model:
                loss = self.objective.loss(model, batch, now.task)
            self.step(loss, batch)
            if step % HEARD_EVERY == 0 or step == steps:
                mean = self._mean if step % HEARD_EVERY == 0 else self._tally.take(step)
                if progress is not None:
                    progress(phase, step, mean)
        self._set_rates("", 0.0)

    # --- the verbs ----------------------------------------------------------------------------------------------

    def begin_task(self) -> None:
        """Before the first step on a task; `self.now` tells which."""

    def rehearse(self) -> Sequence[Rehearsal] | None:
        """Batches of earlier tasks to train on beside the current one."""

    def penalty(self) -> Tensor | None:
        """A term of the loss that holds on to what was learned; while it is asked for, gradients are the task's own."""

    def after_backward(self) -> None:
        """Between the gradient of the task and that of the penalty: change it here."""

    def after_step(self) -> None:
        """After the update."""

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """After the last step on a task, with its data in a fixed order and the model in evaluation mode."""

    def viewing(self, task: int | None) -> AbstractContextManager[Model]:
        """The network as a task sees it, for as long as the block lasts."""
        return nullcontext(self.bound(task))

    def predict(self, x: Tensor, task: int | None = None) -> Any:
        """What the objective answers: for classification a `Prediction`; a task that is given is not questioned.

        Without a task and with heads, all heads are asked and the class with the largest output wins. A task that comes
        later is answered by the network as it is, which is what forward transfer measures, where outputs mean the same
        in all tasks.
        """
        self._check_task(task)
        if task is None and self.heads is not None:
            return self._over_heads(x.to(self.device))
        with self.viewing(task) as model, evaluating(self.model), torch.no_grad():
            return self.objective.predict(model, x.to(self.device), task)

    def check_predict_options(self, **options: Any) -> None:
        """Further arguments that `predict` does not take are an error, before anything is trained."""
        if options:
            raise TypeError(f"{type(self).__name__}.predict takes the inputs and a task, got also {', '.join(options)}")

    # --- what methods share -------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def current(self) -> int:
        """The number of the task that is being learned, or will be next."""
        return len(self.tasks)

    @property
    def name(self) -> str:
        """What the task in hand is called."""
        return f"task {self.current}" if self.now is None else self.now.name

    def generator(self, purpose: str) -> torch.Generator:
        """Random numbers of the current task for one purpose, which go on from call to call; on the CPU, so that they
        are the same on every machine."""
        made = {} if self.now is None else self.now.generators
        if purpose not in made:
            made[purpose] = torch.Generator().manual_seed(derived_seed(self.seed, self.current, _number(purpose)))
        return made[purpose]

    def source(self, data: Any) -> Source:
        """Data as batches on the model's device; None is an error as soon as a method looks at it."""
        if data is None:
            data = Missing(f"{type(self).__name__} looks at the data of a task when it ends: say end(loader)")
        return Source(data, self.batch_size, lambda: self.generator("batches"), self.device)

    def bound(self, task: int | None) -> Model:
        """The model as a function of the inputs alone."""
        if self.heads is None and not self.takes_task:
            return self.model
        return AsTask(self.model, 0 if task is None else task)

    @torch.no_grad()
    def logits(self, x: Tensor, task: int) -> Any:
        """The plain outputs of the network as a task sees it, in evaluation mode."""
        self._check_task(task)
        with self.viewing(task) as model, evaluating(self.model):
            return Objective.predict(self.objective, model, x.to(self.device), task)

    @torch.no_grad()
    def score(self, data: Any, task: int) -> float:
        """How well the objective says that a task is done."""
        with self.viewing(task) as model, evaluating(self.model):
            return self.objective.score(model, self.source(data).in_order(), task)

    def trained_share(self) -> float:
        """The fraction of the weights that the task in hand trains; heads of other tasks are no part of it."""
        masters = {n: m for n, m in self.optimizer.masters.items() if self.head_of(n) in (None, self.current)}
        trained = {n: m for n, m in masters.items() if m.param.grad is not None}
        moving = sum(m.trained_count() for m in trained.values())
        return moving / max(1, sum(m.param.numel() for m in masters.values()))

    def head_of(self, name: str) -> int | None:
        """The task whose head this name is inside of; None for everything that is shared."""
        if self.heads is None or not name.startswith(f"{self.heads}."):
            return None
        child = name[len(self.heads) + 1 :].partition(".")[0]
        return int(child) if child.isdigit() else None

    def memory_bytes(self) -> int:
        """What the method keeps beyond the model, as it is saved."""
        tensors = (t for part in self.parts.values() for t in part.state()[0].values())
        return sum(t.numel() * t.element_size() for t in tensors)

    def _act(self, verb: str, *arguments: Any) -> list[Any]:
        """Every strategy of this learner does what it does in a verb."""
        kind: Any = type(self)
        return [function(self, *arguments) for function in verbs_of(kind, verb)]

    def _open(self, what: str) -> Now:
        if self.now is None:
            raise RuntimeError(f"{what}() needs a task: call begin() first")
        return self.now

    def _drawing(self, purpose: str) -> AbstractContextManager[None]:
        """Layers that know torch's global generator only (dropout) draw from a seed of the task."""
        return drawing_from(derived_seed(self.seed, self.current, _number(purpose)), self.device)

    def _set_rates(self, phase: str, done: float) -> None:
        """The rates of the schedule; outside of a phase, those of the optimiser."""
        if self.schedule is not None:
            self._rates.scale(self.schedule(phase, done) if phase else 1.0)

    def _over_heads(self, x: Tensor) -> Any:
        if not isinstance(self.objective, Classification):
            kind = type(self.objective).__name__
            raise ValueError(f"predict with {kind} needs the task: every task has an output layer of its own")
        return self.objective.likeliest([self.logits(x, task) for task in range(self.current)])

    def _check_task(self, task: int | None) -> None:
        """An error that names the tasks there are, if this one cannot be answered for."""
        known = self.current + (self.now is not None)
        if not self.tasks and (task is None or not known):
            raise ValueError(f"task must be learned first: none is yet, got {task}")
        limit = known if self.heads is not None or not self.objective.shared_outputs else math.inf
        if task is not None and not 0 <= task < limit:
            raise ValueError(f"task must be in 0..{known - 1} (the tasks learned so far), got {task}")

    def add_heads(self, tasks: int, name: str = "") -> None:
        """Output layers for so many tasks, where the module that has them knows how to `add` one."""
        if self.heads is None:
            return
        heads = self.model.get_submodule(self.heads)
        while len(known := [name for name, _ in heads.named_children() if name.isdigit()]) < tasks:
            if not hasattr(heads, "add"):
                text = f"{name}{self.heads!r} has no head '{tasks - 1}', it has {', '.join(known) or 'none'}"
                raise ValueError(f"{text}; add one before the task begins")
            heads.add(self.generator("head"))  # type: ignore[operator]
        self._take_up_new_parameters()

    def remember(self, tasks: Sequence[tuple[str, Sequence[int] | None]], records: dict[str, Any]) -> None:
        """These are the tasks that were learned, and what was written down about them."""
        self.tasks = [Learned(name, None if own is None else tuple(own)) for name, own in tasks]
        self.records, self.now = dict(records), None
        for number, learned in enumerate(self.tasks):
            self.objective.begin(number, learned.classes)

    def _take_up_new_parameters(self) -> None:
        """Parameters that the model has got since the last task go to the optimiser, at the rate of its first group."""
        new = [p for p in self.model.parameters() if id(p) not in self._known]
        if new:
            self._train_also(new)
            self._known |= {id(parameter) for parameter in new}

    def _train_also(self, parameters: list[nn.Parameter], **settings: Any) -> None:
        """Further parameters, of the model or of the method itself, for the optimiser to train."""
        group = {"params": parameters, "lr": self._rates.given[0], **settings}
        self.optimizer.add_param_group(group)
        self._rates.given.append(group["lr"])

    # --- saving -------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """One safetensors file with JSON in its header, written whole or not at all; no pickle."""
        saving.write_learner(path, *saving.state_of(self))

    def load(self, path: str | Path) -> None:
        """Become the learner that `save` wrote, all of it or nothing; this one must have the same model and arguments.

        `load_learner(path, model)` makes the learner too.
        """
        saving.take_up(self, *saving.read_learner(path))


class Naive(Strategy):
    """Fine-tuning from task to task without any protection: the baseline that forgets."""


def _scaled(loss: Tensor, scaler: GradScaler | None) -> Tensor:
    return loss if scaler is None else scaler.scale(loss)


def _number(purpose: str) -> int:
    """Purposes as numbers: the known ones by their place, others by their name."""
    return PURPOSES.index(purpose) if purpose in PURPOSES else zlib.crc32(purpose.encode())
