"""The figures of an ImageNet run: training curves, extreme sparsity, one-shot pruning, the smallest weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from powerprop.experiments.imagenet.measured import Measured, column
from powerprop.report import Curve, Image, Section, density, lines, pruning_curves
from powerprop.train import read_metrics


def curves(measured: Sequence[Measured], figures: Path) -> list[Image]:
    """Accuracy during training, first seed; nothing if no training of a single length came to its end."""
    drawn = []
    for m in measured:
        if m.folders and m.cell.times == 1:
            rows = [row for row in read_metrics(m.folders[0] / "metrics.jsonl") if "accuracy" in row]
            steps, values = [row["step"] for row in rows], [row["accuracy"] for row in rows]
            name = m.label if m.cell.oneshot else f"{m.label} {column(m.cell)}"
            drawn.append(Curve(name, None, steps, values, method=m.method, plain=m.cell.alpha == 1))
    if not drawn:
        return []
    caption = (
        "Validation accuracy, first seed. Thick lines and filled markers: with Powerprop; thin and hollow: without."
    )
    return [
        lines(
            drawn, figures / "training.svg", "Accuracy during training", "step", "accuracy", percent=True,
            caption=caption, wide=True,
        )
    ]  # fmt: skip


def extreme(measured: Sequence[Measured], figures: Path) -> list[Section]:
    """Accuracy against sparsity from 95% on, for methods measured at two sparsities or more."""
    rows: dict[str, list[Measured]] = {}
    for m in measured:
        if m.cell.sparsity >= 0.95 and m.cell.distribution == "uniform" and m.cell.times == 1 and m.runs:
            rows.setdefault(m.label, []).append(m)
    drawn = [
        Curve(name, None, [m.cell.sparsity for m in found], [[m.accuracy for m in found]], method=found[0].method,
              plain=found[0].cell.alpha == 1)
        for name, found in rows.items()
        if len(found) > 1
    ]  # fmt: skip
    if not drawn:
        return []
    picture = lines(
        drawn, figures / "extreme.svg", "Extreme sparsity", "sparsity", "accuracy", percent=True, fractions=True,
        wide=True,
    )  # fmt: skip
    return [Section("Extreme sparsity", "Means over the seeds.", [picture])]


def oneshot(measured: Sequence[Measured], figures: Path) -> list[Section]:
    """Figure 3b: accuracy after one-shot pruning; figure 3c: density of the smallest weights."""
    dense = [m for m in measured if m.cell.oneshot and m.runs]
    if not dense:
        return []
    drawn = []
    for m in dense:
        grid, name = m.runs[0].grid or [], f"α = {m.cell.alpha:g}"
        drawn += [
            Curve(name, m.cell.alpha, grid, [run.oneshot or [] for run in m.runs], plain=True),
            Curve(f"{name}, recalibrated", m.cell.alpha, grid, [run.recalibrated or [] for run in m.runs]),
        ]
    picture = pruning_curves(drawn, figures / "oneshot.svg", "One-shot pruning")
    text = (
        "Trained densely, then pruned once by magnitude, without retraining. Thin lines and hollow markers: the "
        "network as it is. Thick and filled: the batch norms' statistics were measured anew after pruning "
        "(`powerprop.recalibrate`), which the paper does not mention."
    )
    return [Section("One-shot pruning (figure 3b, c)", text, [picture, smallest(dense, figures)])]


def smallest(dense: Sequence[Measured], figures: Path) -> Image:
    """The density of the smallest weights of the first seed, over the range of the baseline's."""
    weights = {m.cell.alpha: load_file(m.folders[0] / "smallest.safetensors")["smallest"] for m in dense}
    limit = max(float(np.abs(values).max()) for values in weights.values()) or 1.0
    grid = np.linspace(-0.9 * limit, 0.9 * limit, 201)  # the estimate falls off at the edges
    # A narrow kernel, the same for all, so that peaks are the weights' and not the estimate's.
    drawn = [Curve(f"α = {a:g}", a, grid, density(values, grid, limit / 50)) for a, values in weights.items()]
    count = len(next(iter(weights.values())))
    caption = f"The {count:,} weights of smallest magnitude after dense training, first seed."
    title = f"The {count:,} smallest weights"
    return lines(drawn, figures / "smallest.svg", title, "weight", "density", caption=caption, wide=True)
