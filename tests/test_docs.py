"""Every Python example in the README and the docs runs as it stands, those of a page one after the other."""

import re
from functools import partial
from pathlib import Path

import pytest

from powerprop import data

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
