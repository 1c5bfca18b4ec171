"""Reports: cells and tables by hand, figures in one style, pages that carry everything inside."""

from __future__ import annotations

import io
import math
import re
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from powerprop import report
from powerprop.report import Bars, Cell, Column, Curve, Image, Page, Section, Stat, Table
from powerprop.report.curve import spread
from powerprop.report.style import ALPHA_COLOURS, BASELINE, alpha_colour, alpha_marker
from powerprop.report.weights import bandwidth

HOSTILE = '<script>alert("x")</script> & | *bold*'
KEPT = np.geomspace(0.01, 1.0, 20)


def curve(alpha: float | None = 2.0, seeds: int = 3) -> Curve:
    noise = np.random.default_rng(0).uniform(-0.02, 0.02, (seeds, len(KEPT)))
    return Curve(f"α = {alpha}", alpha, KEPT, 0.1 + 0.8 * KEPT**0.3 + noise)


def size_of(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


# --- cells ---------------------------------------------------------------------------------------------------------


def test_cell_by_hand() -> None:
    cell = Cell.of([97.0, 98.0, 99.0])
    assert (cell.mean, cell.std, cell.n) == (98.0, 1.0, 3)
    # Sum of squared deviations 2·(0.5)² = 0.5, divided by n - 1 = 1.
    assert Cell.of([1.0, 2.0]).std == pytest.approx(math.sqrt(0.5))


def test_cell_of_one_value_has_no_spread() -> None:
    cell = Cell.of([0.97316])
    assert math.isnan(cell.std)
    assert str(cell) == "0.9732 (n=1)"


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [
        (97.3149, 0.1234, "97.31 ± 0.12"),
        (97.3149, 1.234, "97.3 ± 1.2"),
        (97.3149, 12.34, "97 ± 12"),
        (123456.0, 3210.0, "123456 ± 3210"),
        (0.5, 0.0, "0.5000 ± 0.0000"),
        (0.0, 0.0, "0.0 ± 0.0"),
        (1.0, 1e-12, "1.000000 ± 0.000000"),
        (-0.001, 0.5, "0.00 ± 0.50"),
    ],
)
def test_cell_shows_two_digits_of_the_spread(mean: float, std: float, text: str) -> None:
    assert Cell(mean, std, 5).format() == text


@pytest.mark.parametrize(("values", "message"), [([], "at least one value"), ([1.0, math.nan], "must be finite")])
def test_cell_refuses_what_has_no_mean(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cell.of(values)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_cell_equals_numpy(values: list[float]) -> None:
    cell = Cell.of(values)
    assert cell.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert cell.std == pytest.approx(np.std(values, ddof=1), rel=1e-6, abs=1e-6)
    assert cell.scaled(100).std == pytest.approx(100 * cell.std)


# --- tables --------------------------------------------------------------------------------------------------------


def accuracy_table() -> Table:
    columns = ["method", Column("accuracy (%)", best="max", percent=True, digits=1), Column("paper", paper=True)]
    rows = [["α = 1", Cell.of([0.5, 0.6]), 55.1], ["α = 2", Cell.of([0.7, 0.8]), None]]
    return Table("MNIST", columns, rows, "At 2%.")


def test_markdown_by_hand() -> None:
    assert accuracy_table().to_markdown() == (
        "**MNIST**\n\n"
        "| method | accuracy (%) | paper |\n"
        "| --- | ---: | ---: |\n"
        "| α = 1 | 55.0 ± 7.1 | 55.1 |\n"
        "| α = 2 | **75.0 ± 7.1** |  |\n\n"
        "At 2%. Mean ± standard deviation of n = 2 runs.\n"
    )


def test_html_marks_the_best_and_leaves_missing_paper_values_empty() -> None:
    text = accuracy_table().to_html()
    assert '<td class="num"><strong>75.0 ± 7.1</strong></td><td class="num paper"></td>' in text
    assert text.count("<strong>") == 1


def test_different_counts_are_shown_in_each_cell() -> None:
    table = Table("t", ["a"], [[Cell.of([1.0, 2.0])], [Cell.of([1.0, 2.0, 3.0])]])
    assert "(n=2)" in table.to_markdown()
    assert "(n=3)" in table.to_markdown()
    assert "runs" not in table.note


def test_equal_looking_values_are_all_best() -> None:
    table = Table("t", [Column("loss", best="min", digits=1)], [[0.11], [0.12], [0.2], ["0.0"], [math.nan]])
    assert table.to_markdown().count("**0.1**") == 2
    assert "**0.0**" not in table.to_markdown()


def test_a_column_shares_its_digits() -> None:
    rows = [[Cell(97.123, 0.12, 3)], [Cell(96.456, 0.15, 3)], [Cell(90.789, 1.5, 3)]]
    text = Table("t", ["acc"], rows).to_markdown()
    assert "97.12 ± 0.12" in text
    assert "90.79 ± 1.50" in text


def test_numbers_and_text_are_shown_plainly() -> None:
    text = Table("", ["a", "b", "c"], [[1234567, 0.125, "x"]]).to_markdown()
    assert "| 1,234,567 | 0.125 | x |" in text
    assert not text.startswith("**")


def test_hostile_text_is_escaped() -> None:
    table = Table(HOSTILE, [HOSTILE], [[HOSTILE], ["a\nb"]], HOSTILE)
    assert "<script" not in table.to_html()
    assert "&lt;script&gt;" in table.to_html()
    markdown = table.to_markdown()
    assert "\\<script\\>" in markdown
    assert "\\| \\*bold\\*" in markdown
    assert "| a b |" in markdown
    rendered = Table("[red]t", ["[bold]c"], [["[/x]v"]]).to_rich()
    output = io.StringIO()
    Console(width=80, file=output).print(rendered)
    assert all(word in output.getvalue() for word in ("[red]t", "[bold]c", "[/x]v"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Table("t", ["a", "b"], [[1]]), "row 0 of table 't' has 1 values, expected 2"),
        (lambda: Column("a", best="highest"), "best must be 'max', 'min' or None, got 'highest'"),
        (lambda: Column("a", digits=-1), "digits must be in"),
    ],
)
def test_bad_tables_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- style ---------------------------------------------------------------------------------------------------------


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


