"""Figures in one style: colours, labels, curves, densities."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerprop_paper import report
from powerprop_paper.report import Bars, Curve, Image, Mean, Point, figures, style
from powerprop_paper.report.curve import Named, end_labels, keep_apart, point_labels
from powerprop_paper.report.style import (
    ALPHA_COLOURS,
    BASELINE,
    HUES,
    METHODS,
    NEUTRALS,
    PAPER,
    alpha_colour,
    alpha_look,
    method_look,
    on_dark,
)
from powerprop_paper.report.weights import bandwidth
from reports import accuracy_table, curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def size_of(path: Path) -> tuple[float, float]:
    found = re.search(r'<svg [^>]*?width="([0-9.]+)pt" height="([0-9.]+)pt"', path.read_text())
    assert found is not None
    return float(found[1]), float(found[2])


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
    assert len({alpha_look(alpha).marker for alpha in (1, *ALPHA_COLOURS)}) == 10


def test_other_alphas_lie_between_their_neighbours() -> None:
    assert alpha_colour(2.0) == alpha_colour(2) == ALPHA_COLOURS[2.0]
    assert luminance(alpha_colour(2)) < luminance(alpha_colour(2.5)) < luminance(alpha_colour(3))
    assert alpha_colour(1.05) not in {BASELINE, ALPHA_COLOURS[1.125]}
    assert alpha_colour(10) == alpha_colour(50) != alpha_colour(5)


DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""What is left of linear RGB (Machado, Oliveira and Fernandes, 2009, severity 1)."""
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def seen(colour: str, deficiency: str) -> np.ndarray:
    """CIELAB coordinates of a colour as somebody with a deficiency sees it."""
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    white = np.array([0.95047, 1.0, 1.08883])
    x = TO_XYZ @ np.clip(np.array(DEFICIENCIES[deficiency]) @ linear, 0, 1) / white
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(colour: str, ground: str) -> float:
    light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize(
    "colours",
    [
        HUES,
        [alpha_colour(alpha) for alpha in (1, 2, 3, 4, 5)],
        [alpha_colour(alpha) for alpha in (1, 1.125, 1.25, 1.375, 1.5)],
    ],
    ids=["methods", "one-shot powers", "continual powers"],
)
def test_colours_stay_apart_for_colour_blind_readers(colours: list[str], deficiency: str) -> None:
    """At least ten units of CIELAB, where two or three can just be told apart; on light pages and on dark ones."""
    for shown in (colours, [on_dark(colour) for colour in colours]):
        places = [seen(colour, deficiency) for colour in shown]
        assert min(np.linalg.norm(a - b) for i, a in enumerate(places) for b in places[:i]) > 10


@pytest.mark.parametrize("colour", [*HUES, *ALPHA_COLOURS.values()])
def test_colours_are_legible_on_light_and_dark(colour: str) -> None:
    assert contrast(colour, PAPER) > 2.8
    assert contrast(on_dark(colour), NEUTRALS[PAPER]) > 2.8


def test_methods_differ_in_colour_or_marker_and_keep_their_hue_with_powerprop() -> None:
    assert len(set(METHODS.values())) == len(METHODS)
    assert method_look("Powerprop + EWC") == method_look("EWC") == METHODS["EWC"]
    with pytest.raises(ValueError, match=r"method 'Dropout' has no colour yet: add a row to METHODS"):
        method_look("Dropout")


def test_methods_of_one_figure_differ_in_colour() -> None:
    from powerprop_paper.experiments.sparse import DRAWN
    from powerprop_paper.sparse_methods import METHODS as SPARSE_METHODS

    drawn = {SPARSE_METHODS[name.removeprefix("pp-")].label for name in DRAWN}
    assert len({method_look(method).colour for method in drawn}) == len(drawn)


@pytest.mark.parametrize("alpha", [0.5, math.nan, math.inf, -1.0])
def test_impossible_alpha_has_no_colour(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"alpha must be at least 1, got {alpha}"):
        alpha_colour(alpha)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_labels_are_kept_apart_in_order(wanted: list[float]) -> None:
    result = keep_apart(np.array(wanted), 0.05)
    order = np.argsort(wanted, kind="stable")
    assert (np.diff(result[order]) >= 0.05 - 1e-9).all()
    assert result.min() >= -1e-9
    assert result.max() <= 1 + 1e-9


def test_labels_that_do_not_touch_stay() -> None:
    np.testing.assert_allclose(keep_apart(np.array([0.9, 0.1, 0.5]), 0.05), [0.9, 0.1, 0.5])
    np.testing.assert_allclose(keep_apart(np.array([0.5, 0.5]), 0.1), [0.45, 0.55])


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


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Image]:
    """One of every kind, drawn without touching the global state of matplotlib."""
    import matplotlib

    before, pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    found = draw_all(folder := tmp_path_factory.mktemp("figures"))
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == pyplot
    assert sorted(folder.iterdir()) == sorted(image.path for image in found)
    return found


