"""Every decimal of results in the README, docs/evidence.md and notes stands in a committed file of that result."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
NAMES = sorted(path.parent.name for path in RESULTS.glob("*/summary.json"))
NOTES = sorted(RESULTS.glob("*/notes.md"))
DECIMAL = re.compile(r"(?<![\w.])\d[\d,]*\.\d+(?!\w|\.\d)")
NOT_KEPT = "## Without a file"
"""The last section of notes: numbers of trials whose runs were not kept."""


def numbers_in(found: Any) -> Iterator[float]:
    """Every number of a JSON file, of its words too; of lists mean, deviation and ends, over lists of lists means."""
    if isinstance(found, str):
        yield from (float(text.replace(",", "")) for text in DECIMAL.findall(found))
    elif isinstance(found, dict):
        for value in found.values():
            yield from numbers_in(value)
    elif isinstance(found, list):
        plain = [value for value in found if isinstance(value, int | float)]
        if len(plain) > 1 and all(map(math.isfinite, plain)):
            yield from (statistics.fmean(plain), statistics.stdev(plain), min(plain), max(plain))
        elif found and all(isinstance(value, list) for value in found):
            rows = [list(leaves(value)) for value in found]
            yield from (statistics.fmean(column) for column in zip(*rows, strict=False) if len(rows) > 1)
        for value in found:
            yield from numbers_in(value)
    elif isinstance(found, int | float) and math.isfinite(found):
        yield float(found)


def leaves(found: Any) -> Iterator[float]:
    """The numbers of a structure in their order."""
    if isinstance(found, dict | list):
        for value in found.values() if isinstance(found, dict) else found:
            yield from leaves(value)
    elif isinstance(found, int | float) and math.isfinite(found):
        yield found


@cache
def evidence(folder: Path) -> list[float]:
    """The numbers of a result: of its summary and other JSON files, and of the page that was made with them."""
    found = [number for path in sorted(folder.rglob("*.json")) for number in numbers_in(json.loads(path.read_text()))]
    pages = (path.read_text() for path in sorted(folder.rglob("README.md")))
    return found + [number for page in pages for number in numbers_in(page)]


def stands_in(text: str, numbers: list[float]) -> bool:
    """Whether one of the numbers, as it is or in percent, is written so."""
    digits, wanted = len(text.split(".")[1]), float(text.replace(",", ""))
    return any(abs(round(abs(number) * scale, digits) - wanted) < 1e-9 for number in numbers for scale in (1, 100))


PAIR = re.compile(r"(\d+\.\d+) ± (\d+\.\d+)")


@cache
def pairs(folder: Path) -> list[tuple[float, float]]:
    """Means with their deviations, as the page has them."""
    texts = [path.read_text() for path in sorted(folder.rglob("README.md"))]
    return [(float(mean), float(spread)) for text in texts for mean, spread in PAIR.findall(text)]


def pair_stands_in(mean: str, spread: str, found: list[tuple[float, float]]) -> bool:
    """Whether a pair of the page is written so, with as many digits or fewer."""
    ways = [(len(mean.split(".")[1]), float(mean)), (len(spread.split(".")[1]), float(spread))]
    near = (
        all(abs(number - wanted) <= 0.5001 * 10**-digits for number, (digits, wanted) in zip(pair, ways, strict=True))
        for pair in found
    )
    return any(near)


def decimals(text: str) -> list[str]:
    """The numbers of a text that have digits behind the point; links, code, powers and other settings are none."""
    return DECIMAL.findall(re.sub(r"\]\([^)]*\)|`[^`]*`|[αγλπ] = \d[\d., and]*\d|rate (of )?[\d.]+", "]", text))


def units(text: str) -> Iterator[tuple[str, list[Path]]]:
    """Paragraphs and rows of tables, with the results that they speak of: those they name, or of the unit before."""
    places: list[Path] = []
    for block in re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        for unit in block.splitlines() if block.startswith("|") else [block]:
            named = [RESULTS / name for name in NAMES if re.search(rf"`{name}`|results/{name}/", unit)]
            named += [
                ROOT / "docs" / Path(path).parent for path in re.findall(r"\((?:docs/)?(images/\S+\.json)\)", unit)
            ]
            places = named or places
            yield unit, places


def of_results(page: str) -> str:
    """What a page says of results."""
    text = (ROOT / page).read_text()
    return text[text.index("## Results") : text.index("## Know before you use it")] if page == "README.md" else text


@pytest.mark.parametrize("page", ["README.md", "docs/evidence.md"])
def test_the_numbers_of_results_stand_in_what_they_are_of(page: str) -> None:
    results = of_results(page)
    missing = [
        f"{number} in {unit[:60]!r}, which speaks of {[place.name for place in places]}"
        for unit, places in units(results)
        for number in decimals(unit)
        if not any(stands_in(number, evidence(place)) for place in places)
    ]
    missing += [
        f"{mean} ± {spread} in {unit[:60]!r}, which speaks of {[place.name for place in places]}"
        for unit, places in units(results)
        for mean, spread in PAIR.findall(unit)
        if not any(pair_stands_in(mean, spread, pairs(place)) for place in places)
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("notes", NOTES, ids=lambda path: path.parent.name)
def test_the_numbers_of_notes_stand_beside_them_or_are_said_not_to(notes: Path) -> None:
    text, _, last = notes.read_text().partition(NOT_KEPT)
    spoken = {number for unit, _ in units(text) for number in decimals(unit)}
    places = {notes.parent, *(place for _, each in units(text) for place in each)}
    missing = {number for number in spoken if not any(stands_in(number, evidence(place)) for place in places)}
    found = [pair for place in places for pair in pairs(place)]
    missing |= {number for pair in PAIR.findall(text) if not pair_stands_in(*pair, found) for number in pair}
    assert missing == set(decimals(last)), f"not in any file: {sorted(missing)}"
