"""What the training of one network of a one-shot experiment found, as it stands in result.json."""

from __future__ import annotations

from dataclasses import dataclass, field

CURVES = ("test", "validation", "overlap")


@dataclass(frozen=True)
class Pruned:
    """A network that was trained densely and pruned once, to each fraction of the grid.

    Args:
        kept: the grid, rising to 1.
        test, validation: accuracy at each of its points.
        overlap: of the masks before and after training, at each.
        sign_changes, sign_changes_of_survivors: fractions of all weights and of those kept in the end.
        near_zero_before, near_zero_after: fractions of all weights, before and after training.
        others: test accuracy at each point for every further way to prune.
    """

    kept: list[float]
    test: list[float]
    validation: list[float]
    overlap: list[float]
    sign_changes: float
    sign_changes_of_survivors: float
    near_zero_before: float
    near_zero_after: float
    others: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in {**{name: getattr(self, name) for name in CURVES}, **self.others}.items():
            if len(values) != len(self.kept):
                raise ValueError(
                    f"{name!r} must have {len(self.kept)} values, one for each of 'kept', got {len(values)}"
                )