def draw_all(folder: Path) -> list[Image]:
    random = np.random.default_rng(0)
    before = random.normal(0, 0.05, 3000)
    after = before * random.uniform(-0.2, 2, 3000)
    kept = np.abs(after) > np.quantile(np.abs(after), 0.9)
    steps = Curve("loss", None, np.arange(0, 20_000, 400), np.linspace(2, 0.1, 50))
    matrix = np.where(np.tri(4, dtype=bool), 0.97, np.nan)
    means = [Mean.of([0.9, 0.92]), None]
    series = [Bars("α = 1", 1.0, means), Bars("α = 2", 2.0, [Mean.of([0.95]), Mean.of([0.9])])]
    curves = [curve(1.0), curve(2.0), curve(2.5, seeds=1)]
    methods = [
        Curve("RigL", None, [0.9, 0.95], [[0.9, 0.8]], method="RigL", plain=True),
        Curve("Powerprop + RigL", None, [0.9, 0.95], [[0.9, 0.85]], method="RigL"),
    ]
    points = [Point("EWC", 10.0, Mean.of([0.5, 0.6])), Point("Powerprop + EWC", 11.0, Mean.of([0.55]))]
    return [
        report.pruning_curves(curves, folder / "pruning.svg", "Pruning", highlight=(0.015, 0.055)),
        report.lines(methods, folder / "methods.svg", "Methods", "sparsity", "accuracy", percent=True, fractions=True),
        report.scatter(points, folder / "points.svg", "Points", "bytes", "accuracy", percent=True, logx=True),
        report.weight_change(before, after, kept, folder / "weights.svg", "Weights"),
        report.lines([steps], folder / "loss.svg", "Loss", "step", "loss"),
        report.lines([steps], folder / "changes.svg", "Loss", "step", "loss", changes=([2.0, 5.0], [3.0])),
        report.lines(curves, folder / "log.svg", "Log", "batch", "found", percent=True, logx=True),
        report.lines(methods, folder / "logs.svg", "Logs", "sparsity", "seconds", logx=True, logy=True),
        report.heatmap(matrix, folder / "small.svg", "Matrix"),
        report.heatmap(np.full((30, 40), 0.5), folder / "large.svg", "Matrix"),
        report.bars(["SET", "RigL"], series, folder / "bars.svg", "Bars", "accuracy"),
        report.bars(["SET", "RigL"], series, folder / "dots.svg", "Dots", "accuracy", zoom=True),
    ]


def test_figures_have_a_size_and_words(images: list[Image]) -> None:
    for image in images:
        width, height = size_of(image.path)
        assert width > 300
        assert height > 120
        assert len(image.alt) > 20


def test_a_figure_is_the_same_every_time(tmp_path: Path) -> None:
    first = report.pruning_curves([curve()], tmp_path / "a.svg", "t")
    second = report.pruning_curves([curve()], tmp_path / "b.svg", "t")
    assert first.path.read_bytes() == second.path.read_bytes()


def test_the_colour_of_alpha_is_in_the_picture(tmp_path: Path) -> None:
    text = report.pruning_curves([curve(1.0), curve(4.0)], tmp_path / "a.svg", "t").path.read_text()
    for alpha, there in ((1, True), (4, True), (2, False)):
        assert (f"stroke: {alpha_colour(alpha)}" in text) == there


def test_pictures_fit_dark_pages(images: list[Image]) -> None:
    """The ground is transparent, and every colour has a rule for dark pages."""
    for image in images:
        text = image.path.read_text()
        drawn, rules = text.split("</style>", 1)[1], text.split("</style>", 1)[0]
        assert not re.search(r'id="patch_1">\s*<path[^>]*fill: #', drawn), image.path
        for part, colour in set(re.findall(r"(fill|stroke): (#[0-9a-f]{6})", drawn)):
            if on_dark(colour) != colour:
                assert f'[style*="{part}: {colour}"] {{ {part}: {on_dark(colour)} !important }}' in rules


def text_boxes(axes: Axes) -> list[Any]:
    figure = axes.figure
    figure.draw_without_rendering()
    return [text.get_window_extent() for text in axes.texts]


