"""What one training of a sparse-training table found, as it stands in result.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trained:
    """A network at the end of its training.

    Args:
        test, validation: accuracies.
        kept: weights that are left, by layer.
        asked: weights that should be left, by layer, or in all where the method may move them between layers.
        sparsity: of all layers together.
        inference_flops: of a forward pass, relative to the dense network.
        training_flops: of the whole training, relative to a dense one of the same length.
    """

    test: float
    validation: float
    kept: dict[str, int]
    asked: dict[str, int] | int
    sparsity: float
    inference_flops: float
    training_flops: float

    @property
    def exact(self) -> bool:
        """True if the weights kept are, to the weight, those asked for."""
        return self.kept == self.asked if isinstance(self.asked, dict) else sum(self.kept.values()) == self.asked
