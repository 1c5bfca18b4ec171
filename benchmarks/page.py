"""All benchmarks, and the page that shows them: docs/results/benchmarks.

    OMP_NUM_THREADS=1 python benchmarks/page.py [--quick] [--minutes 15] [--out docs/results/benchmarks]

Every section is kept in a folder as soon as it is measured; a run that was interrupted goes on with the section that it
was at, and one that is whole deletes them. Every ratio is of times that were taken in turn in one section.

The page and its summary are written even where a limit is exceeded; the exit code is 1 then, and 2 if the minutes are
over before all sections are measured. Run it on a machine that does nothing else: every number is the best of many
interleaved rounds on one thread, and a busy machine has no good ones.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import growth
import infer
import layers
import learning
import masks
import memory
import packed
import sparse_training
import step
import updates
from growth import Growth
from parts import Part
from powerprop import backend
from powerprop.files import write_atomically
from publish import publish

Measured = Part | list[Growth]
SECTIONS: dict[str, Callable[[bool], Measured]] = {
    **{f"{net}, {base}": partial(step.perceptron_part, net, base) for net in step.PERCEPTRONS for base in step.BASES},
    "networks": step.networks_part,
    "masked step": masks.step_part,
    "mask update": masks.update_part,
    "updates": updates.part,
    "layers": layers.part,
    "strategies": learning.part,
    "packed": packed.part,
    "inference": infer.part,
    "memory": memory.part,
    **{f"sparse compute, {base}": partial(sparse_training.step_part, base) for base in sparse_training.BASES},
    "sparse compute, wide": sparse_training.wide_part,
    "sparse compute, memory": sparse_training.memory_part,
    **growth.MEASURES,
}


def machine() -> dict[str, Any]:
    """What it runs on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": processor or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "compiled": backend().startswith("kernel"),
    }


def kept(path: Path, run: dict[str, Any]) -> dict[str, Any] | None:
    """What an interrupted run of the same kind has measured."""
    found = json.loads(path.read_text()) if path.exists() else None
    return found if found is not None and found["run"] == run else None


def measure(name: str, folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """One section, from the folder if it is there."""
    path = folder / f"{name.replace(' ', '-')}.json"
    if (known := kept(path, run)) is not None:
        return known
    start = time.perf_counter()
    found = SECTIONS[name](run["quick"])
    data = {"part": found.data()} if isinstance(found, Part) else {"growth": [asdict(curve) for curve in found]}
    took = time.perf_counter() - start
    made = {"run": run, "seconds": took, "load": os.getloadavg()[0], **data}
    write_atomically(path, json.dumps(made).encode())
    Console().print(f"{name}: {took:.0f} s, load {made['load']:.1f}")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes, to try it")
    parser.add_argument("--out", type=Path, default=Path("docs/results/benchmarks"))
    parser.add_argument("--parts", type=Path, default=Path("runs/benchmarks"), help="where sections are kept")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no section after so many")
    arguments = parser.parse_args()
    for folder in (arguments.out, arguments.parts):
        folder.mkdir(parents=True, exist_ok=True)
    run, start, found = {"quick": arguments.quick, **machine()}, time.perf_counter(), []
    for name in SECTIONS:
        if time.perf_counter() - start > 60 * arguments.minutes:
            Console().print(f"the minutes are over before {name}: the same command goes on with it")
            return 2
        found.append(measure(name, arguments.parts, run))
    failures = publish(found, run, arguments.out)
    shutil.rmtree(arguments.parts)
    Console().print("\n".join(failures) or "all within the limits")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
