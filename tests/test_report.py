"""Pages that carry everything inside: one file, everything escaped, an index of all runs."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from powerprop import report
from powerprop.report import Image, Page, Section, Stat
from reports import HOSTILE, accuracy_table, curve


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
    drawn = report.pruning_curves([curve()], tmp_path_factory.mktemp("figures") / "a.svg", "t")
    sections = [
        Section(
            "Accuracy", f"First `code`.\n\n{HOSTILE}", [drawn, Image(drawn.path, HOSTILE, HOSTILE)], [accuracy_table()]
        ),
        Section("Accuracy", "Second."),
        Section("α = 4"),
    ]
    config = {"alpha": [1, 2], "sgd": {"lr": 0.1, "note": HOSTILE}, "empty": {}}
    stats = [Stat("Gain", "+30 points"), ("Dense", HOSTILE, "baseline")]
    return Page(
        f"Run {HOSTILE}", HOSTILE, sections, config, {"torch": "2.13"}, "Figure 2.", stats, command="powerprop run x"
    )


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
    assert '<pre class="command"><code>powerprop run x</code></pre>' in text


def test_every_picture_has_words_that_say_what_it_shows(page: Page) -> None:
    text = report.render_page(page)
    assert 'alt="t: test accuracy against weights kept. α = 2.0: ' in text
    with pytest.raises(ValueError, match=r"picture 'a.svg' needs an alt text that says what it shows, got none"):
        Image(Path("a.svg"), " ")


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
    with pytest.raises(ValueError, match=r"only SVG pictures and GIF clips can be embedded, got '.*a.txt'"):
        report.write_page(Page("t", "", [Section("s", figures=[Image(text, "words")])]), tmp_path)
    assert (tmp_path / "report.html").read_bytes() == old
