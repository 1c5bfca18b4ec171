"""The result of an export: a network for inference, with the plan that made it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, fx, nn

from powerprop.export.plan import Plan

__all__ = ["Exported", "Fast"]


class Fast(nn.Module):
    """A graph that runs on plain references to its tensors and layers.

    `self.fc1.weight` of a module is found by a search that takes longer than the product of a small layer.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph
        self._refer()

    def forward(self, *inputs: Tensor) -> Any:
        """What the graph computes."""
        return self._run(self._names, *inputs)

    def _refer(self) -> None:
        self._run = type(self.graph).forward
        self._names = SimpleNamespace()
        for node in self.graph.graph.nodes:
            if node.op in ("get_attr", "call_module"):
                _set(self._names, str(node.target), _find(self.graph, str(node.target)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fast:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._refer()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_run", "_names")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._refer()


def _find(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name)
    return root


def _set(names: SimpleNamespace, path: str, value: Any) -> None:
    *owners, last = path.split(".")
    for owner in owners:
        if not hasattr(names, owner):
            setattr(names, owner, SimpleNamespace())
        names = getattr(names, owner)
    setattr(names, last, value)


class Exported(nn.Module):
    """A network for inference alone; it is called as the original is.

    Arguments that were no tensors in the example (a task, say) are part of the network and must stay the same.

    plan: what was chosen and why; print it.
    fixed: all arguments of the example by name, in the order of `forward`, if the network takes tensors alone.
    """

    def __init__(self, network: nn.Module, plan: Plan, fixed: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.network = network
        self.plan = plan
        self._fast = isinstance(network, Fast)
        self._all = None if fixed is None else tuple(fixed)
        self._fixed = {n: v for n, v in (fixed or {}).items() if not isinstance(v, Tensor)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the original network, up to rounding."""
        if self._all is not None and (kwargs or len(args) != len(self._all)):
            args, kwargs = self._tensors(args, kwargs), {}
        elif self._fixed:
            args = self._tensors(args, {})
        return self.network.forward(*args) if self._fast else self.network(*args, **kwargs)

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

    def train(self, mode: bool = True) -> Exported:
        """Refused: there is nothing here to train."""
        if mode:
            raise ValueError("an exported network only answers; train the model it was made from")
        return super().train(False)
