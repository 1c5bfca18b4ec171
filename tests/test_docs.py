"""Every Python example in the README and the docs runs as it stands, those of a page one after the other."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from powerprop_paper import data

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Lightning and torch's own exporters still make a class that torch has deprecated.
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
@pytest.mark.parametrize("page", [p for p in PAGES if EXAMPLE.search(p.read_text(encoding="utf-8"))], ids=name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "load", partial(data.load, download=False))
    namespace: dict[str, object] = {"__name__": "__example__"}
    for code in EXAMPLE.findall(page.read_text(encoding="utf-8")):
        try:
            exec(compile(code, name(page), "exec"), namespace)
        except data.DataNotFound as missing:
            pytest.skip(f"{missing}")


def test_the_experiment_of_one_file_runs_and_goes_on(tmp_path: Path) -> None:
    """A newcomer's: with options, a page, and nothing done twice."""
    (code,) = (
        each for each in EXAMPLE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")) if "script(" in each
    )
    assert code.count("\n") <= 60
    (tmp_path / "halves.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-W", "error", "halves.py", "--preset", "smoke", "--steps", "4", "--out", "run"]
    for said in ("halves: 4 jobs", "Report: run/report.html"):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        if "was not found" in done.stderr:
            pytest.skip(done.stderr)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
    assert "4 jobs" not in done.stdout, "nothing is left to do"
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert [row[1]["n"] for row in summary["sections"][0]["tables"][0]["rows"]] == [2, 2]
    assert "halves.svg" in [figure["file"] for figure in summary["sections"][0]["figures"]]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_results_of_methods_are_those_of_the_run() -> None:
    """The last column of the table of continual-learning methods, against the summary of the run."""
    summary = json.loads((ROOT / "docs/results/split-mnist-strategies/summary.json").read_text())
    found = {row["strategy"]: row["accuracy"] for row in summary["rows"] if row["alpha"] == 1}
    text = (ROOT / "docs/methods/README.md").read_text().partition("## Continual-learning methods")[2]
    shown = dict(re.findall(r"^\| \[?`(\w+)`.*\| ([^|]*) \|$", text, re.M))
    assert set(shown) == set(found)
    for name, values in shown.items():
        means = (found[name].get(f"{kind}-incremental") for kind in ("task", "domain", "class"))
        assert values == ", ".join("–" if mean is None else f"{100 * mean['mean']:.1f}" for mean in means), name
