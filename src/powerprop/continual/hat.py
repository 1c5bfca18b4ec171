"""HAT: every task has gates of its own between the layers; what passes through them is never changed again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from powerprop.continual.data import Source, take_rows
from powerprop.continual.freezing import SharedFreezer
from powerprop.continual.layers import loose_layers, own_layers, units_seen, warn_of_loose
from powerprop.continual.objective import Model
from powerprop.continual.strategy import OptimizerFactory, Progress, Strategy, check_least
from powerprop.mask_entries import count
from powerprop.masks import pack, unpack

__all__ = ["HAT", "Gates", "put_gates"]

Opened = dict[str, Tensor]


class Gates:
    """The hard gates of every task learned so far, one bit for each, and what they have in use all together.

    loose: the layers that gates have no power over, which are held.
    """

    def __init__(self) -> None:
        self.tasks: list[Opened] = []
        self.let_in: Opened = {}
        self.seen: Opened = {}
        self.loose: list[str] = []

    def of(self, task: int | None) -> Opened:
        """The gates of a task, or an error that names the tasks there are."""
        if task is None or not 0 <= task < len(self.tasks):
            known = f"in 0..{len(self.tasks) - 1} (the tasks learned so far)" if self.tasks else "learned first"
            raise ValueError(f"task must be {known}, whose gates are known, got {task}")
        return self.tasks[task]

    def add(self, opened: Opened, seen: Opened) -> None:
        """One more task: the gates that it opens, and the output units of every layer that it sees behind them."""
        self.tasks.append({key: gate.cpu() for key, gate in opened.items()})
        self.let_in |= {key: gate.cpu() | self.used(key, gate).cpu() for key, gate in opened.items()}
        self.seen |= {name: units.cpu() | self.seen.get(name, units.cpu()) for name, units in seen.items()}

    def used(self, key: str, like: Tensor) -> Tensor:
        """The gates of this name that some task has opened; none, if there are other gates now than there were."""
        found = self.let_in.get(key)
        if found is None or found.shape != like.shape:
            return torch.zeros(like.shape, dtype=torch.bool, device=like.device)
        return found.to(like.device)

    def free(self, name: str, weight: Tensor) -> Tensor:
        """1 - min(a_out, a_in): the entries of a layer's weight or bias that no task so far depends on.

        A layer without gates of its own lets everything in; the units that a bias is added to need not be let in.
        """
        seen = self.seen[name].to(weight.device)
        if weight.ndim == 1:
            return ~seen
        let_in = self.let_in.get(name, torch.ones(weight.shape[1], dtype=torch.bool)).to(weight.device)
        both = seen[:, None] & let_in[None, :]
        return ~both.view(*both.shape, *[1] * (weight.ndim - 2)).expand(weight.shape)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """One bit for every gate and task, and for every unit in use."""
        named = {f"{task}/{key}": gate for task, gates in enumerate(self.tasks) for key, gate in gates.items()}
        named |= {f"in/{key}": gate for key, gate in self.let_in.items()}
        named |= {f"out/{name}": units for name, units in self.seen.items()}
        sizes = {name: len(bits) for name, bits in named.items()}
        packed = {name: pack(bits) for name, bits in named.items()}
        return packed, {"tasks": len(self.tasks), "sizes": sizes, "loose": self.loose}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self.tasks, self.let_in, self.seen = [{} for _ in range(data["tasks"])], {}, {}
        self.loose = list(data["loose"])
        parts = {"in": self.let_in, "out": self.seen, **{str(t): gates for t, gates in enumerate(self.tasks)}}
        for name, size in data["sizes"].items():
            kind, _, key = name.partition("/")
            parts[kind][key] = unpack(tensors[name], (size,))


def put_gates(layers: Mapping[str, nn.Module], gate: Callable[[str], Tensor]) -> list[RemovableHandle]:
    """Let the inputs of layers pass through gates, one for each feature or channel, until the handles are removed.

    gate: asked with the name of the layer in every forward pass; booleans are hard gates, which stop NaN too.
    """

    def gated(name: str) -> Callable[..., tuple[Any, ...]]:
        def hook(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x, a = inputs[0], gate(name)
            if not isinstance(layer, nn.Linear):
                a = a.view(-1, *[1] * (layer.weight.ndim - 2))  # type: ignore[operator]
            return x.masked_fill(~a, 0) if a.dtype == torch.bool else x * a.to(x.dtype), *inputs[1:]

        return hook

    return [layer.register_forward_pre_hook(gated(name)) for name, layer in layers.items()]


LARGEST = 6.0
"""Embeddings are kept within ±6, where the gradient of a sigmoid has not vanished."""
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Anneal(torch.autograd.Function):
    """σ(s·e), with the gradient s_max·σ'(e) in the place of s·σ'(s·e).

    That is the compensation of the paper, s_max/s · (cosh(s·e) + 1)/(cosh(e) + 1) times the gradient, simplified: no
    cosh overflows.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(e: Tensor, s: float, s_max: float) -> Tensor:
        return torch.sigmoid(s * e)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        e, _, ctx.s_max = inputs
        ctx.save_for_backward(e)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        plain = torch.sigmoid(ctx.saved_tensors[0])
        return grads[0] * ctx.s_max * plain * (1 - plain), None, None