# --- curves --------------------------------------------------------------------------------------------------------


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


# --- figures -------------------------------------------------------------------------------------------------------


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


# --- weights -------------------------------------------------------------------------------------------------------


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


# --- pages ---------------------------------------------------------------------------------------------------------


class Links(HTMLParser):
    """Everything a browser would load or follow, and whether all tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.anchors: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in {"meta", "link", "img"}:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value or "")
            if name in {"src", "href", "srcset"}:
                (self.anchors if tag == "a" else self.sources).append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = report.pruning_curves([curve()], tmp_path_factory.mktemp("figures") / "a.png", "t")
    sections = [
        Section("Accuracy", f"First `code`.\n\n{HOSTILE}", [path, Image(path, HOSTILE, wide=True)], [accuracy_table()]),
        Section("Accuracy", "Second."),
        Section("α = 4"),
    ]
    config = {"alpha": [1, 2], "sgd": {"lr": 0.1, "note": HOSTILE}, "empty": {}}
    stats = [Stat("Gain", "+30 points"), ("Dense", HOSTILE, "baseline")]
    return Page(f"Run {HOSTILE}", HOSTILE, sections, config, {"torch": "2.13"}, "Figure 2.", stats)


def test_a_page_is_one_file_that_loads_nothing(page: Page, tmp_path: Path) -> None:
    path = report.write_page(page, tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == [path]
    text = path.read_text(encoding="utf-8")
    found = Links(text)
    assert not found.open
    assert "script" not in found.tags
    assert all(source.startswith("data:") for source in found.sources)
    assert found.tags.count("img") == 2
    assert not re.search(r"url\(|@import|https?:", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_everything_on_a_page_is_escaped_and_present(page: Page) -> None:
    text = report.render_page(page)
    assert "<script" not in text
    for part in ("sgd.lr", "0.1", "[1, 2]", "+30 points", "2.13", "Figure 2.", "<code>code</code>", "75.0 ± 7.1"):
        assert part in text
    assert text.count("<p>") == 4


def test_anchors_are_distinct_and_lead_somewhere(page: Page) -> None:
    for text in (report.render_page(page), report.render_index([page, page], "All")):
        found = Links(text)
        assert len(set(found.ids)) == len(found.ids)
        assert found.anchors
        assert {anchor.removeprefix("#") for anchor in found.anchors} <= set(found.ids)


def test_an_index_holds_every_run(page: Page, tmp_path: Path) -> None:
    path = report.index_page([page, page], tmp_path, title="All runs", intro="Two.")
    found = Links(path.read_text(encoding="utf-8"))
    assert path.name == "index.html"
    assert found.tags.count("article") == 2
    assert found.tags.count("img") == 4
    assert found.tags.count("h1") == 1
    with pytest.raises(ValueError, match="at least one page"):
        report.index_page([], tmp_path)


def test_a_failed_page_leaves_the_old_one(page: Page, tmp_path: Path) -> None:
    old = report.write_page(page, tmp_path).read_bytes()
    text = tmp_path / "a.txt"
    text.write_text("not a picture")
    with pytest.raises(ValueError, match=r"only PNG images can be embedded, got '.*a.txt'"):
        report.write_page(Page("t", "", [Section("s", figures=[text])]), tmp_path)
    assert (tmp_path / "report.html").read_bytes() == old
