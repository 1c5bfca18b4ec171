"""From rows to pages: summary.json, the Markdown of a run, the index of all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import toys
from powerprop_paper.cli import FAMILIES, find
from powerprop_paper.commands import BENCHMARKS
from powerprop_paper.folder import write_json
from powerprop_paper.pages import PROVES, Figure, Headline, Page, Section, Stat, command, data_of, numbers, write
from powerprop_paper.report import Bars, Curve, Mean, Point, pruning_curves
from powerprop_paper.report.page import HEADLINE, LONG, index, markdown, write_docs
from powerprop_paper.run import Run
from reports import accuracy_table, curve

DOCS = Path(__file__).parent.parent / "docs" / "results"


def run_of(out: Path, preset: str = "cpu", **changes: Any) -> Run:
    """A run of permuted-mnist that has done nothing."""
    experiment = find("permuted-mnist")
    config = replace(experiment.presets[preset], **changes)
    return Run(experiment, preset, config, out, console=Console(quiet=True))


def written(out: Path, preset: str = "cpu", **changes: Any) -> dict[str, Any]:
    """What summary.json says of a page with everything."""
    figure = Figure("a", pruning_curves, [curve()], title="Accuracy [raw]", caption="Below.")
    sections = [Section("Accuracy", "Text.", [figure], [accuracy_table()])]
    headline = Headline("Powerprop | EPN", "97.5", "97.47")
    page = Page("Title", "Intro.", sections, "Section 5.", [Stat("gain", "+3")], headline, {"gain": float("nan")})
    write(page, run_of(out, preset, **changes))
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


# --- summary.json ---------------------------------------------------------------------------------------------------


def test_a_summary_has_preset_command_settings_and_numbers(tmp_path: Path) -> None:
    summary = written(tmp_path, seeds=7)
    assert summary["command"] == "powerprop run permuted-mnist --preset cpu --seeds 7"
    assert (summary["preset"], summary["config"]["alphas"]) == ("cpu", [1.0, 1.375])
    assert summary["headline"] == {"what": "Powerprop | EPN", "ours": "97.5", "paper": "97.47"}
    assert summary["numbers"] == {"gain": None}, "JSON has no NaN"
    (section,) = summary["sections"]
    (line,) = section["figures"][0]["series"][0]
    assert (line["label"], len(line["mean"]), line["n"]) == ("α = 2.0", 20, 3)
    assert section["tables"][0]["rows"][1] == ["α = 2", Mean.of([0.7, 0.8]).data(), None]


def test_versions_and_lost_jobs_are_those_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toys.BREAK, "nan=0")
    with toys.run_of(tmp_path) as run:
        write(toys.main(run.config, run), run)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["versions"]["torch"] == next(iter(run.rows.values())).versions[0]["torch"]
    jobs = summary["jobs"]
    assert (jobs["done"], len(jobs["diverged"]), jobs["failed"]) == (4, 2, {})
    assert jobs["diverged"]["train/alpha=1,seed=0"] == "the loss is nan at step 2"


def test_whatever_is_drawn_is_plain_data() -> None:
    assert data_of(Curve("a", 2.0, [1, 2], [[0.5, 1.0], [0.5, 0.0]])) == {
        "label": "a", "x": [1, 2], "mean": [0.5, 0.5], "n": 2, "std": [0.0, pytest.approx(0.7071, abs=1e-4)],
    }  # fmt: skip
    assert data_of(Point("rigl", 0.1, Mean.of([0.5]))) == {"label": "rigl", "x": 0.1, "y": Mean.of([0.5]).data()}
    assert data_of([Bars("a", 2.0, [Mean.of([0.5]), None])]) == [{"label": "a", "means": [Mean.of([0.5]).data(), None]}]
    assert data_of({1: ["a", None], "b": (1.0, float("inf"))}) == {"1": ["a", None], "b": [1.0, None]}
    assert numbers(np.zeros((200, 200))) == {"shape": [200, 200]}
    assert numbers(np.zeros(3, dtype=bool)) == {"shape": [3]}


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, ""),
        ({"alphas": (1.0, 1.5), "retrain_steps": 700}, " --retrain-steps 700 --alphas 1 1.5"),
        ({"matrix": False, "rate": "paper"}, " --rate paper --no-matrix"),
        ({"decay": ()}, " --decay"),
    ],
)
def test_the_command_has_what_differs_from_the_preset(changes: dict[str, Any], options: str, tmp_path: Path) -> None:
    assert command(run_of(tmp_path, **changes)) == f"powerprop run permuted-mnist --preset cpu{options}"


# --- Markdown -------------------------------------------------------------------------------------------------------


def test_the_markdown_of_a_run(tmp_path: Path) -> None:
    text = markdown(written(tmp_path, seeds=7))
    assert text.startswith(f"# Title\n\n{HEADLINE}| Powerprop \\| EPN | 97.5 | 97.47 |\n\nIntro.\n\nSection 5.\n\n")
    assert "```\npowerprop run permuted-mnist --preset cpu --seeds 7\n```" in text
    assert "![Accuracy \\[raw\\]: test accuracy against weights kept. α = 2.0: " in text
    assert "](a.svg)\n\n*Below.*" in text
    assert "**75.0" in text
    assert "notes.md" not in text
    assert "\npreset cpu, " in text


def test_long_settings_are_shortened(tmp_path: Path) -> None:
    summary = {**written(tmp_path), "config": {"grid": [*range(LONG + 1)], "alphas": [1, 2]}}
    assert f"grid [0, 1, …, {LONG}] ({LONG + 1} values), alphas [1, 2]" in markdown(summary)


def test_a_smoke_page_proves_that_it_runs_and_claims_nothing(tmp_path: Path) -> None:
    summary = written(tmp_path, "smoke")
    assert summary["intro"].startswith(PROVES)
    assert (summary["stats"], summary["headline"]) == ([], None)
    text = markdown(summary)
    assert HEADLINE not in text
    assert "75.0" in text
    assert "**75.0" not in text


# --- the index ------------------------------------------------------------------------------------------------------


def test_the_index_has_a_row_for_each_experiment(tmp_path: Path) -> None:
    for name, preset in (("permuted-mnist", "cpu"), ("split-mnist", "smoke")):
        written(tmp_path / "runs" / name, preset)
        write_docs(tmp_path / "runs" / name, tmp_path / "docs" / name)
    write_json(tmp_path / "docs" / "rotated-mnist" / "summary.json", {"title": "Nothing to claim", "headline": None})
    assert index(tmp_path / "docs", FAMILIES, "cpu").splitlines()[-3:] == [
        "| [Title](split-mnist/README.md) | proves that it runs |  |  |",
        "| [Title](permuted-mnist/README.md) | Powerprop \\| EPN | 97.5 | 97.47 |",
        "| [Nothing to claim](rotated-mnist/README.md) | proves that it runs |  |  |",
    ]


def test_the_published_index_is_made_of_the_published_summaries() -> None:
    assert index(DOCS, [*FAMILIES, BENCHMARKS], "cpu") == (DOCS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in FAMILIES if (DOCS / name).is_dir()])
def test_published_pages_show_preset_command_and_headline(name: str) -> None:
    text = (DOCS / name / "README.md").read_text(encoding="utf-8")
    summary = json.loads((DOCS / name / "summary.json").read_text(encoding="utf-8"))
    assert text.startswith(f"# {summary['title']}\n")
    assert f"powerprop run {name} --preset " in text
    headline = text.partition(HEADLINE)[2].partition("\n")[0]
    assert headline.count(" | ") == (2 if summary["headline"] else 0)
    assert f"({name}/README.md) {headline}" in (DOCS / "README.md").read_text(encoding="utf-8")