class HAT(Strategy):
    """Hard attention to the task (Serrà et al. 2018): gates a^t = σ(s·e^t) on the inputs of every layer but the first.

        h_l ← a_l^t ⊙ h_l,    s = 1/s_max + (s_max - 1/s_max)·(progress of the period)
        L + λ Σ a^t (1 - a^{<t}) / Σ (1 - a^{<t})
        trainable: 1 - min(a_out^{<t}, a_in^{<t})

    When a task ends its gates become exactly 0 or 1 (e > 0). A weight between a unit that an earlier task looks at and
    an input that it lets in is held by the optimiser from then on, and so is the bias of such a unit: earlier tasks
    answer as before, to the bit. Norms and layers that have no gates are trained with the first task only, and so is
    what is used by other ways than its layer's own `forward`, as attention does; every head with its own.

    The embeddings e are parameters of the learner, a group of the optimiser without decay; only the gates are kept.

    s_max: how hard gates get; the larger, the less changes when they become hard.
    strength: λ, the price of units that no earlier task uses.
    periods: how many times s goes from 1/s_max to s_max within a task; in the paper once in every epoch.
    gate_lr: learning rate of the embeddings; by default that of the optimiser's first group.
    inputs: the layers that see the inputs of the network, which have no gates; by default the first.
    Further arguments are those of `Strategy`. With `clip`, the gradients of the embeddings count, which are large.

    Examples:
        >>> learner = continual.HAT(model, sgd, steps=20)
        >>> for task in tasks:
        ...     learner.learn(task)
        >>> labels = learner.predict(x, task=0).label
    """

    traits: ClassVar[tuple[str, ...]] = ("once", "keeps answers", "sees layers", "starts anew")

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory | Optimizer, *, s_max: float = 400.0,
        strength: float = 0.75, periods: int = 1, gate_lr: float | None = None, inputs: Sequence[str] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        check_least(s_max=(s_max, 1), strength=(strength, 0), periods=(periods, 1))
        if gate_lr is not None and not gate_lr > 0:
            raise ValueError(f"gate_lr must be positive, got {gate_lr}")
        super().__init__(model, optimizer, **options)
        self.s_max, self.strength, self.periods, self.gate_lr = s_max, strength, periods, gate_lr
        self.layers = self._layers(None)
        if not self.layers:
            raise ValueError("the model has no linear or convolutional layer of one group to put gates on")
        self.inputs = list(self.layers)[:1] if inputs is None else list(inputs)
        if unknown := set(self.inputs) - set(self.layers):
            raise ValueError(f"inputs must be among the layers {', '.join(self.layers)}, got {sorted(unknown)}")
        if not self._keys(0) and self.heads is None:
            (only,) = self.layers
            text = f"no layer is left for gates: {only!r} is the only one, and is taken to see the network's inputs"
            raise ValueError(f"{text}; say inputs=[] if its inputs are to have gates all the same")
        self.gates = Gates()
        self.parts["gates"] = self.gates
        self.embeddings: dict[str, nn.Parameter] = {}
        self.freezer: SharedFreezer = SharedFreezer(model, self.optimizer, self.head_of)
        self._gated: dict[str, str] = {}
        self._handles: list[RemovableHandle] = []
        for name in self._protected():
            if name not in self.optimizer.masters:
                self.optimizer.track(name)

    def _layers(self, task: int | None) -> dict[str, nn.Module]:
        """The layers that all tasks share (None), or those of a task's head."""
        return {n: m for n, m in own_layers(self.model, LAYERS).items() if self.head_of(f"{n}.") == task}

    def _protected(self) -> dict[str, nn.Parameter]:
        """Weights and biases of the shared layers by name."""
        gated = [(n, m) for n, m in self.layers.items() if n not in self.gates.loose]
        both = ((f"{n}.{kind}".lstrip("."), getattr(m, kind)) for n, m in gated for kind in ("weight", "bias"))
        return {name: parameter for name, parameter in both if parameter is not None}

    # --- the hooks ----------------------------------------------------------------------------------------------

    def begin_task(self) -> None:
        """New embeddings, gates in the model; what earlier tasks use is held."""
        self._s()  # an error before anything has changed, if the number of steps is not known
        self._protect(self.current)
        self._gated = self._keys(self.current)
        self._draw_embeddings()
        self._put_on(self.current, self._annealed)

    def penalty(self) -> Tensor:
        """λ Σ a(1 - a^{<t}) / Σ (1 - a^{<t}): how many new units the task takes."""
        new = {key: ~self.gates.used(key, e) for key, e in self.own_parameters().items()}
        if not new:
            return torch.zeros((), device=self.device, requires_grad=True)
        taken = torch.stack([(self._annealed(key) * free).sum() for key, free in new.items()]).sum()
        strength: float = self.option(HAT, "strength")
        return strength * taken / max(1, sum(count(free) for free in new.values()))

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The embeddings of the task in hand."""
        return {key: self.embeddings[key] for key in self._gated.values()}

    @torch.no_grad()
    def after_step(self) -> None:
        """|e| ≤ 6."""
        for e in self.embeddings.values():
            e.clamp_(-LARGEST, LARGEST)

    def end_task(self, data: Source, validation: Source, progress: Progress | None) -> None:
        """The gates become hard, and everything that is seen through them is protected.

        Layers that are used by other ways than their own `forward`, where no gate stands, are held.
        """
        row = take_rows(next(data.in_order()), torch.zeros(1, dtype=torch.long))
        model, task = self.bound(self.current), self.current

        def answer(batch: Any = row) -> Any:
            return self.objective.outputs(model, batch, task)

        opened = {key: e.detach() > 0 for key, e in self.own_parameters().items()}
        self._take_off()
        gates = {name: opened[key] for name, key in self._gated.items()}
        seen = units_seen(answer, row, self.layers | self._layers(self.current), gates)
        found = loose_layers(answer, self.layers).items()
        loose = {n: how for n, how in found if n not in self.gates.loose}
        warn_of_loose(self.name, loose)
        self.gates.loose += loose
        if closed := [key for key, gate in opened.items() if not gate.any()]:
            text = f"{self.name}: all gates of {', '.join(closed)} are closed: nothing passes through the sub-network"
            warnings.warn(f"{text}; a smaller strength or more steps would help", stacklevel=2)
        self.gates.add(opened, {name: seen[name] for name in self.layers})
        self._protect(None)

    @contextmanager
    def viewing(self, task: int | None) -> Iterator[Model]:
        """The network with the gates of a task; the one being learned has them in the model already."""
        if self._learning(task):
            yield self.bound(task)
            return
        gates = {key: gate.to(self.device) for key, gate in self.gates.of(task).items()}
        self.optimizer.frozen.restore()  # forward passes in training mode may have moved statistics
        self._put_on(task, gates.__getitem__)
        try:
            yield self.bound(task)
        finally:
            self._take_off()
            if self.now is not None and self._learning(self.now.task):
                self._put_on(self.now.task, self._annealed)

    def _learning(self, task: int | None) -> bool:
        """True for a task whose gates are not hard yet."""
        return self.now is not None and task == self.now.task == len(self.gates.tasks)

    def give_up(self) -> None:
        """Leave the task in hand; its gates leave the model."""
        self._take_off()
        super().give_up()

    def let_go(self) -> None:
        """Another learner has the model."""
        self._take_off()
        super().let_go()

    # --- gates --------------------------------------------------------------------------------------------------

    def _keys(self, task: int | None) -> dict[str, str]:
        """The layers with gates on their inputs, and the names of these: all heads share theirs."""
        own = {name: name.replace(f"{self.heads}.{task}", f"{self.heads}.*", 1) for name in self._layers(task)}
        return {name: name for name in self.layers if name not in self.inputs} | (own if self.heads else {})

    def _put_on(self, task: int | None, gate: Callable[[str], Tensor]) -> None:
        self._take_off()
        keys = self._keys(task)
        self._handles = put_gates({n: self.model.get_submodule(n) for n in keys}, lambda name: gate(keys[name]))

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _s(self) -> float:
        """Where s is between 1/s_max and s_max; the last step of a period has s_max, and so have steps beyond those
        that were announced."""
        now = self._open("HAT")
        now.done  # noqa: B018  an error if the number of steps is not known
        steps = now.steps or 1
        length = steps / self.periods
        done = min(1.0, now.step % length / max(1.0, length - 1)) if now.step < steps else 1.0
        return 1 / self.s_max + (self.s_max - 1 / self.s_max) * done

    def _annealed(self, key: str) -> Tensor:
        gate: Tensor = Anneal.apply(self.embeddings[key], self._s(), self.s_max)  # type: ignore[no-untyped-call]
        return gate

    def _draw_embeddings(self) -> None:
        """e ~ N(0, 1), in parameters of the same group for every task."""
        new = []
        for name, key in self._gated.items():
            weight: Tensor = self.model.get_submodule(name).weight  # type: ignore[assignment]
            e = torch.randn(weight.shape[1], generator=self.generator("gates")).to(weight)
            if key not in self.embeddings or self.embeddings[key].shape != e.shape:
                self.embeddings[key] = nn.Parameter(e)
                new.append(self.embeddings[key])
            self.embeddings[key].detach().copy_(e)
        if new:
            rate = {} if self.gate_lr is None else {"lr": self.gate_lr}
            decay = {"weight_decay": 0.0} if "weight_decay" in self.optimizer.defaults else {}
            self.add_parameters(new, **rate, **decay)

    def _protect(self, learning: int | None) -> None:
        """Hold what earlier tasks depend on, in the optimiser."""
        protected = self._protected()
        free = {n: self.gates.free(n.rpartition(".")[0], p) for n, p in protected.items()} if self.gates.tasks else None
        self.optimizer.set_masks(None, free)
        self.freezer.hold(protected, learning)
