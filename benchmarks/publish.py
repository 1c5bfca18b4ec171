"""From measured sections to the page: verdict, overview, tables, pictures and the summary file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import growth
from growth import Growth
from parts import Part
from powerprop.files import write_atomically
from powerprop_paper.report.page import HEADLINE, Headline

INTRO = """Every ratio is of times taken in turn, each against what one would use instead: one thread, interleaved,
the best of many rounds. A step is timed after one of the same model that is not, as in training: among models that
take turns it would begin with a cold cache, and cost more.
`kernel` is `Powerprop` as it comes, `torch` the same without the compiled kernel (`POWERPROP_KERNEL=0`),
`textbook` the form of the paper's equation 1 (`pp.reparametrize`), `notebook` its formula under autograd, as the
notebook published with the paper has it. What the growth means for large models: [how cost grows](../../cost.md).

```
make bench
```

{machine}. `make bench-quick` compares a few of these ratios with committed bounds."""


def publish(found: Sequence[dict[str, Any]], run: dict[str, Any], out: Path) -> list[str]:
    """Write page, pictures and summary; returns which limits are exceeded.

    found: the sections, each with a part or with curves of growth, its seconds and the load.
    run: what it ran on.
    """
    parts = [Part(**each["part"]) for each in found if "part" in each]
    curves = [Growth(**curve) for each in found for curve in each.get("growth", ())]
    said = ran_on(found, run)
    sections = [part.markdown(out) for part in parts] + [growth.markdown(curves, out)]
    top = headline(parts)
    first = f"{HEADLINE}| {top.what} | {top.ours} | {top.paper} |"
    text = ["# Benchmarks", first, INTRO.format(machine=said), "## Limits", *limits(parts), *sections]
    write_atomically(out / "README.md", ("\n\n".join(text) + "\n").encode())
    exponents = [asdict(curve) | {"exponent": curve.exponent} for curve in curves]
    summary = {
        "title": "Benchmarks",
        "headline": top._asdict(),
        "machine": said,
        "parts": [part.data() for part in parts],
        "growth": exponents,
    }
    write_atomically(out / "summary.json", (json.dumps(summary, indent=1, ensure_ascii=False) + "\n").encode())
    return exceeded(parts)


def ran_on(found: Sequence[dict[str, Any]], run: dict[str, Any]) -> str:
    """The machine, how busy it was, and for how long."""
    loads, minutes = [each["load"] for each in found], sum(each["seconds"] for each in found) / 60
    return (
        f"{run['processor']}, {run['cores']} cores, load {min(loads):.1f} to {max(loads):.1f}, torch {run['torch']}, "
        f"{'with' if run['compiled'] else 'without'} a C compiler; {minutes:.0f} minutes"
    )


def headline(parts: Sequence[Part]) -> Headline:
    """What the index of results shows too."""
    count = sum(len([*part.limited()]) for part in parts)
    first = parts[0]
    what = f"{first.title}, {first.rows[0][0]}, times the plain optimiser's; limits kept"
    return Headline(what, f"{first.shown(first.rows[0][1][0])}; {count - len(exceeded(parts))} of {count}", "")


def limits(parts: Sequence[Part]) -> list[str]:
    """Whether they are kept, and the number of each part that is nearest to one."""
    above = exceeded(parts)
    verdict = "All limits are kept." if not above else "\n".join(["Above the limits:", "", *(f"- {a}" for a in above)])
    rows = [row for part in parts if (row := part.closest())]
    return [verdict, "\n".join(["| | nearest to its limit | | limit |", "|---|---|---:|---:|", *rows])]


def exceeded(parts: Sequence[Part]) -> list[str]:
    """All limits that are, in words."""
    return [text for part in parts for text in part.exceeded()]
