"""Which units of a layer can be seen from where a network goes on: found by changing them one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from powerprop.continual.layers import channels
from powerprop.continual.seeds import drawing_from

__all__ = ["units_seen"]

PROBES = (torch.nan, 1.0, -1.0)
"""A unit is seen where one of these in its place changes something: NaN gets through all arithmetic, the numbers
through comparisons."""
ROWS = 256
"""Units that are looked at in one pass, a row of the batch for each."""


@torch.no_grad()
def units_seen(
    model: Callable[[Tensor], Any], x: Tensor, layers: Mapping[str, nn.Module], gates: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """For every layer the output units that reach an open gate of a later layer's input, or the model's output, without
    passing through another layer on the way. A layer that is not called is taken to be seen all of it.

    model: in evaluation mode; its rows are computed one by one.
    x: one input, (1, …).
    gates: layer -> which of its inputs are open; all of them where it has none.
    """
    with _Probe(layers, gates).hooked() as probe:
        return {name: probe.seen(name, model, x) for name in layers}


class _Probe:
    """Puts 0 for the output of all layers, but for one unit of one layer, and notes what their inputs are then."""

    def __init__(self, layers: Mapping[str, nn.Module], gates: Mapping[str, Tensor]) -> None:
        self.layers, self.gates = layers, gates
        self.name, self.units, self.value, self.notes = "", torch.arange(0), 0.0, list[Tensor]()
        self.called = False

    @contextmanager
    def hooked(self) -> Iterator[_Probe]:
        handles = [layer.register_forward_pre_hook(self._note(name)) for name, layer in self.layers.items()]
        handles += [layer.register_forward_hook(self._put(name)) for name, layer in self.layers.items()]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str) -> Callable[..., None]:
        def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found = channels(layer, inputs[0])
            self.notes.append(found[..., self.gates[name]] if name in self.gates else found)

        return note

    def _put(self, name: str) -> Callable[..., Tensor]:
        def put(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
            made = torch.zeros_like(output)
            if name == self.name:
                self.called = True
                units = made.movedim(-1, 1) if isinstance(layer, nn.Linear) else made
                units[torch.arange(len(self.units)), self.units] = self.value
            return made

        return put

    def seen(self, name: str, model: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        layer = self.layers[name]
        count = len(layer.weight)  # type: ignore[arg-type]
        found, self.name, self.called = torch.zeros(count, dtype=torch.bool), name, False
        for units in torch.split(torch.arange(count), ROWS):
            self.units = units
            before, *after = (self._run(value, model, x) for value in (0.0, *PROBES))
            for noted in after:
                for old, new in zip(before, noted, strict=True):
                    found[units] |= (old != new).flatten(1).any(1).cpu()
        return found | (not self.called)

    def _run(self, value: float, model: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
        """What all layers get and what the model gives; noise is the same in every run."""
        self.value, self.notes = value, []
        with drawing_from(0, x.device):
            outputs = model(x.repeat(len(self.units), *[1] * (x.ndim - 1)))
        return [*self.notes, *_tensors(outputs, len(self.units))]


def _tensors(outputs: Any, rows: int) -> Iterator[Tensor]:
    """All tensors of an answer with a row for every input; those without are the same for all of them."""
    if isinstance(outputs, Tensor):
        yield outputs if outputs.ndim and len(outputs) == rows else outputs.expand(rows, *outputs.shape)
    elif isinstance(outputs, Mapping):
        for each in outputs.values():
            yield from _tensors(each, rows)
    elif isinstance(outputs, (tuple, list)):
        for each in outputs:
            yield from _tensors(each, rows)
