"""Everything of a model that has no mask: trained with the first task, each head with its own, then held."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from powerprop.optim import Powerprop

__all__ = ["SharedFreezer"]


class SharedFreezer:
    """Holds biases, norms, embeddings, buffers and the heads of other tasks, whoever calls the optimiser's `step`.

    head_of: the task whose head a name is inside of, or None.
    """

    def __init__(self, model: nn.Module, optimizer: Powerprop, head_of: Callable[[str], int | None]) -> None:
        self.model, self.optimizer, self.head_of = model, optimizer, head_of
        self._asleep: list[RemovableHandle] = []
        self._held: dict[str, nn.Parameter] = {}
        self._last: tuple[Collection[str], int | None] | None = None

    def hold(self, free: Collection[str], learning: int | None) -> None:
        """Hold everything but the parameters of these names and the head of a task that is being learned.

        While the first task is learned nothing is held. Running statistics are used, not taken, also where the
        caller's loop puts the model into training mode.
        """
        self._last = free, learning
        self._held |= {n: p for n, p in self.model.named_parameters() if self.head_of(n) in (None, learning)}
        for handle in self._asleep:
            handle.remove()

        def held(name: str) -> bool:
            return learning != 0 and (self.head_of(name) is None or self.head_of(name) != learning)

        parameters = [p for n, p in self.model.named_parameters() if n not in free and held(n)]
        self.optimizer.freeze(parameters, [b for n, b in self.model.named_buffers() if held(n)])
        normed = {n: m for n, m in self.model.named_modules() if getattr(m, "running_mean", None) is not None}
        self._asleep = [m.register_forward_pre_hook(_stay_in_evaluation) for n, m in normed.items() if held(f"{n}.")]

    def check_same(self) -> None:
        """An error if a parameter that tasks were learned with is another one now, or gone: their answers would be."""
        now = dict(self.model.named_parameters())
        if other := [name for name, parameter in self._held.items() if now.get(name) is not parameter]:
            text = f"{', '.join(map(repr, other))} of the model {'is' if len(other) == 1 else 'are'} not what it was"
            raise RuntimeError(f"{text} when earlier tasks were learned: put it back, or begin with a new learner")

    def hold_again(self) -> None:
        """The same, in the optimiser of a copy."""
        self._held = {n: p for n, p in self.model.named_parameters() if n in self._held}
        if self._last is not None:
            self.hold(*self._last)

    def let_go(self) -> None:
        """Nothing of the model is held any more; its layers are anybody's."""
        for handle in self._asleep:
            handle.remove()
        self._asleep = []


def _stay_in_evaluation(module: nn.Module, _: Any) -> None:
    module.eval()
