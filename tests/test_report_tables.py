"""Means and tables, by hand."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from powerprop_paper.report import Column, Mean, Table
from reports import HOSTILE, accuracy_table, html_of


def test_mean_by_hand() -> None:
    mean = Mean.of([97.0, 98.0, 99.0])
    assert (mean.mean, mean.std, mean.n) == (98.0, 1.0, 3)
    # Sum of squared deviations 2·(0.5)² = 0.5, divided by n - 1 = 1.
    assert Mean.of([1.0, 2.0]).std == pytest.approx(math.sqrt(0.5))


def test_mean_of_one_value_has_no_deviation() -> None:
    mean = Mean.of([0.97316])
    assert math.isnan(mean.std)
    assert str(mean) == "0.9732 (n=1)"


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
def test_mean_shows_two_digits_of_the_deviation(mean: float, std: float, text: str) -> None:
    assert Mean(mean, std, 5).format() == text


@pytest.mark.parametrize(("values", "message"), [([], "at least one value"), ([1.0, math.nan], "must be finite")])
def test_mean_refuses_what_has_no_mean(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mean.of(values)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_mean_equals_numpy(values: list[float]) -> None:
    mean = Mean.of(values)
    assert mean.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert mean.std == pytest.approx(np.std(values, ddof=1), rel=1e-6, abs=1e-6)
    assert mean.scaled(100).std == pytest.approx(100 * mean.std)


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
    text = html_of(accuracy_table())
    assert '<td class="num"><strong>75.0 ± 7.1</strong></td><td class="num paper"></td>' in text
    assert text.count("<strong>") == 1


def test_the_first_value_of_a_row_is_its_heading() -> None:
    """It is what stays in sight when the others scroll."""
    assert '<tr><th scope="row">α\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}1</th><td' in html_of(accuracy_table())


def test_tables_of_many_columns_are_set_smaller_and_may_have_empty_cells() -> None:
    wide = Table("t", [str(i) for i in range(9)], [["EWC", None, Mean.of([1.0, 2.0]), *[None] * 6]])
    assert '<figure class="table many">' in html_of(wide)
    crowded = Table("t", [str(i) for i in range(11)], [[None] * 11])
    assert '<figure class="table crowded">' in html_of(crowded)
    assert '<figure class="table">' in html_of(accuracy_table())
    assert "| EWC |  | 1.50 ± 0.71 |  |" in wide.to_markdown()


def test_a_table_that_claims_nothing_marks_no_best() -> None:
    table = accuracy_table().unmarked()
    assert "**75.0" not in table.to_markdown()
    assert "75.0 ± 7.1" in table.to_markdown()


def test_different_counts_are_shown_with_each_mean() -> None:
    table = Table("t", ["a"], [[Mean.of([1.0, 2.0])], [Mean.of([1.0, 2.0, 3.0])]])
    assert "(n=2)" in table.to_markdown()
    assert "(n=3)" in table.to_markdown()
    assert "runs" not in table.note


def test_equal_looking_values_are_all_best() -> None:
    table = Table("t", [Column("loss", best="min", digits=1)], [[0.11], [0.12], [0.2], ["0.0"], [math.nan]])
    assert table.to_markdown().count("**0.1**") == 2
    assert "**0.0**" not in table.to_markdown()


def test_a_column_shares_its_digits() -> None:
    rows = [[Mean(97.123, 0.12, 3)], [Mean(96.456, 0.15, 3)], [Mean(90.789, 1.5, 3)]]
    text = Table("t", ["acc"], rows).to_markdown()
    assert "97.12 ± 0.12" in text
    assert "90.79 ± 1.50" in text


def test_numbers_and_text_are_shown_plainly() -> None:
    text = Table("", ["a", "b", "c"], [[1234567, 0.125, "x"]]).to_markdown()
    assert "| 1,234,567 | 0.125 | x |" in text
    assert not text.startswith("**")


def test_hostile_text_is_escaped() -> None:
    table = Table(HOSTILE, [HOSTILE], [[HOSTILE], ["a\nb"]], HOSTILE)
    assert "<script" not in html_of(table)
    assert "&lt;script&gt;" in html_of(table)
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
