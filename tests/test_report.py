"""Pages that carry everything inside: one file, everything escaped, with links that lead somewhere."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from powerprop_paper.pages import Figure, Page, Section, Stat, write_page
from powerprop_paper.report import Image, pruning_curves
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
        if tag not in {"meta", "link", "img", "input"}:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value or "")
            if name in {"src", "href", "srcset"}:
                (self.anchors if tag == "a" else self.sources).append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


ABOUT: dict[str, Any] = {
    "command": f"powerprop run x {HOSTILE}",
    "config": {"alpha": [1, 2], "lr": 0.1, "note": HOSTILE, "empty": []},
    "versions": {"torch": "2.13"},
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a page of text that must be escaped."""
    out = tmp_path_factory.mktemp("run")
    clip = tmp_path_factory.mktemp("clips") / "a.gif"
    clip.write_bytes(b"GIF89a of a kind")
    drawn = Figure("a", pruning_curves, [curve()], title="t")
    sections = [
        Section("Accuracy", f"First `code`.\n\n{HOSTILE}", [drawn, Image(clip, HOSTILE, HOSTILE)], [accuracy_table()]),
        Section("Accuracy", "Second."),
        Section("α = 4"),
    ]
    stats = [Stat("Gain", "+30 points"), Stat("Dense", HOSTILE, "baseline")]
    write_page(Page(f"Run {HOSTILE}", HOSTILE, sections, "Figure 2.", stats), out, ABOUT)
    return out


@pytest.fixture(scope="module")
def text(out: Path) -> str:
    return (out / "report.html").read_text(encoding="utf-8")


def test_a_page_is_one_file_that_loads_nothing(text: str) -> None:
    found = Links(text)
    assert not found.open
    assert "script" not in found.tags
    assert all(source.startswith("data:") for source in found.sources)
    assert [source[:15] for source in found.sources] == ["data:,", "data:image/svg+", "data:image/gif;"]
    assert not re.search(r"url\(|@import|https?:", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_everything_on_a_page_is_escaped_and_present(text: str) -> None:
    assert "<script" not in text
    for part in (">lr<", "0.1", "[1, 2]", "+30 points", "2.13", "Figure 2.", "<code>code</code>", "75.0 ± 7.1"):
        assert part in text
    assert text.count("<p>") == 4
    assert '<pre class="command"><code>powerprop run x &lt;script' in text


def test_every_picture_has_words_that_say_what_it_shows(text: str) -> None:
    assert 'alt="t: test accuracy against weights kept. α = 2.0: ' in text
    with pytest.raises(ValueError, match=r"picture 'a.svg' needs an alt text that says what it shows, got none"):
        Image(Path("a.svg"), " ")


def test_anchors_are_distinct_and_lead_somewhere(text: str) -> None:
    found = Links(text)
    assert found.ids == ["section-1", "section-2", "section-3"]
    assert [anchor.removeprefix("#") for anchor in found.anchors if anchor.startswith("#")] == found.ids


def test_a_table_can_be_had_as_comma_separated_values(text: str) -> None:
    (link,) = (anchor for anchor in Links(text).anchors if not anchor.startswith("#"))
    kind, _, content = link.partition(",")
    assert kind == "data:text/csv;charset=utf-8"
    assert list(csv.reader(io.StringIO(unquote(content)))) == list(csv.reader(io.StringIO(accuracy_table().to_csv())))


def test_a_failed_page_leaves_the_old_one(out: Path, text: str, tmp_path: Path) -> None:
    odd = tmp_path / "a.txt"
    odd.write_text("not a picture")
    with pytest.raises(ValueError, match=r"only SVG pictures and GIF clips can be embedded, got '.*a.txt'"):
        write_page(Page("t", "", [Section("s", figures=[Image(odd, "words")])]), out, ABOUT)
    assert (out / "report.html").read_text(encoding="utf-8") == text
