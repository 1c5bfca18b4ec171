"""Compile the kernel once per machine, with whatever C compiler is there, and load it.

The library is kept in the user's cache folder under a name that tells the source, the compiler and the processor, so
that another machine with the same home folder makes its own. A compiler takes a second or two; afterwards loading takes
a millisecond.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path

__all__ = ["compiled", "why_not"]

_SOURCE = Path(__file__).with_name("kernel.c")
# No -ffast-math: the results must be the same sequence of roundings everywhere.
_FLAGS = ["-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
_EXTRAS = [
    ["-march=native", "-mprefer-vector-width=512", "-fopenmp"],
    ["-march=native", "-fopenmp"],
    ["-march=native"],
    [],
]
_PATIENCE = 120


@lru_cache(maxsize=1)
def compiled() -> ctypes.CDLL | None:
    """The library, or None where it cannot be had; a compiler that is there but fails is worth a warning."""
    compiler = _compiler()
    if compiler is None or os.name != "posix":
        return None
    try:
        return ctypes.CDLL(str(_library(compiler)))
    except (OSError, RuntimeError) as error:
        warnings.warn(f"the fused step could not be compiled, training goes on without it: {error}", stacklevel=2)
        return None


def why_not() -> str:
    """What to say where there is no library."""
    compiler = _compiler()
    if os.name != "posix":
        return f"it is not built on {platform.system()}"
    return "no C compiler (cc, gcc, clang, or $CC) was found" if compiler is None else f"{compiler} failed"


def _compiler() -> str | None:
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _library(compiler: str) -> Path:
    path = _folder() / f"step-{_key(compiler)}.so"
    if not path.exists():
        _build(compiler, path)
    return path


def _folder() -> Path:
    """The user's cache folder; a fresh temporary one where that cannot be written."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "powerprop"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="powerprop-"))


def _key(compiler: str) -> str:
    """Of source, compiler and processor."""
    about = Path(compiler).resolve().stat()
    parts = [_SOURCE.read_text(), str(_FLAGS + _EXTRAS), compiler, str(about.st_size), str(about.st_mtime_ns)]
    parts += [platform.machine(), _processor()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """What tells one processor's instructions from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(dict.fromkeys(line for line in lines if line.startswith(("flags", "Features", "model name"))))


def _build(compiler: str, path: Path) -> None:
    """Compile beside the final place and move it there whole: several processes may do so at once."""
    said = ""
    for extras in _EXTRAS:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "step.so"
            command = [compiler, *_FLAGS, *extras, str(_SOURCE), "-o", str(made), "-lm"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{compiler} took longer than {_PATIENCE} s") from None
            if done.returncode == 0:
                os.replace(made, path)
                return
            said = done.stderr.strip()
    raise RuntimeError(f"{compiler} says: {said[-500:]}")