def apart(boxes: list[Any]) -> bool:
    return not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_names_at_the_ends_of_lines_do_not_overlap_and_stand_outside() -> None:
    figure = style.figure(7, 4)
    axes = figure.add_subplot()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    ends = [Named(1.0, 0.5 + 0.001 * i, f"Powerprop + method {i}", HUES[i]) for i in range(8)]
    end_labels(axes, ends)
    boxes = text_boxes(axes)
    assert apart(boxes)
    assert min(box.x0 for box in boxes) > axes.get_window_extent().x1


def test_names_beside_points_do_not_overlap() -> None:
    figure = style.figure(8.6, 5.2)
    axes = figure.add_subplot()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    random = np.random.default_rng(0)
    names = [*METHODS][11:31]
    places = [(0.5, 0.5), (0.5, 0.51), (0.49, 0.5), *random.uniform(0.05, 0.95, (len(names) - 3, 2))]
    point_labels(axes, [Named(x, y, name, HUES[0]) for name, (x, y) in zip(names, places, strict=True)])
    assert apart(text_boxes(axes))


def test_tasks_and_steps_have_whole_ticks(tmp_path: Path) -> None:
    figure = style.figure(5, 4)
    axes = figure.add_subplot()
    tasks = Curve("c", 2, [1, 2, 3], [0.9, 0.8, 0.7])
    axes.plot(tasks.positions, tasks.mean)
    figures._x_axis(axes, [tasks], logx=False, fractions=False)
    figure.draw_without_rendering()
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_dashes_are_never_data(tmp_path: Path) -> None:
    curves = [curve(1.0), curve(2.0)]
    args = (tmp_path / "a.svg", "t", "x", "y")
    without = report.lines(curves, *args).path.read_text()
    beside = report.lines(curves, *args, changes=([0.5], [])).path.read_text()
    dashed = re.compile(r"stroke-dasharray: [0-9]")
    assert not dashed.search(without)
    assert len(dashed.findall(beside)) == 1


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda p: report.pruning_curves([], p, "t"), "figure 't' needs at least one curve"),
        (lambda p: report.pruning_curves([Curve("c", 2, [0.5], [97.0])], p, "t"), r"fractions in \[0, 1\], got 97"),
        (lambda p: report.pruning_curves([Curve("c", 2, [50.0], [0.9])], p, "t"), r"weights kept .* \(0, 1\], got 50"),
        (lambda p: report.lines([Curve("c", 2, [0, 1], [1, 2])], p, "t", "x", "y", logx=True), "positive x, got 0"),
        (lambda p: report.lines([Curve("c", 2, [0, 1], [0, 2])], p, "t", "x", "y", logy=True), "positive y, got 0"),
        (lambda p: report.heatmap([0.5, 0.6], p, "t"), r"matrix \(rows, columns\), got shape \(2,\)"),
        (lambda p: report.heatmap([[97.0]], p, "t"), "needs fractions"),
        (lambda p: report.heatmap([[math.nan]], p, "t"), "no finite value"),
        (lambda p: report.bars([], [], p, "t", "x"), "needs labels and series, got 0 and 0"),
        (lambda p: report.bars(["a"], [Bars("s", 1, [])], p, "t", "x"), "series 's' has 0 means, expected 1"),
        (lambda p: report.scatter([], p, "t", "x", "y"), "figure 't' needs at least one point"),
        (lambda p: report.scatter([Point("EWC", 0, Mean.of([1]))], p, "t", "x", "y", logx=True), "positive x, got 0"),
        (lambda p: report.pruning_curves([curve()], p.with_suffix(".pdf"), "t"), "written as .svg, got"),
        (lambda p: report.weight_change([1, 2], [1], [True], p, "t"), r"one shape, got \(2,\), \(1,\), \(1,\)"),
        (lambda p: report.weight_change([1, 2], [1, 2], [True, False], p, "t"), "two weights must survive, got 1 of 2"),
        (lambda p: report.weight_change([1, math.inf], [1, 2], [1, 1], p, "t"), "must be finite"),
        (lambda p: report.weight_change([1, 2], [1, 2], [1, 1], p, "t", limit=-1), "limit must be positive, got -1"),
    ],
)
def test_bad_figures_are_refused_and_leave_no_file(draw, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "figure.svg")
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(report.MissingMatplotlibError, match=r"pip install 'powerprop\[paper\]'"):
        report.pruning_curves([curve()], tmp_path / "a.svg", "t")
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


def test_the_tables_of_the_documentation_are_those_of_the_figures() -> None:
    text = (Path(__file__).parent.parent / "docs" / "figures.md").read_text(encoding="utf-8")
    looks = {f"{alpha:g}": alpha_look(alpha) for alpha in (1, *ALPHA_COLOURS)} | METHODS
    rows = [line for line in text.splitlines() if "`#" in line]
    assert rows == [f"| {name} | `{look.colour}` | `{look.marker}` |" for name, look in looks.items()]
