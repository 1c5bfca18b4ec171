"""Which units of a layer can be seen from where a network goes on: found by changing them one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from powerprop.continual.layers import channels
from powerprop.continual.rows import all_tensors, take_rows
from powerprop.continual.seeds import drawing_from

__all__ = ["units_seen"]

PROBES = (torch.nan, 1.0, -1.0)
"""A unit is seen where one of these in its place changes something: NaN gets through all arithmetic, the numbers
through comparisons."""
ROWS = 256
"""Units that are looked at in one pass, a row of the batch for each."""


@torch.no_grad()
def units_seen(
    model: Callable[[Any], Any], x: Any, layers: Mapping[str, nn.Module], gates: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """For every layer the output units that reach an open gate of a later layer's input, or the model's output, without
    passing through another layer on the way. A layer that is not called is taken to be seen all of it.

    model: in evaluation mode; its rows are computed one by one.
    x: a batch of one input, as the model takes it. Where the model gives no answer, all units are taken to be seen.
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

    def seen(self, name: str, model: Callable[[Any], Any], x: Any) -> Tensor:
        layer = self.layers[name]
        count = len(layer.weight)  # type: ignore[arg-type]
        found, self.name, self.called = torch.zeros(count, dtype=torch.bool), name, False
        for units in torch.split(torch.arange(count), ROWS):
            self.units = units
            before, *after = (self._run(value, model, x) for value in (0.0, *PROBES))
            for noted in after:
                if len(noted) != len(before):  # the loss could not be computed of such outputs
                    found[units] = True
                    continue
                for old, new in zip(before, noted, strict=True):
                    found[units] |= (old != new).flatten(1).any(1).cpu()
        return found | (not self.called)

    def _run(self, value: float, model: Callable[[Any], Any], x: Any) -> list[Tensor]:
        """What all layers get and what the model gives; noise is the same in every run."""
        self.value, self.notes, rows = value, [], len(self.units)
        device = next(all_tensors(x)).device
        with drawing_from(0, device):
            try:
                answers = list(all_tensors(model(take_rows(x, torch.zeros(rows, dtype=torch.long)))))
            except Exception:
                if value == 0.0:
                    raise
                return []
        if not answers:
            self.called = False
        return [*self.notes, *(a if a.ndim and len(a) == rows else a.expand(rows, *a.shape) for a in answers)]
