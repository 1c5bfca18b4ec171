"""A learner of one task after the other: three calls of a loop, and the verbs in which methods differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from powerprop.continual import saving, stepping
from powerprop.continual.arguments import check_least
from powerprop.continual.asking import check_task, over_heads
from powerprop.continual.combine import act, check_combination
from powerprop.continual.moments import Moments
from powerprop.continual.now import Learned, Now, Rehearsal, Stateful, next_task
from powerprop.continual.objective import Model, Objective, as_objective
from powerprop.continual.optimiser import OptimizerFactory, powerprop_of
from powerprop.continual.parameters import Parameters
from powerprop.continual.seeds import derived_seed, drawing_from, number_of
from powerprop.continual.source import Missing, Source
from powerprop.continual.task import Task
from powerprop.continual.training import Losses, Progress, set_rates, train
from powerprop.continual.view import AsTask
from powerprop.eval_mode import evaluating
from powerprop.select import Where

__all__ = ["Naive", "Progress", "Strategy"]


class Strategy:
    """Learns one task after the other. A method overrides some of the verbs; by itself this is naive fine-tuning.

        learner.begin(0)                                  # or learn(task), which makes the same three calls
        for x, y in loader:
            learner.step(F.cross_entropy(model(x), y))
        learner.end(loader)

    Random numbers are drawn from (seed, task, purpose), so that a learner that was saved after a task and loaded goes
    on bit for bit.

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
    carry: let the optimiser remember (momentum, Adam's moments) from task to task; otherwise it starts every task
        without memory. Adam's moments are small at the end of a task, so that carried ones make the first steps of the
        next large: it forgets more. Published values of several methods are of an optimiser that was never reset.
    schedule: factor of the learning rate, given the phase ("training", "retraining") and the fraction of it done.
    clip: the largest norm of the gradient while all weights are trained; of a fraction of them, its root times that. A
        new task starts with the large weights of all tasks before it, so that its first gradients can be far larger
        than the later ones.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("steps", "batch_size", "seed", "heads", "takes_task", "clip", "carry")
    """The arguments that a saved learner is made of again; each class names its own."""
    FIXED: ClassVar[tuple[str, ...]] = ("seed", "heads", "takes_task", "carry")
    """Those of them that a learner must have in common with the file that it takes up."""

    carries: ClassVar[bool] = True
    """False if every task begins anew, or trains parameters of the method's own: there is nothing to `carry` then."""

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
        carry: bool = False,
        schedule: Callable[[str, float], float] | None = None,
        clip: float | None = None,
    ) -> None:
        check_least(steps=(steps, 1), batch_size=(batch_size, 1), seed=(seed, 0))
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be a positive norm, got {clip}")
        if carry and not self.carries:
            raise ValueError(f"the optimiser of {type(self).__name__} starts every task anew: expected carry=False")
        if heads is not None:
            model.get_submodule(heads)
        self.model, self.steps, self.batch_size, self.seed = model, steps, batch_size, seed
        self.heads, self.takes_task, self.schedule, self.clip, self.carry = heads, takes_task, schedule, clip, carry
        self.objective = as_objective(objective)
        self.optimizer = powerprop_of(model, optimizer, alpha, where)
        self.parts: dict[str, Stateful] = {"moments": Moments(model, self.optimizer)} if carry else {}
        self.tasks: list[Learned] = []
        self.records: dict[str, Any] = {}
        self.now: Now | None = None
        self.parameters = Parameters(model, self.optimizer, heads)

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
        """Begin the next task: the optimiser forgets what it remembers of the last one, unless it is to `carry` it.

        task: its number, which must be that of the next one; or the task itself.
        classes: the numbers of its classes in the whole stream, if the objective needs them.
        steps: how many steps there will be, for methods that follow a schedule.
        name: what messages call it.
        """
        if self.now is not None:
            raise RuntimeError(
                f"{self.now.name} is still being learned: call end() before the next begin(), or give_up()"
            )
        now = next_task(self.current, task, classes, steps, name)
        self.parameters.add_heads(self.current + 1, lambda: self.generator("head"), f"{now.name}: ")
        self.parameters.take_up_new()
        self.objective.begin(self.current, now.classes)
        if not self.carry:
            self.optimizer.base.state.clear()
        self.model.train()
        self.now, self._tally = now, Losses(self.device)
        try:
            act(self, "begin_task")
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
        rehearsals = [each for found in act(self, "rehearse") for each in found or ()]
        stepping.backward(self, loss, rehearsals, scaler)

    def update(self, scaler: GradScaler | None = None) -> None:
        """The second half: the gradients as the methods want them, the penalty, clipping, the optimiser."""
        now = self._open("update")
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        self.after_backward()
        stepping.add_penalties(act(self, "penalty"))
        stepping.clip(self)
        stepping.move(self.optimizer, scaler)
        now.step += 1
        act(self, "after_step")
        now.batch = None
        self._tally.after(now.step)

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
            act(self, "end_task", source, held, progress)
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
        set_rates(self, "", 0.0)
        self.now = None
        self.model.eval()

    def train(self, source: Source, steps: int, progress: Progress | None = None, phase: str = "training") -> None:
        """Some steps with the batches of a source."""
        now = self._open("train")
        now.phase, now.step, now.steps = phase, 0, steps
        train(self, self._tally, source, steps, progress, phase)

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
        check_task(self, task)
        if task is None and self.heads is not None:
            return over_heads(self, x.to(self.device))
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
            made[purpose] = torch.Generator().manual_seed(derived_seed(self.seed, self.current, number_of(purpose)))
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
        check_task(self, task)
        with self.viewing(task) as model, evaluating(self.model):
            return Objective.predict(self.objective, model, x.to(self.device), task)

    @torch.no_grad()
    def score(self, data: Any, task: int) -> float:
        """How well the objective says that a task is done."""
        with self.viewing(task) as model, evaluating(self.model):
            return self.objective.score(model, self.source(data).in_order(), task)

    def trained_share(self) -> float:
        """The fraction of the weights that the task in hand trains; heads of other tasks are no part of it."""
        return self.parameters.trained_share(self.current)

    def head_of(self, name: str) -> int | None:
        """The task whose head this name is inside of; None for everything that is shared."""
        return self.parameters.head_of(name)

    def memory_bytes(self) -> int:
        """What the method keeps beyond the model, as it is saved."""
        own = (part for name, part in self.parts.items() if name != "moments")  # of the optimiser, not of the method
        tensors = (t for part in own for t in part.state()[0].values())
        return sum(t.numel() * t.element_size() for t in tensors)

    def _open(self, what: str) -> Now:
        if self.now is None:
            raise RuntimeError(f"{what}() needs a task: call begin() first")
        return self.now

    def _drawing(self, purpose: str) -> AbstractContextManager[None]:
        """Layers that know torch's global generator only (dropout) draw from a seed of the task."""
        return drawing_from(derived_seed(self.seed, self.current, number_of(purpose)), self.device)

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
