"""The result of an export: a network for inference, with the plan that made it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook

from powerprop.export.plan import Plan

__all__ = ["Exported", "Fast"]


class Fast(nn.Module):
    """A graph that runs on plain references to its tensors and layers.

    `self.fc1.weight` of a module is found by a search that takes longer than the product of a small layer.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph
        self._start()

    def forward(self, *inputs: Tensor) -> Any:
        """What the graph computes."""
        return self.run(*inputs)

    def _start(self) -> None:
        """`run` is the code of the graph with the references for its `self`: who holds it sees new ones too."""
        self._names = SimpleNamespace()
        self.run = MethodType(type(self.graph).forward, self._names)
        self._refer()

    def _refer(self) -> None:
        for node in self.graph.graph.nodes:
            if node.op in ("get_attr", "call_module"):
                _set(self._names, str(node.target), _find(self.graph, str(node.target)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fast:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._refer()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("run", "_names")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._start()


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
    arguments: of the example by name, in the order of `forward`, if the network takes the tensors among them alone.
    """

    def __init__(self, network: nn.Module, plan: Plan, arguments: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.network = network
        self.plan = plan
        self._all = None if arguments is None else tuple(arguments)
        self._fixed = {n: v for n, v in (arguments or {}).items() if not isinstance(v, Tensor)}
        self._direct = self._inputs_first()
        self._bind()

    def _inputs_first(self) -> int | None:
        """The number of inputs, if a call with so many by place needs no sorting."""
        names = self._all or ()
        count = len(names) - len(self._fixed)
        return count if self._fixed.keys().isdisjoint(names[:count]) else None

    def _bind(self) -> None:
        """A bound method is found without the search that a submodule takes; hooks of a dense model still run."""
        self._answer = self.network.run if isinstance(self.network, Fast) else self.network.__call__

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Exported:
        """A copy of its own; torch itself does not copy sparse matrices deeply."""
        memo.update({id(buffer): buffer.clone() for buffer in self.buffers() if buffer.layout == torch.sparse_csr})
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        result.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if k != "_answer"}, memo))
        result._bind()
        return result

    def train(self, mode: bool = True) -> Exported:
        """Refused: there is nothing here to train."""
        if mode:
            raise ValueError("an exported network only answers; train the model it was made from")
        return super().train(False)
