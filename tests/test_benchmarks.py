"""The benchmark page: its tables, pictures, limits and fitted exponents, without measuring anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _beside_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def test_a_part_is_a_table_with_a_picture_and_knows_its_limits(tmp_path: Path) -> None:
    from parts import Part

    rows = [("α = 2", [1.05, 1.6]), ("α = 1.5", [1.31, None])]
    part = Part("a-step", "A step", "Of something.", ("fused", "textbook"), rows, limits={"α = 1.5 | fused": 1.25})
    assert part.exceeded() == ["A step, α = 1.5, fused: 1.310x, limit 1.25x"]
    text = part.markdown(tmp_path)
    assert "| α = 2 | 1.05x | 1.60x |" in text
    assert "| α = 1.5 | 1.31x |  |" in text
    assert "1 of 1 limits exceeded" in text
    assert (tmp_path / "a-step.svg").stat().st_size > 1000


def test_exponents_of_made_up_costs(tmp_path: Path) -> None:
    from growth import Growth, markdown

    sizes = (10, 100, 1000, 10000)
    curves = [
        Growth("linear", "weights", "s", sizes, [1.0 + 0.01 * n for n in sizes]),
        Growth("constant", "tasks", "bytes", sizes, [5.0] * 4),
        Growth("square", "weights", "s", sizes, [float(n * n) for n in sizes]),
    ]
    assert [round(c.exponent, 1) for c in curves] == [1.0, 0.0, 2.0]
    text = markdown(curves, tmp_path)
    assert "| square | weights, 10 to 10,000 | 100 s | 1e+08 s | 2.00 |" in text
    assert {p.name for p in tmp_path.iterdir()} == {"growth-weights-s.svg", "growth-tasks-bytes.svg"}


def test_every_quick_ratio_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that stands still for everybody: all ratios are 1."""
    import quick

    monkeypatch.setattr(quick, "best_times", lambda steps, *_: dict.fromkeys(steps, 1.0))
    monkeypatch.setattr(quick, "layer", lambda weights: _small())
    found = {name: ratio for case in quick.CASES.values() for name, ratio in case().items()}
    bounds = json.loads((BENCHMARKS / "bounds.json").read_text())
    assert found == dict.fromkeys(bounds, 1.0)
    assert all(1.0 <= bound <= 1.6 for bound in bounds.values())


def test_memory_is_counted_from_the_tensors_there_are() -> None:
    from memory import METHODS, bytes_per_weight

    assert bytes_per_weight(METHODS["RigL"], 1.0, torch.float32, False) == pytest.approx(1.0, abs=0.01)
    assert bytes_per_weight(None, 1.5, torch.float32, False) == pytest.approx(8.0, abs=0.01)


def _small() -> Any:
    made = torch.nn.Linear(8, 8, bias=False)
    made.weight.grad = torch.ones_like(made.weight)
    return made
