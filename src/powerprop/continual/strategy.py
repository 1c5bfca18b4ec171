"""A learner of one task after the other: three calls of a loop, and the hooks in which methods differ."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from powerprop.continual import ownership, saving
from powerprop.continual.combine import call_hooks, check_combination, having
from powerprop.continual.data import Missing, Source, derived_seed, drawing_from, join_rows, number_of, to_device
from powerprop.continual.freezing import SharedFreezer
from powerprop.continual.history import Learned, Now, Rehearsal, TaskId, next_task, place_of
from powerprop.continual.objective import Called, Classification, Model, Objective, as_objective
from powerprop.continual.ownership import OptimizerFactory
from powerprop.continual.task import Task
from powerprop.eval_mode import evaluating
from powerprop.files import content_of
from powerprop.optim import Powerprop, Rate
from powerprop.select import Where
from powerprop.training import LossTally, NonFiniteError, Rates

__all__ = [
    "KINDS", "Naive", "OptimizerFactory", "Progress", "Rehearsal", "Stateful", "Strategy", "TaskId",
    "check_among", "check_between", "check_least", "refuse_alpha",
]  # fmt: skip

Progress = Callable[[str, int, float], None]
"""Hears the phase of the work, its step and the mean loss since it last heard."""
KINDS: dict[str, type[Strategy]] = {}
"""All methods by name, those from outside too; the names of those here cannot be taken."""
HEARD_EVERY = 100
LEAST_WEIGHT = 1e-6
"""Of the loss, for the task in hand; less is rounding."""


class Stateful(Protocol):
    """A part of a method whose state is saved with the learner: masks, importances, a memory."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None: ...


