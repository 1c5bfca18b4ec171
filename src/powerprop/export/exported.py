"""The result of an export: a network for inference, with the plan that made it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from types import MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook

from powerprop.files import FileError

__all__ = ["Choice", "Exported", "Plan"]

MARGIN = 0.95
"""A sparse layer or network must take at most this part of the dense one's time: a gain within the noise is none."""


@dataclass(frozen=True)
class Choice:
    """How one layer computes: form is "dense" or "sparse"; times in seconds, None where nothing was measured."""

    layer: str
    form: str
    sparsity: float
    dense: float | None = None
    sparse: float | None = None
    reason: str = ""

    def why(self) -> str:
        """The reason, or the times."""
        times = {"dense": self.dense, "sparse": self.sparse}
        return self.reason or ", ".join(f"{seconds * 1e6:,.0f} us {form}" for form, seconds in times.items() if seconds)


@dataclass(frozen=True)
class Plan:
    """The decisions of an export.

    network: "dense" (as it was), "smaller" (batch norms folded, dead units removed, all layers dense) or "sparse" (the
        same, with every layer in the form that was fastest alone).
    traced: the whole network was one graph; else layers were replaced one by one in a copy.
    batch, threads: what was measured at.
    times: seconds of a call of each network that was tried.
    removed: dead units by layer.

    Examples:
        >>> plan = pp.export.sparse(model, x).plan
        >>> fast = pp.export.sparse(model, x, plan=plan)    # the same choices, nothing measured
    """

    network: str
    traced: bool
    batch: int
    threads: int
    margin: float = MARGIN
    choices: tuple[Choice, ...] = ()
    times: dict[str, float] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float | None:
        """The dense network's time over that of the chosen one; None if nothing was measured."""
        return self.times["dense"] / self.times[self.network] if self.times else None

    def to_json(self) -> str:
        """As text, for files."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote."""
        try:
            values: dict[str, Any] = json.loads(text)
            choices = tuple(Choice(**choice) for choice in values.pop("choices"))
            return cls(choices=choices, notes=tuple(values.pop("notes")), **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FileError(f"not the plan of an export: {error}") from None

    def __str__(self) -> str:
        lines = [f"{self.network} network, batch {self.batch}, {self.threads} threads"]
        if self.speedup is not None:
            lines[0] += f": {self.times[self.network] * 1e6:,.0f} us, {self.speedup:.2f}x as fast as dense"
        width = max((len(c.layer) for c in self.choices), default=0)
        for choice in self.choices:
            lines.append(f"  {choice.layer:<{width}}  {choice.form:<7}  {choice.sparsity:6.1%} zero  {choice.why()}")
        lines += [f"  {count} dead units removed from {layer}" for layer, count in self.removed.items()]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


class Exported(nn.Module):
    """A network for inference alone; it is called as the original is.

    Arguments that were no tensors in the example (a task, say) are part of the network and must stay the same.
    A graph runs on plain references to its tensors and layers: `self.fc1.weight` of a module is found by a search that
    takes longer than the product of a small layer.

    plan: what was chosen and why; print it.
    arguments: of the example by name, in the order of `forward`, if the network takes the tensors among them alone.
    """

    def __init__(self, network: nn.Module, plan: Plan, arguments: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.network = network
        self.plan = plan
        self._all = None if arguments is None else tuple(arguments)
        self._fixed = {n: v for n, v in (arguments or {}).items() if not isinstance(v, Tensor)}
        inputs = len(self._all or ()) - len(self._fixed)
        self._direct = inputs if self._fixed.keys().isdisjoint((self._all or ())[:inputs]) else None
        self._bind()

    def _bind(self) -> None:
        """`_answer` is the code of the graph with plain references for its `self`; hooks of a dense model still run."""
        self._names = SimpleNamespace()
        self._answer: Callable[..., Any] = self.network.__call__
        if self._all is not None and isinstance(self.network, fx.GraphModule):
            self._answer = MethodType(type(self.network).forward, self._names)
        self._refer()

    def _refer(self) -> None:
        for node in self.network.graph.nodes if isinstance(self.network, fx.GraphModule) else ():
            if node.op in ("get_attr", "call_module"):
                *owners, last = str(node.target).split(".")
                place = self._names
                for owner in owners:
                    place = place.__dict__.setdefault(owner, SimpleNamespace())
                setattr(place, last, attrgetter(str(node.target))(self.network))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Exported:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._refer()
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As any module is called, without what that takes, half a microsecond, where nobody asks for it."""
        own = self.__dict__
        if (
            own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
            or self._compiled_call_impl is not None or _has_any_global_hook()  # type: ignore[no-untyped-call]
        ):  # fmt: skip
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the original network, up to rounding."""
        if self._all is None:
            return self._answer(*args, **kwargs)
        if kwargs or len(args) != self._direct:
            args = self._tensors(args, kwargs)
        return self._answer(*args)

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments that are inputs; the others must be those of the example."""
        assert self._all is not None
        given = dict(zip(self._all, args, strict=False)) | kwargs
        missing = [n for n in self._all if n not in self._fixed and n not in given]
        if len(args) > len(self._all) or given.keys() - set(self._all) or missing:
            raise TypeError(
                f"this network was exported for the arguments {', '.join(self._all)}; "
                f"it was called with {len(args)} by place and {', '.join(kwargs) or 'none'} by name"
            )
        for name, value in self._fixed.items():
            if given.get(name, value) != value:
                raise ValueError(f"exported for {name}={value!r}, called with {name}={given[name]!r}: export it again")
        return tuple(given[n] for n in self._all if n not in self._fixed)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_answer", "_names")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._bind()

    def __repr__(self) -> str:
        return f"Exported: {self.plan}"

    def train(self, mode: bool = True) -> Exported:
        """Refused: there is nothing here to train."""
        if mode:
            raise ValueError("an exported network only answers; train the model it was made from")
        return super().train(False)
