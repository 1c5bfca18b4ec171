"""A learner of one task after the other: three calls of a loop, and the verbs in which methods differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from powerprop.continual import saving, stepping
from powerprop.continual.arguments import check_least
from powerprop.continual.asking import over_heads, place_of
from powerprop.continual.combine import act, check_combination, having
from powerprop.continual.moments import Moments
from powerprop.continual.now import Learned, Now, Rehearsal, Stateful, TaskId, next_task
from powerprop.continual.objective import Model, Objective, as_objective
from powerprop.continual.optimiser import OptimizerFactory, guarded, powerprop_of
from powerprop.continual.owner import check_owner, claim
from powerprop.continual.parameters import Parameters
from powerprop.continual.seeds import derived_seed, drawing_from, number_of
from powerprop.continual.source import Missing, Source, to_device
from powerprop.continual.task import Task
from powerprop.continual.training import Losses, Progress, set_rates, train
from powerprop.continual.view import AsTask
from powerprop.eval_mode import evaluating
from powerprop.optim import Rate
from powerprop.select import Where
from powerprop.tensorfiles import content_of
from powerprop.training import NonFiniteError

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
    rate: "matched" or "paper", as for `Powerprop`; matched unless said otherwise.
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

    keeps_answers: ClassVar[bool] = False
    """True if earlier tasks answer as before, to the bit, because weights are held for them."""
    rewrites: ClassVar[bool] = False
    """True if weights are written to past the masks of the optimiser."""
    fixed_weights: ClassVar[bool] = False
    """True if no weight is trained."""
    acts_on_weights: ClassVar[bool] = False
    """True if gradients or moves of weights are what the method is about."""
    once: ClassVar[bool] = False
    """True if a task cannot be learned again after others."""
    fills_memory: ClassVar[bool] = False
    """True if it says itself when examples go into the memory, and what with them."""
    sees_layers: ClassVar[bool] = False
    """True if what goes into layers is looked at, or changed, while the network answers."""
    trains_beyond: ClassVar[bool] = False
    """True if layers are trained that no answer of the network needs."""
    asks_before: ClassVar[bool] = False
    """True if the network as it is, and as it was, is asked about the classes of all tasks at once."""
    fills_the_loss: ClassVar[bool] = False
    """True if what is rehearsed leaves no room for another rehearsal."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory | Optimizer,
        *,
        objective: Objective | Callable[[Model, Any, int], Tensor] | None = None,
        alpha: float | None = None,
        rate: Rate | None = None,
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
        self._model, self.steps, self.batch_size, self.seed = model, steps, batch_size, seed
        self.heads, self.takes_task, self.schedule, self.clip, self.carry = heads, takes_task, schedule, clip, carry
        self.objective = as_objective(objective)
        self.optimizer = powerprop_of(model, optimizer, alpha, where, rate)
        self.parts: dict[str, Stateful] = {"moments": Moments(model, self.optimizer)} if carry else {}
        self.tasks: list[Learned] = []
        self.visits = 0
        self.records: dict[str, Any] = {}
        self.now: Now | None = None
        self.parameters = Parameters(model, self.optimizer, heads)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_combination(cls)

    # --- the loop: three calls ----------------------------------------------------------------------------------

    def begin(
        self,
        task: TaskId | Task | None = None,
        *,
        classes: Sequence[int] | None = None,
        steps: int | None = None,
        name: str = "",
        again: bool = False,
    ) -> None:
        """Begin the next task: the optimiser forgets what it remembers of the last one, unless it is to `carry` it.

        task: what it is called from now on, a number or a name, by default its place in the order of learning, which
            is what models with heads, and the verbs, know it by; or the task itself.
        classes: the numbers of its classes in the whole stream, if the objective needs them.
        steps: how many steps there will be, for methods that follow a schedule.
        name: what messages call it.
        again: a task that was learned before is visited once more, with the head that it has.
        """
        if self.now is not None:
            raise RuntimeError(
                f"{self.now.name} is still being learned: call end() before the next begin(), or give_up()"
            )
        claim(self._model, self)
        self.check_model()
        now = next_task(self.tasks, task, classes, steps, name, again)
        if again and (once := having(type(self), "once")):
            raise ValueError(f"{now.name}: {once[0]} does not learn a task again: give what comes now an id of its own")
        if again and now.classes != self.tasks[now.task].classes:
            own = self.tasks[now.task].classes
            raise ValueError(f"{now.name}: expected the classes {own} that it had before, got {now.classes}")
        self.parameters.add_heads(now.task + 1, lambda: self.generator("head"), f"{now.name}: ")
        self.parameters.take_up_new()
        if not again:
            self.objective.begin(now.task, now.classes)
        if not self.carry:
            self.optimizer.base.state.clear()
        self.model.train()
        self.now, self.tally = now, Losses(self.device)
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
        self._open("step").forget_batches()
        self.backward(loss, batch, scaler)
        self.update(scaler)
        return loss.detach()

    def backward(self, loss: Tensor, batch: Any = None, scaler: GradScaler | None = None) -> None:
        """The first half of a step, to be called several times where gradients are accumulated: of k batches, each with
        a k-th of its loss. Gradients begin anew with the first, and what is rehearsed is drawn with it and counts once.

        A loss that is not finite is refused, and nothing of the learner has changed.
        """
        now = self._open("backward")
        stepping.check_finite(loss, now.step, scaler)
        if isinstance(batch, GradScaler):
            raise TypeError("backward takes the batch before the scaler: say backward(loss, scaler=scaler)")
        now.batches.append(batch)
        if now.rehearsals is None:
            self.optimizer.zero_grad()
            now.batch = batch
            now.rehearsals = [each for found in act(self, "rehearse") for each in found or ()]
        stepping.backward(loss, now.rehearsals, scaler)
        self.tally.add(loss)

    def update(self, scaler: GradScaler | None = None) -> None:
        """The second half: what is rehearsed, the gradients as the methods want them, the penalty, clipping, the
        optimiser."""
        now = self._open("update")
        stepping.rehearse(self, scaler)
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        self.after_backward()
        stepping.add_penalties(act(self, "penalty"))
        stepping.clip(self)
        stepping.move(self.optimizer, scaler)
        now.step += 1
        act(self, "after_step")
        now.forget_batches()
        self.tally.after(now.step)

    def end(self, data: Any = None, validation: Any = None, progress: Progress | None = None) -> None:
        """End a task: from now on it is one of those learned.

        data: what it was trained on, as `learn` takes it, for methods that look at it once more: importances,
            memories, retraining.
        validation: data that choices are made on, such as how sparse a sub-network can be; by default the same.
        """
        now = self._open("end")
        self.tally.mean(now.step)
        source = data if isinstance(data, Source) else self.source(data)
        held = source if validation is None else self.source(validation)
        with self._drawing("layers at the end"):
            self.model.eval()
            act(self, "end_task", source, held, progress)
        if now.task == len(self.tasks):
            self.tasks.append(Learned(now.name, now.classes, now.id))
        self.now, self.visits = None, self.visits + 1
        self.model.eval()

    def learn(
        self, task: Any, progress: Progress | None = None, *, epochs: int | None = None, id: TaskId | None = None,
        again: bool = False,
    ) -> None:  # fmt: skip
        """Learn the next task: begin, some steps, end.

        task: a `Task`; or its training data as tensors (inputs, targets), a `Dataset` or a `DataLoader`.
        epochs: go through the data so many times, instead of `steps` steps.
        Where the loss becomes no number the weights are those of before, and the task can be learned in another way.

        id, again: what it is called, and whether it was learned before, see `begin`.
        """
        data, validation = (task.train(), task.validation()) if isinstance(task, Task) else (task, None)
        if isinstance(task, Task) and id is None:
            id = task.index
        classes, name = (task.classes, task.name) if isinstance(task, Task) else (None, "")
        source = self.source(data)
        before = saving.snapshot(self)
        steps = self.steps if epochs is None else epochs * source.per_epoch()
        try:
            with self._drawing("layers"):
                self.begin(id, classes=classes, steps=steps, name=name, again=again)
                self.train(source, steps, progress)
                self.end(source, validation if validation and len(validation.x) else None, progress)
        except BaseException as error:
            self.give_up()
            if isinstance(error, NonFiniteError):
                saving.put_back(self, before)
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
        train(self, self.tally, source, steps, progress, phase)

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
        """After the last step on a task, with its data and the model in evaluation mode."""

    def own_parameters(self) -> Mapping[str, nn.Parameter]:
        """Parameters of the method that are trained beside the model's, by name."""
        return {}

    def ongoing(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a method keeps while a task is learned and no part of it, for learners that are saved in its middle."""
        return {}, {}

    def go_on(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """What `ongoing` gave, after the task was begun anew."""

    def viewing(self, task: int | None) -> AbstractContextManager[Model]:
        """The network as a task sees it, for as long as the block lasts."""
        return nullcontext(self.bound(task))

    def predict(self, x: Any, task: TaskId | None = None) -> Any:
        """What the objective answers: for classification a `Prediction`; a task that is given is not questioned.

        Without a task and with heads, all heads are asked and the class with the largest output wins. A task that comes
        later is answered by the network as it is, which is what forward transfer measures, where outputs mean the same
        in all tasks.
        """
        place = place_of(self, task)
        if place is None and self.heads is not None:
            return over_heads(self, to_device(x, self.device))
        with self.viewing(place) as model, evaluating(self.model), torch.no_grad():
            return self.objective.predict(model, to_device(x, self.device), place)

    def check_predict_options(self, **options: Any) -> None:
        """Further arguments that `predict` does not take are an error, before anything is trained."""
        if options:
            raise TypeError(f"{type(self).__name__}.predict takes the inputs and a task, got also {', '.join(options)}")

    # --- one learner for every model ----------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The network, as long as no other learner has begun to learn with it."""
        check_owner(self._model, self)
        return self._model

    def check_model(self) -> None:
        """An error if parameters that earlier tasks rest on are no longer those of the model."""

    def let_go(self) -> None:
        """Another learner takes the model over: nothing of this one stays in it."""
        self.now = None

    def settle(self) -> None:
        """This learner is a copy: what copies leave behind, such as hooks, is put in place again."""
        claim(self._model, self)
        guarded(self.optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """A learner of its own, with a model of its own."""
        if self.now is not None:
            raise RuntimeError(f"{self.now.name} is still being learned: a learner is copied after end()")
        self.optimizer.frozen.restore()  # forward passes in training mode may have moved statistics
        made = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        made.settle()
        return made

    # --- what methods share -------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def current(self) -> int:
        """The place of the task that is being learned, or will be next, in the order of learning."""
        return len(self.tasks) if self.now is None else self.now.task

    @property
    def ids(self) -> list[TaskId]:
        """What the tasks learned so far are called, by their places."""
        return [each.id for each in self.tasks]

    @property
    def name(self) -> str:
        """What the task in hand is called."""
        return f"task {self.current}" if self.now is None else self.now.name

    def generator(self, purpose: str) -> torch.Generator:
        """Random numbers of the current task for one purpose, which go on from call to call; on the CPU, so that they
        are the same on every machine."""
        made = {} if self.now is None else self.now.generators
        if purpose not in made:
            made[purpose] = torch.Generator().manual_seed(derived_seed(self.seed, self.visits, number_of(purpose)))
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
    def logits(self, x: Any, task: TaskId) -> Any:
        """The plain outputs of the network as a task sees it, in evaluation mode."""
        place = place_of(self, task)
        with self.viewing(place) as model, evaluating(self.model):
            return Objective.predict(self.objective, model, to_device(x, self.device), place)

    @torch.no_grad()
    def score(self, data: Any, task: TaskId) -> float:
        """How well the objective says that a task is done."""
        place = place_of(self, task, known=False) or 0
        with self.viewing(place) as model, evaluating(self.model):
            return self.objective.score(model, self.source(data).in_order(), place)

    def trained_share(self) -> float:
        """The fraction of the weights that the task in hand trains; heads of other tasks are no part of it."""
        return self.parameters.trained_share(self.current)

    def option(self, kind: type, name: str) -> Any:
        """An option of one of the strategies that are combined here, where another may have one of the same name."""
        for part, own in getattr(self, "own_options", {}).items():
            if issubclass(part, kind) and name in own:
                return own[name]
        return getattr(self, name)

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
        return drawing_from(derived_seed(self.seed, self.visits, number_of(purpose)), self.device)

    # --- saving -------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """One safetensors file with JSON in its header, written whole or not at all; no pickle.

        In the middle of a task, between two steps, too: who loads it goes on with the next step, bit for bit, if the
        batches are those that would have come.
        """
        saving.write_learner(path, *saving.state_of(self))

    def load(self, path: str | Path) -> None:
        """Become the learner that `save` wrote, all of it or nothing; this one must have the same model and arguments.

        `load_learner(path, model)` makes the learner too.
        """
        if self.now is not None:
            raise RuntimeError(f"{self.now.name} is still being learned: call end() before load(), or give_up()")
        claim(self._model, self)
        with content_of(path, "a learner that this one can become"):
            saving.take_up(self, *saving.read_learner(path))


class Naive(Strategy):
    """Fine-tuning from task to task without any protection: the baseline that forgets."""