class Strategy:
    """Learns one task after the other. A method overrides some of the hooks; by itself this is naive fine-tuning.

        learner.begin(0)                                  # or learn(task), which makes the same three calls
        for x, y in loader:
            learner.step(F.cross_entropy(model(x), y))
        learner.end(loader)

    Random numbers are drawn from (seed, task, purpose), so that a learner that was saved after a task and loaded goes
    on bit for bit. The arguments of a method are attributes of the same names, by which a saved learner is made again.

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

    Examples:
        >>> learner = continual.EWC(model, sgd)
        >>> learner.begin(0)
        >>> for inputs, labels in batches:
        ...     loss = learner.step(torch.nn.functional.cross_entropy(model(inputs), labels))
        >>> learner.end(batches)
    """

    traits: ClassVar[tuple[str, ...]] = ()
    """What a method promises or asks for, among `combine.TRAITS`."""
    default_rate: ClassVar[Rate] = "matched"
    task_state: ClassVar[tuple[str, ...]] = ()
    """Attributes that a method sets while a task is learned, for learners that are saved in its middle."""

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
        if clip is not None:
            check_between(clip=(clip, 0, math.inf))
        if carry and having(type(self), "starts anew"):
            raise ValueError(f"the optimiser of {type(self).__name__} starts every task anew: expected carry=False")
        if heads is not None:
            model.get_submodule(heads)
        self._model, self.steps, self.batch_size, self.seed = model, steps, batch_size, seed
        self.heads, self.takes_task, self.schedule, self.clip, self.carry = heads, takes_task, schedule, clip, carry
        self.objective = as_objective(objective)
        self.optimizer = ownership.powerprop_of(model, optimizer, alpha, where, rate, self.default_rate)
        self.parts: dict[str, Stateful] = {"moments": saving.Moments(model, self.optimizer)} if carry else {}
        self.freezer: SharedFreezer | None = None
        self.tasks: list[Learned] = []
        self.visits = 0
        self.records: dict[str, Any] = {}
        self.now: Now | None = None
        self._rates, self._known = Rates(self.optimizer), set(model.parameters())

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_combination(cls)
        abstract = any(getattr(each, "__isabstractmethod__", False) for each in vars(cls).values())
        own = KINDS[cls.__name__].__module__.startswith("powerprop.") if cls.__name__ in KINDS else False
        if not (abstract or own or hasattr(cls, "strategies")):  # those of `combine` take their options by part
            KINDS[cls.__name__] = cls

    # --- the loop: begin, steps, end ----------------------------------------------------------------------------

    def begin(
        self, task: TaskId | Task | None = None, *, classes: Sequence[int] | None = None, steps: int | None = None,
        name: str = "", again: bool = False,
    ) -> None:  # fmt: skip
        """Begin the next task: the optimiser forgets what it remembers of the last one, unless it is to `carry` it.

        task: what it is called from now on, a number or a name, by default its place in the order of learning, which
            is what models with heads, and the hooks, know it by; or the task itself.
        classes: the numbers of its classes in the whole stream, if the objective needs them.
        steps: how many steps there will be, for methods that follow a schedule.
        name: what messages call it.
        again: a task that was learned before is visited once more, with the head that it has.
        """
        if self.now is not None:
            text = f"{self.now.name} is still being learned: call end() before the next begin(), or give_up()"
            raise RuntimeError(text)
        ownership.claim(self, self._model)
        if self.freezer is not None:
            self.freezer.check_same()
        now = next_task(self.tasks, task, classes, steps, name, again)
        if again and (once := having(type(self), "once")):
            raise ValueError(f"{now.name}: {once[0]} does not learn a task again: give what comes now an id of its own")
        self.add_heads(now.task + 1, f"{now.name}: ")
        if not again:
            self.objective.begin(now.task, now.classes)
        if not self.carry:
            self.optimizer.base.state.clear()
        self.model.train()
        self.now, self.tally = now, LossTally(self.device)
        try:
            call_hooks(self, "begin_task")
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
        _check_finite(loss, now.step, scaler)
        if isinstance(batch, GradScaler):
            raise TypeError("backward takes the batch before the scaler: say backward(loss, scaler=scaler)")
        now.batches.append(batch)
        if now.rehearsals is None:
            self.optimizer.zero_grad()
            now.batch = batch
            now.rehearsals = [each for found in call_hooks(self, "rehearse") for each in found or ()]
        weight = 1.0 - sum(each.weight for each in now.rehearsals)
        if weight < LEAST_WEIGHT:
            weights = [each.weight for each in now.rehearsals]
            raise ValueError(f"rehearsals have weights of {weights} in the loss, which leave none for the task in hand")
        _scaled(loss if weight == 1.0 else weight * loss, scaler).backward()  # type: ignore[no-untyped-call]
        self.tally.add(loss)

    def update(self, scaler: GradScaler | None = None) -> None:
        """The second half: what is rehearsed, the gradients as the methods want them, the penalty, clipping, the
        optimiser."""
        now = self._open("update")
        self._rehearse(now, scaler)
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        self.after_backward()
        if terms := [each for each in call_hooks(self, "penalty") if each is not None]:
            torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]
        if self.clip is not None and (moving := self._moving_fraction()) > 0:
            self.optimizer.clip_grad_norm_(self.clip * math.sqrt(moving), self._in_order())
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        now.step += 1
        call_hooks(self, "after_step")
        now.forget_batches()

    def _rehearse(self, now: Now, scaler: GradScaler | None) -> None:
        """Gradients of Σ weight·loss(rehearsal), one after the other; all batches of the step are one from now on."""
        first, now.batch = now.batch, _joined(now.batches)
        for batch, task, weight, of_its_own in now.rehearsals or ():
            shown = to_device(now.batch if batch is first else batch, self.device)
            with self.viewing(task if isinstance(task, int) else None) as model:
                objective: Any = of_its_own or self.objective.loss
                loss = weight * objective(model, shown, task)
            _check_finite(loss, now.step, scaler)
            _scaled(loss, scaler).backward()  # type: ignore[no-untyped-call]

    def _moving_fraction(self) -> float:
        """The fraction of the weights that the step trains; heads of other tasks are no part of it."""
        own = [m for n, m in self.optimizer.masters.items() if self.head_of(n) in (None, self.current)]
        moving = sum(m.trained_count() for m in own if m.param.grad is not None)
        return moving / max(1, sum(m.param.numel() for m in own))

    def _in_order(self) -> list[nn.Parameter]:
        """All that is trained, by name: a learner that was loaded has met its parameters in another order, and a sum in
        another order is another one."""
        trained = {p for group in self.optimizer.param_groups for p in group["params"]}
        return [p for _, p in sorted(saving.trained_parameters(self).items()) if p in trained]

    def end(self, data: Any = None, validation: Any = None, progress: Progress | None = None) -> None:
        """End a task: from now on it is one of those learned.

        data: what it was trained on, as `learn` takes it, for methods that look at it once more: importances,
            memories, retraining.
        validation: data that choices are made on, such as how sparse a sub-network can be; by default the same.
        """
        now = self._open("end")
        self.tally.mean(now.step)
        source = self.source(data)
        validating = source if validation is None else self.source(validation)
        with self._drawing("layers at the end"):
            self.model.eval()
            call_hooks(self, "end_task", source, validating, progress)
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
        data, validation, about = task, None, dict[str, Any]()
        if isinstance(task, Task):
            data, validation, about = task.train(), task.validation(), {"classes": task.classes, "name": task.name}
            id = task.index if id is None else id
        source = self.source(data)
        before = saving.snapshot(self)
        steps = self.steps if epochs is None else epochs * source.per_epoch()
        try:
            with self._drawing("layers"):
                self.begin(id, steps=steps, again=again, **about)
                self.train(source, steps, progress)
                self.end(source, validation if validation and len(validation.x) else None, progress)
        except BaseException as error:
            self.give_up()
            if isinstance(error, NonFiniteError):
                saving.put_back(self, before)
            raise

    def train(self, source: Source, steps: int, progress: Progress | None = None, phase: str = "training") -> None:
        """Some steps with the batches of a source, at the rates of the learner's schedule."""
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
                mean = self.tally.take(step)
                if progress is not None:
                    progress(phase, step, mean)
        self._set_rates("", 0.0)

    def give_up(self) -> None:
        """Leave the task in hand without having learned it; the next `begin` is of the same task."""
        self._set_rates("", 0.0)
        self.now = None
        self.model.eval()

    def _set_rates(self, phase: str, done: float) -> None:
        """The rates of the schedule; outside of a phase, those of the optimiser."""
        if self.schedule is not None:
            self._rates.scale(self.schedule(phase, done) if phase else 1.0)

    def _open(self, what: str) -> Now:
        if self.now is None:
            raise RuntimeError(f"{what}() needs a task: call begin() first")
        return self.now

    # --- the hooks ----------------------------------------------------------------------------------------------

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

    def viewing(self, task: int | None) -> AbstractContextManager[Model]:
        """The network as a task sees it, for as long as the block lasts."""
        return nullcontext(self.bound(task))

    def bound(self, task: int | None, model: nn.Module | None = None) -> Model:
        """The model, or one like it, as a function of the inputs alone."""
        one = model or self.model
        return Called(one, lambda *inputs, **named: one(*inputs, task or 0, **named)) if self.sees_task else one

    @property
    def sees_task(self) -> bool:
        """Whether the model is called with the task."""
        return self.heads is not None or self.takes_task

    # --- answers ------------------------------------------------------------------------------------------------

    def predict(self, x: Any, task: TaskId | None = None) -> Any:
        """What the objective answers: for classification a `Prediction`; a task that is given is not questioned.

        Without a task and with heads, all heads are asked and the class with the largest output wins. A task that comes
        later is answered by the network as it is, which is what forward transfer measures, where outputs mean the same
        in all tasks.
        """
        place, x = self.place_of(task), to_device(x, self.device)
        if place is None and self.heads is not None:
            if not isinstance(self.objective, Classification):
                kind = type(self.objective).__name__
                raise ValueError(f"predict with {kind} needs the task: every task has an output layer of its own")
            return self.objective.likeliest([self.logits(x, each) for each in self.ids])
        with self.viewing(place) as model, evaluating(self.model), torch.no_grad():
            return self.objective.predict(model, x, place)

    def check_predict_options(self, **options: Any) -> None:
        """Further arguments that `predict` does not take are an error, before anything is trained."""
        if options:
            raise TypeError(f"{type(self).__name__}.predict takes the inputs and a task, got also {', '.join(options)}")

    @torch.no_grad()
    def logits(self, x: Any, task: TaskId) -> Any:
        """The plain outputs of the network as a task sees it, in evaluation mode."""
        place = self.place_of(task)
        with self.viewing(place) as model, evaluating(self.model):
            return Objective.predict(self.objective, model, to_device(x, self.device), place)

    @torch.no_grad()
    def score(self, data: Any, task: TaskId) -> float:
        """How well the objective says that a task is done."""
        place = self.place_of(task, known=False) or 0
        with self.viewing(place) as model, evaluating(self.model):
            return self.objective.score(model, self.source(data).in_order(), place)

    # --- tasks and their heads ----------------------------------------------------------------------------------

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

    def place_of(self, task: TaskId | None, known: bool = True) -> int | None:
        """The place of a task in the order of learning, by what it is called; None is no task.

        known: whether a task that comes later is an error where it cannot be answered for.
        """
        new = [] if task is None or self.now is None or self.now.task < len(self.tasks) else [self.now.id]
        return place_of(self.ids + new, task, self.heads is None and self.objective.shared_outputs, known)

    def head_of(self, name: str) -> int | None:
        """The task whose head a parameter of this name is inside of; None for everything that is shared."""
        if self.heads is None or not name.startswith(f"{self.heads}."):
            return None
        child = name[len(self.heads) + 1 :].partition(".")[0]
        return int(child) if child.isdigit() else None

    def add_heads(self, tasks: int, where: str = "") -> None:
        """Output layers for so many tasks, where the module that has them knows how to `add` one; the optimiser trains
        all parameters that the model has got.

        where: what an error begins with.
        """
        heads = None if self.heads is None else self.model.get_submodule(self.heads)
        while heads is not None and len(known := [n for n, _ in heads.named_children() if n.isdigit()]) < tasks:
            if not hasattr(heads, "add"):
                text = f"{where}{self.heads!r} has no head '{tasks - 1}', it has {', '.join(known) or 'none'}"
                raise ValueError(f"{text}; add one before the task begins")
            heads.add(self.generator("head"))  # type: ignore[operator]
        if new := [p for p in self.model.parameters() if p not in self._known]:
            self.add_parameters(new)
            self._known |= set(new)

    def add_parameters(self, parameters: list[nn.Parameter], **settings: Any) -> None:
        """Further parameters, of the model or of the method itself, to be trained at the rate of the first group."""
        group = {"params": parameters, "lr": self._rates.given[0], **settings}
        self.optimizer.add_param_group(group)
        self._rates.given.append(group["lr"])

    def trained_share(self) -> float:
        """The fraction of the weights that the task in hand trains, after its gradients; heads of other tasks are no
        part of it."""
        own = [m for n, m in self.optimizer.masters.items() if self.head_of(n) in (None, self.current)]
        moving = sum(m.trained_count() for m in own if m.param.grad is not None)
        return moving / max(1, sum(m.numel for m in own))

    # --- what methods share -------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The network, as long as no other learner has begun to learn with it."""
        ownership.check_owner(self, self._model)
        return self._model

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def generator(self, purpose: str) -> torch.Generator:
        """Random numbers of the current task for one purpose, which go on from call to call; on the CPU, so that they
        are the same on every machine."""
        made = {} if self.now is None else self.now.generators
        if purpose not in made:
            made[purpose] = torch.Generator().manual_seed(derived_seed(self.seed, self.visits, number_of(purpose)))
        return made[purpose]

    def _drawing(self, purpose: str) -> AbstractContextManager[None]:
        """Layers that know torch's global generator only (dropout) draw from a seed of the task."""
        return drawing_from(derived_seed(self.seed, self.visits, number_of(purpose)), self.device)

    def source(self, data: Any) -> Source:
        """Data as batches on the model's device; None is an error as soon as a method looks at it."""
        if isinstance(data, Source):
            return data
        if data is None:
            data = Missing(f"{type(self).__name__} looks at the data of a task when it ends: say end(loader)")
        return Source(data, self.batch_size, lambda: self.generator("batches"), self.device)

    def shown_batch(self, why: str) -> Any:
        """The batch of the step, for methods that look at it; why they do, if the loop does not say it."""
        batch = self._open("step").batch
        if batch is None:
            raise ValueError(f"{type(self).__name__} {why}: say step(loss, batch)")
        return batch

    def option(self, kind: type, name: str) -> Any:
        """An option of one of the strategies that are combined here, where another may have one of the same name."""
        for part, own in getattr(self, "own_options", {}).items():
            if issubclass(part, kind) and name in own:
                return own[name]
        return getattr(self, name)

    def memory_bytes(self) -> int:
        """What the method keeps beyond the model: as it is saved, and networks of before while a task is learned."""
        own = (part for name, part in self.parts.items() if name != "moments")  # of the optimiser, not of the method
        tensors = [t for part in own for t in part.state()[0].values()]
        if self.now is not None:
            tensors += [t for module in saving.of_kind(self, nn.Module) for t in module.state_dict().values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    # --- copies, other learners, files --------------------------------------------------------------------------

    def let_go(self) -> None:
        """Another learner takes the model over: nothing of this one stays in it."""
        self.now = None
        if self.freezer is not None:
            self.freezer.let_go()

    def settle(self) -> None:
        """This learner is a copy: what copies leave behind, such as hooks, is put in place again."""
        ownership.claim(self, self._model)
        ownership.guard(self.optimizer)
        if self.freezer is not None:
            self.freezer.hold_again()

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
        ownership.claim(self, self._model)
        with content_of(path, "a learner that this one can become"):
            saving.take_up(self, *saving.read_learner(path), given={})


class Naive(Strategy):
    """Fine-tuning from task to task without any protection: the baseline that forgets.

    Examples:
        >>> learner = continual.Naive(model, sgd, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """


def check_least(**arguments: tuple[float, float]) -> None:
    """An error for the first argument below the least that it can be: `check_least(steps=(steps, 1))`."""
    for name, (value, least) in arguments.items():
        if not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def check_among(**arguments: tuple[object, Sequence[str]]) -> None:
    """An error for the first argument that is none of the values it can have: `check_among(reuse=(reuse, REUSES))`."""
    for name, (value, known) in arguments.items():
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def check_between(**arguments: tuple[float, float, float]) -> None:
    """An error for the first argument outside of an open interval: `check_between(clip=(clip, 0, math.inf))`."""
    for name, (value, low, high) in arguments.items():
        if not low < value < high:
            expected = "positive" if high == math.inf and low == 0 else f"between {low} and {high}"
            raise ValueError(f"{name} must be {expected}, got {value}")


def refuse_alpha(kind: type, optimizer: OptimizerFactory | Optimizer, alpha: float | None, reason: str) -> None:
    """An error for α > 1, as an argument or in a Powerprop."""
    masters = optimizer.masters.values() if isinstance(optimizer, Powerprop) else ()
    largest = max([alpha or 1.0, *(master.alpha for master in masters)])
    if largest > 1:
        raise ValueError(f"{kind.__name__} needs alpha = 1, got alpha = {largest:g}: {reason}")


def _check_finite(loss: Tensor, step: int, scaler: GradScaler | None) -> None:
    """An error for a loss that is not finite, before it has made a gradient; with a scaler, that skips the step."""
    if scaler is None and not math.isfinite(value := float(loss.detach())):
        raise NonFiniteError(f"the loss is {value} at step {step + 1}, which is not taken; a lower rate may help")


def _scaled(loss: Tensor, scaler: GradScaler | None) -> Tensor:
    return loss if scaler is None else scaler.scale(loss)


def _joined(batches: Sequence[Any]) -> Any:
    """Batches of one form as one."""
    if len(batches) < 2 or batches[0] is None:
        return batches[0] if batches else None
    if any(type(each) is not type(batches[0]) for each in batches):
        raise TypeError(f"expected batches of one form, got {[type(each).__name__ for each in batches]}")
    return join_rows(batches)
