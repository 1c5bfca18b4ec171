"""What one ImageNet training found, as it stands in result.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trained:
    """A network at the end of its training.

    Args:
        accuracy: top-1, on the validation pictures.
        sparsity: of all layers together.
        kept: fraction of weights left, by layer.
        grid: fractions kept by one-shot pruning; None but for dense trainings, as are the next two.
        oneshot: accuracy at each, the network as it is.
        recalibrated: accuracy at each with batch norms measured anew.
    """

    accuracy: float
    sparsity: float
    kept: dict[str, float]
    grid: list[float] | None = None
    oneshot: list[float] | None = None
    recalibrated: list[float] | None = None

    def __post_init__(self) -> None:
        for name in ("oneshot", "recalibrated"):
            values, wanted = getattr(self, name) or [], self.grid or []
            if len(values) != len(wanted):
                raise ValueError(f"{name!r} must have {len(wanted)} values, one for each of 'grid', got {len(values)}")
