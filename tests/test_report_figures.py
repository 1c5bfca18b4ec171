"""Figures in one style: colours, labels, curves, densities."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerprop import report
from powerprop.report import Bars, Cell, Curve
from powerprop.report.curve import spread
from powerprop.report.style import ALPHA_COLOURS, BASELINE, alpha_colour, alpha_marker
from powerprop.report.weights import bandwidth
from reports import accuracy_table, curve


def size_of(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def test_the_baseline_is_grey_and_the_paper_values_are_distinct_and_ordered() -> None:
    assert alpha_colour(1) == BASELINE
    assert len({BASELINE[i : i + 2] for i in (1, 3, 5)}) == 1
    shown = [alpha_colour(alpha) for alpha in ALPHA_COLOURS]
    assert len({*shown, BASELINE}) == 10
    assert [luminance(colour) for colour in shown] == sorted(luminance(colour) for colour in shown)
    assert len({alpha_marker(alpha) for alpha in (1, *ALPHA_COLOURS)}) == 10


def test_other_alphas_lie_between_their_neighbours() -> None:
    assert alpha_colour(2.0) == alpha_colour(2) == ALPHA_COLOURS[2.0]
    assert luminance(alpha_colour(2)) < luminance(alpha_colour(2.5)) < luminance(alpha_colour(3))
    assert alpha_colour(1.05) not in {BASELINE, ALPHA_COLOURS[1.125]}
    assert alpha_colour(10) == alpha_colour(50) != alpha_colour(5)


@pytest.mark.parametrize("alpha", [0.5, math.nan, math.inf, -1.0])
def test_impossible_alpha_has_no_colour(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"alpha must be at least 1, got {alpha}"):
        alpha_colour(alpha)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_labels_are_spread_apart_in_order(wanted: list[float]) -> None:
    result = spread(np.array(wanted), 0.05)
    order = np.argsort(wanted, kind="stable")
    assert (np.diff(result[order]) >= 0.05 - 1e-9).all()
    assert result.min() >= -1e-9
    assert result.max() <= 1 + 1e-9


def test_labels_that_do_not_touch_stay() -> None:
    np.testing.assert_allclose(spread(np.array([0.9, 0.1, 0.5]), 0.05), [0.9, 0.1, 0.5])
    np.testing.assert_allclose(spread(np.array([0.5, 0.5]), 0.1), [0.45, 0.55])


def test_curve_statistics_by_hand() -> None:
    made = Curve("c", 2, [1.0, 0.5], [[0.8, 0.4], [1.0, 0.6]])
    np.testing.assert_allclose(made.positions, [0.5, 1.0])
    np.testing.assert_allclose(made.mean, [0.5, 0.9])
    np.testing.assert_allclose(made.std, [math.sqrt(0.02), math.sqrt(0.02)])
    np.testing.assert_array_equal(Curve("one", 2, [1, 2], [3, 4]).std, [0, 0])


@pytest.mark.parametrize(
    ("x", "values", "message"),
    [
        ([1, 2, 3], [[1, 2]], r"curve 'c': values must be \(seeds, 3\)"),
        ([], [], "values must be"),
        ([[1, 2]], [[1, 2]], "values must be"),
        ([1, 2], [1, math.nan], "must be finite"),
    ],
)
def test_bad_curves_are_refused(x: list, values: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve("c", 2, x, values)


def draw_all(folder: Path) -> list[Path]:
    random = np.random.default_rng(0)
    before = random.normal(0, 0.05, 3000)
    after = before * random.uniform(-0.2, 2, 3000)
    kept = np.abs(after) > np.quantile(np.abs(after), 0.9)
    steps = Curve("loss", None, np.arange(0, 20_000, 400), np.linspace(2, 0.1, 50))
    matrix = np.where(np.tri(4, dtype=bool), 0.97, np.nan)
    cells = [Cell.of([0.9, 0.92]), None]
    series = [Bars("α = 1", 1.0, cells), Bars("α = 2", 2.0, [Cell.of([0.95]), Cell.of([0.9])])]
    curves = [curve(1.0), curve(2.0), curve(2.5, seeds=1)]
    return [
        report.pruning_curves(curves, folder / "pruning.png", "Pruning", highlight=(0.015, 0.055)),
        report.overlap_curves(curves, folder / "overlap.png", "Overlap"),
        report.weight_change(before, after, kept, folder / "weights.png", "Weights"),
        report.lines([steps], folder / "loss.png", "Loss", "step", "loss"),
        report.lines([steps], folder / "changes.png", "Loss", "step", "loss", changes=([2.0, 5.0], [3.0])),
        report.lines(
            curves, folder / "log.png", "Log", "batch", "found", percent=True, logx=True, reference=(0.86, "p")
        ),
        report.heatmap(matrix, folder / "small.png", "Matrix"),
        report.heatmap(np.full((30, 40), 0.5), folder / "large.png", "Matrix"),
        report.bars(["SET", "RigL"], series, folder / "bars.png", "Bars", "accuracy", percent=True),
        report.bars(["SET", "RigL"], series, folder / "dots.png", "Dots", "accuracy", zoom=True, paper=[None, 0.9]),
    ]


def test_figures_are_written_without_touching_global_state(tmp_path: Path) -> None:
    import matplotlib

    before, pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    paths = draw_all(tmp_path / "new")
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == pyplot
    for path in paths:
        width, height = size_of(path)
        assert min(width, height) > 300
        assert path.stat().st_size > 8000
    assert sorted((tmp_path / "new").iterdir()) == sorted(paths)


def test_a_figure_is_the_same_every_time(tmp_path: Path) -> None:
    first = report.pruning_curves([curve()], tmp_path / "a.png", "t")
    second = report.pruning_curves([curve()], tmp_path / "b.png", "t")
    assert first.read_bytes() == second.read_bytes()


def test_the_colour_of_alpha_is_in_the_picture(tmp_path: Path) -> None:
    from matplotlib.image import imread

    def shows(path: Path, colour: str) -> bool:
        wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
        pixels = np.round(imread(path)[..., :3] * 255)
        return bool((np.abs(pixels - wanted).max(axis=-1) <= 1).sum() > 200)

    path = report.pruning_curves([curve(1.0), curve(4.0)], tmp_path / "a.png", "t")
    assert shows(path, alpha_colour(1))
    assert shows(path, alpha_colour(4))
    assert not shows(path, alpha_colour(2))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda p: report.pruning_curves([], p, "t"), "figure 't' needs at least one curve"),
        (lambda p: report.pruning_curves([Curve("c", 2, [0.5], [97.0])], p, "t"), r"fractions in \[0, 1\], got 97"),
        (lambda p: report.pruning_curves([Curve("c", 2, [50.0], [0.9])], p, "t"), r"weights kept .* \(0, 1\], got 50"),
        (lambda p: report.lines([Curve("c", 2, [0, 1], [1, 2])], p, "t", "x", "y", logx=True), "positive x, got 0"),
        (lambda p: report.heatmap([0.5, 0.6], p, "t"), r"matrix \(rows, columns\), got shape \(2,\)"),
        (lambda p: report.heatmap([[97.0]], p, "t"), "needs fractions"),
        (lambda p: report.heatmap([[math.nan]], p, "t"), "no finite value"),
        (lambda p: report.bars([], [], p, "t", "x"), "needs labels and series, got 0 and 0"),
        (lambda p: report.bars(["a"], [Bars("s", 1, [])], p, "t", "x"), "series 's' has 0 cells, expected 1"),
        (lambda p: report.bars(["a"], [Bars("s", 1, [None])], p, "t", "x", paper=[]), "paper has 0 values, expected 1"),
        (lambda p: report.pruning_curves([curve()], p.with_suffix(".pdf"), "t"), "written as .png, got"),
        (lambda p: report.weight_change([1, 2], [1], [True], p, "t"), r"one shape, got \(2,\), \(1,\), \(1,\)"),
        (lambda p: report.weight_change([1, 2], [1, 2], [True, False], p, "t"), "two weights must survive, got 1 of 2"),
        (lambda p: report.weight_change([1, math.inf], [1, 2], [1, 1], p, "t"), "must be finite"),
        (lambda p: report.weight_change([1, 2], [1, 2], [1, 1], p, "t", limit=-1), "limit must be positive, got -1"),
    ],
)
def test_bad_figures_are_refused_and_leave_no_file(draw, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(report.MissingMatplotlibError, match=r"pip install 'powerprop\[report\]'"):
        report.pruning_curves([curve()], tmp_path / "a.png", "t")
    assert "75.0" in accuracy_table().to_markdown()


def test_density_by_hand() -> None:
    # Two kernels of width 1 at ±1: at 0 each gives exp(-1/2)/√(2π).
    expected = math.exp(-0.5) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(report.density([-1.0, 1.0], [0.0], width=1.0), [expected])


def test_density_integrates_to_one_and_finds_the_normal() -> None:
    values = np.random.default_rng(0).normal(0, 2, 20_000)
    grid = np.linspace(-12, 12, 481)
    estimate = report.density(values, grid)
    assert estimate.sum() * (grid[1] - grid[0]) == pytest.approx(1, abs=1e-3)
    assert report.density(values, [0.0])[0] == pytest.approx(1 / (2 * math.sqrt(2 * math.pi)), rel=0.05)


def test_bandwidth_by_hand() -> None:
    # σ = √2, quartiles 2 and 4: min(√2, 2/1.34) = √2.
    assert bandwidth(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == pytest.approx(0.9 * math.sqrt(2) * 5**-0.2)
    assert bandwidth(np.zeros(4)) > 0
    with pytest.raises(ValueError, match="at least two values, got 1"):
        report.density([1.0], [0.0])


def test_weight_change_numbers_by_hand() -> None:
    stats = report.weight_change_stats([1, -1, 1, -1], [2, 2, -2, -1], [True, True, False, False])
    assert stats["sign changes"] == 0.5
    assert stats["sign changes of survivors"] == 0.5
    assert stats["kept"] == 0.5
    assert stats["density at zero before"] > 0
