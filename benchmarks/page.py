"""All benchmarks in one run, and the page that shows them: docs/results/benchmarks.

    OMP_NUM_THREADS=1 python benchmarks/page.py [--quick] [--out docs/results/benchmarks]

The page and its summary are written even where a limit is exceeded; the exit code is 1 then. Run it on a machine that
does nothing else: every number is the best of many interleaved rounds on one thread, and a busy machine has no good
ones.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

import torch
from rich.console import Console

import growth
import infer
import masks
import memory
import step
import strategies
from parts import Part
from powerprop.files import replacing
from powerprop.fused.kernel import kernel

INTRO = """# Benchmarks

Ratios measured in one run, each against what one would use instead: one thread, interleaved, the best of many rounds.
{machine}. `make bench` makes this page anew, `make bench-quick` compares a few of its ratios with committed bounds.
"""


def machine() -> str:
    """What it ran on, and how busy that was."""
    cores, load = os.cpu_count(), os.getloadavg()[0]
    compiled = "with" if kernel() is not None else "without"
    return f"{platform.machine()}, {cores} cores, load {load:.1f}, torch {torch.__version__}, {compiled} a C compiler"


def write(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes, to try it")
    parser.add_argument("--out", type=Path, default=Path("docs/results/benchmarks"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    said, quick = machine(), arguments.quick
    parts: list[Part] = [
        *step.parts(quick),
        *masks.parts(quick),
        strategies.part(quick),
        infer.part(quick),
        memory.part(),
    ]
    curves = growth.all_growth(quick)
    sections = [part.markdown(arguments.out) for part in parts] + [growth.markdown(curves, arguments.out)]
    failures = [text for part in parts for text in part.exceeded()]
    verdict = (
        "All limits are kept." if not failures else "Above the limits:\n\n" + "\n".join(f"- {f}" for f in failures)
    )
    write(arguments.out / "README.md", "\n\n".join([INTRO.format(machine=said) + verdict, *sections]) + "\n")
    exponents = [{"label": c.label, "against": c.against, "exponent": c.exponent} for c in curves]
    summary = {"machine": said, "parts": [part.data() for part in parts], "growth": exponents}
    write(arguments.out / "summary.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    Console().print("\n".join(failures) or "all within the limits")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
