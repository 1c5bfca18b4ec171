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
    assert part.exceeded() == ["A step, α = 1.5, fused: 1.31x, limit 1.25x"]
    assert part.closest() == "| [A step](#a-step) | α = 1.5, fused | 1.31x | 1.25x |"
    text = part.markdown(tmp_path)
    assert "| | fused | textbook | limit |" in text
    assert "| α = 2 | 1.05x | 1.60x |  |" in text
    assert "| α = 1.5 | **1.31x** |  | 1.25x |" in text
    assert (tmp_path / "a-step.svg").stat().st_size > 1000
    assert Part(**json.loads(json.dumps(part.data()))).exceeded() == part.exceeded()


def test_a_part_may_have_lines_or_no_picture(tmp_path: Path) -> None:
    from parts import Part, anchor

    rows = [("shortlist", [1.0, 2.0, 2.0]), ("exhaustive", [10.0, 1000.0, 100.0])]
    columns = ("1 task", "9 tasks", "growth")
    part = Part("a", "A", "Of tasks.", columns, rows, "ms", positions=[1, 9], axis="tasks")
    assert "exhaustive: 10 at 1, 1,000 at 9" in part.markdown(tmp_path)
    assert "![" not in Part("b", "B", "No picture.", columns, rows, drawn=False).markdown(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"a.svg"}
    assert anchor("Masks of 1,000 tasks") == "masks-of-1000-tasks"


def test_a_page_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is not measured again, until the page is whole."""
    import page
    from growth import Growth
    from parts import Part

    measured: list[str] = []

    def step(quick: bool) -> Part:
        measured.append("step")
        return Part("step", "A step", "Made up.", ("fused",), [("α = 2", [1.05])], limits={"α = 2 | fused": 1.1})

    def curves(quick: bool) -> list[Growth]:
        measured.append("growth")
        if len(measured) == 2:
            raise KeyboardInterrupt
        return [Growth("step, α = 2", "weights", "s", (1, 3, 10, 30), (1.0, 3.0, 10.0, 30.0))]

    monkeypatch.setattr(page, "SECTIONS", {"a step": step, "growth": curves})
    arguments = ["page.py", "--out", str(tmp_path / "out"), "--parts", str(tmp_path / "parts")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(KeyboardInterrupt):
        page.main()
    assert page.main() == 0
    assert measured == ["step", "growth", "growth"]
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| A step, α = 2, times the plain optimiser's; limits kept | 1.05x; 1 of 1 |  |" in text
    assert "| step, α = 2 | weights, 1 to 30 | 1 s | 30 s | 1.00 |" in text
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["parts"][0]["rows"] == [["α = 2", [1.05]]]
    assert not (tmp_path / "parts").exists()
    monkeypatch.setattr(sys, "argv", [*arguments, "--minutes", "-1"])
    assert page.main() == 2
    assert len(measured) == 3


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
    """A copy of the weights while they move, and a byte for the mask."""
    from memory import METHODS, bytes_per_weight

    assert bytes_per_weight(METHODS["RigL"], 1.0, torch.float32) == pytest.approx(5.0, abs=0.01)
    assert bytes_per_weight(None, 1.5, torch.float32) == pytest.approx(4.0, abs=0.01)


def _small() -> Any:
    made = torch.nn.Linear(8, 8, bias=False)
    made.weight.grad = torch.ones_like(made.weight)
    return made
