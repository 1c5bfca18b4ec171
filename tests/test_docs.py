"""Every Python example in the README and the docs runs as it stands, those of a page one after the other."""

import json
import re
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
