"""From result.json to pages: typed results, the page of a run, the index of all."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from powerprop.experiments import EXPERIMENTS
from powerprop.experiments.harness.docs import HEADLINE, index_markdown, page_markdown
from powerprop.experiments.harness.experiment import RunError
from powerprop.experiments.harness.pages import command, run_page
from powerprop.experiments.harness.typed import Diverged, result_of
from powerprop.experiments.oneshot.results import Pruned
from powerprop.report import Headline, Image, Page, Section, Stat, pruning_curves
from reports import accuracy_table, curve


@dataclass(frozen=True)
class Inner:
    tasks: int
    rates: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Found:
    accuracy: list[float]
    asked: dict[str, int] | int
    probe: Inner
    note: str = ""
    best: float | None = None


GOOD = {"accuracy": [0.5, 1], "asked": {"fc": 3}, "probe": {"tasks": 2, "rates": {"a": [1.0, 0.5]}}, "seed": 7}


def test_a_result_as_a_typed_object() -> None:
    found = result_of(Found, {"k": GOOD}, "k")
    assert found == Found([0.5, 1], {"fc": 3}, Inner(2, {"a": (1.0, 0.5)}))
    assert result_of(Found, {"k": GOOD | {"asked": 3, "best": 0.5, "note": "n"}}, "k").best == 0.5  # type: ignore[union-attr]
    assert result_of(Found, {"k": {"diverged": "nan"}}, "k") == Diverged("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "expected an object, got None"),
        ([], "expected an object, got []"),
        ({}, "'accuracy' is missing"),
        ({"accuracy": "high"}, "'accuracy' must be a list, got 'high'"),
        ({"accuracy": [0.5, True]}, "'accuracy[1]' must be a number, got True"),
        ({"accuracy": ["x" * 99]}, "'accuracy[0]' must be a number, got '" + "x" * 59 + "…"),
        ({"asked": None}, "'asked' must be an object, got None"),
        ({"asked": {"fc": 0.5}}, "'asked.fc' must be a whole number, got 0.5"),
        ({"probe": 3}, "'probe' must be an object, got 3"),
        ({"probe": {"tasks": 2}}, "'probe.rates' is missing"),
        ({"probe": {"tasks": 2, "rates": {"a": [1.0]}}}, "'probe.rates.a' must be a list of 2, got [1.0]"),
        ({"note": 3}, "'note' must be a text, got 3"),
        ({"diverged": 3}, "'diverged' must be a text, got 3"),
    ],
)
def test_what_was_edited_is_named(change: Any, message: str) -> None:
    edited = change if not isinstance(change, dict) or not change else GOOD | change
    with pytest.raises(RunError) as error:
        result_of(Found, {"some-seed0": edited}, "some-seed0")
    after = "; undo what was edited, or delete the file to do the job again"
    assert str(error.value) == f"jobs/some-seed0/result.json: {message}{after}"


def test_curves_have_a_value_for_each_point_of_the_grid() -> None:
    names = ("sign_changes", "sign_changes_of_survivors", "near_zero_before", "near_zero_after")
    edited = {"kept": [0.1, 1.0], "test": [0.5], "validation": [0.5, 0.6], "overlap": [0.5, 0.6]}
    with pytest.raises(RunError, match=r"'test' must have 2 values, one for each of 'kept', got 1; undo"):
        result_of(Pruned, {"k": edited | dict.fromkeys(names, 0.1)}, "k")


# --- pages ----------------------------------------------------------------------------------------------------------


def page_of(out: Path, preset: str, **changes: Any) -> Page:
    config = replace(EXPERIMENTS["permuted-mnist"].presets[preset], **changes)
    (out / "versions.json").write_text('{"torch": "2"}')
    (out / "config.json").write_text(json.dumps({"experiment": "permuted-mnist", "preset": preset, "config": {}}))
    drawn = pruning_curves([curve()], out / "a.svg", "Accuracy [raw]", caption="Below.")
    section = Section("Accuracy", "Text.", [drawn], [accuracy_table()])
    headline = Headline("Powerprop | EPN", "97.5", "97.47")
    return run_page(out, config, "Title", "Intro.", "Section 5.", [section], [Stat("gain", "+3")], headline)


def test_a_page_shows_preset_command_settings_and_versions(tmp_path: Path) -> None:
    page = page_of(tmp_path, "cpu", seeds=7)
    assert page.command == "powerprop run permuted-mnist --preset cpu --seeds 7"
    assert page.config["preset"] == "cpu"
    assert page.config["alphas"] == [1.0, 1.375]
    assert page.versions == {"torch": "2"}
    text = page_markdown(page, tmp_path / "docs")
    assert "```\npowerprop run permuted-mnist --preset cpu --seeds 7\n```" in text
    assert "![Accuracy \\[raw\\]: test accuracy against weights kept. α = 2.0: " in text
    assert "](a.svg)\n\n*Below.*" in text
    assert f"{HEADLINE}| Powerprop \\| EPN | 97.5 | 97.47 |" in text
    assert "**75.0" in text


def test_a_smoke_page_proves_that_it_runs_and_claims_nothing(tmp_path: Path) -> None:
    page = page_of(tmp_path, "smoke")
    assert page.intro.startswith("This is the preset `smoke`")
    assert "proves that it runs" in page.intro
    assert not page.stats
    assert page.headline is None
    text = page_markdown(page, tmp_path / "docs")
    assert HEADLINE not in text
    assert "**75.0" not in text


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, ""),
        ({"alphas": (1.0, 1.5), "retrain_steps": 700}, " --alphas 1 1.5 --retrain-steps 700"),
        ({"matrix": False, "scale_lr": False}, " --no-scale-lr --no-matrix"),
        ({"decay": ()}, " --decay"),
    ],
)
def test_the_command_has_what_differs_from_the_preset(changes: dict[str, Any], options: str) -> None:
    config = replace(EXPERIMENTS["permuted-mnist"].presets["cpu"], **changes)
    assert command("permuted-mnist", "cpu", config) == f"powerprop run permuted-mnist --preset cpu{options}"


@pytest.mark.parametrize("content", ["null", "[]", "3", '{"experiment": 3, "preset": "cpu"}', "{}"])
def test_a_config_file_that_was_edited_is_named(content: str, tmp_path: Path) -> None:
    page_of(tmp_path, "cpu")
    (tmp_path / "config.json").write_text(content)
    config = EXPERIMENTS["permuted-mnist"].presets["cpu"]
    with pytest.raises(RunError, match=r"config\.json.* must .*, got "):
        run_page(tmp_path, config, "Title", "", "", [])


def test_the_index_has_a_row_for_each_experiment(tmp_path: Path) -> None:
    for name, preset in (("permuted-mnist", "cpu"), ("split-mnist", "smoke")):
        (tmp_path / name).mkdir()
        page = page_of(tmp_path, preset)
        (tmp_path / name / "README.md").write_text(page_markdown(page, tmp_path / name), encoding="utf-8")
    rows = [line for line in index_markdown(tmp_path, [*EXPERIMENTS], "cpu").splitlines() if line.startswith("| [")]
    assert rows == [
        "| [Title](permuted-mnist/README.md) | Powerprop \\| EPN | 97.5 | 97.47 |",
        "| [Title](split-mnist/README.md) | proves that it runs |  |  |",
    ]
    (tmp_path / "split-mnist" / "README.md").write_text("# Title\n\nNothing to compare.\n")
    assert "| [Title](split-mnist/README.md) |  |  |  |\n" in index_markdown(tmp_path, ["split-mnist"], "cpu")


def test_published_pages_show_preset_command_and_headline() -> None:
    docs = Path(__file__).parent.parent / "docs" / "results"
    index = (docs / "README.md").read_text(encoding="utf-8")
    published = [name for name in EXPERIMENTS if (docs / name).is_dir()]
    assert len(published) >= 12
    for name in published:
        text = (docs / name / "README.md").read_text(encoding="utf-8")
        assert f"powerprop run {name} --preset cpu" in text, name
        headline = text.partition(HEADLINE)[2].partition("\n")[0]
        assert headline.count(" | ") == 2, name
        assert f"({name}/README.md) {headline}\n" in index, name


def test_a_picture_is_copied_with_its_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, "cpu")
    page_markdown(page, tmp_path / "docs")
    (image,) = page.sections[0].figures
    assert isinstance(image, Image)
    assert (tmp_path / "docs" / "a.svg").read_bytes() == image.path.read_bytes()
