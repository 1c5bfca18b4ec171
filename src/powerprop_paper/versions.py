"""What a result depends on besides its configuration: the versions of programs, and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy
import torch

import powerprop

Versions = dict[str, str]

DECISIVE = ("powerprop", "commit", "torch", "numpy", "cpu capability")
"""Those that can change the digits of a result."""


def versions() -> Versions:
    """Those of now."""
    return {
        "powerprop": powerprop.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
    }


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """`torch 2.12.0 is now 2.13.0`, for all that can change the digits of a result; empty if nothing has changed."""
    names = [name for name in DECISIVE if before.get(name, "") != now.get(name, "")]
    return ", ".join(f"{name} {before.get(name) or 'unknown'} is now {now.get(name) or 'unknown'}" for name in names)


def merged(found: Iterable[Mapping[str, str]]) -> Versions:
    """One value for each name; where jobs differ, all of theirs with the number of jobs."""
    found = list(found)
    names = dict.fromkeys(name for each in found for name in each)
    return {name: _counted(Counter(each.get(name, "") or "unknown" for each in found)) for name in names}


def _counted(values: Counter[str]) -> str:
    if len(values) == 1:
        only = next(iter(values))
        return "" if only == "unknown" else only
    return ", ".join(f"{value} ({jobs} jobs)" for value, jobs in values.items())


def _commit() -> str:
    """The commit of the source tree, with + if files differ from it; empty for an installed package."""
    command = ["git", "-C", str(Path(powerprop.__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    """The processor's name, where the system tells."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
