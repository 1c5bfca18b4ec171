"""The kernel under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own: no finding in any case."""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from powerprop import kernel

SOURCES = [str(Path(inspect.getfile(kernel)).with_name(name)) for name in kernel._SOURCES]
CASES = [Path(__file__).with_name(f"sanitizer_{kind}.py") for kind in ("cases", "sparse")]
FLAGS = [
    "-std=gnu11",
    "-O1",
    "-g",
    "-shared",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
]
SANITIZE = ["-fsanitize=address,undefined,float-divide-by-zero", "-fno-sanitize-recover=all", "-fopenmp"]


def compiler() -> str:
    """A C compiler whose sanitizers work, or the test is skipped and says why."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if found := shutil.which(name):
            return found
    pytest.skip("no C compiler (cc, gcc, clang, or $CC): the kernel cannot be built with sanitizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the library with sanitizers is."""
    folder = tmp_path_factory.mktemp("sanitized")
    sums = "".join(hashlib.sha256(Path(source).read_bytes()).hexdigest() for source in SOURCES)
    known = f'-DPOWERPROP_SOURCES="{sums}"'
    code = [source for source in SOURCES if source.endswith(".c")]
    command = [compiler(), *FLAGS, known, *SANITIZE, *code, "-o", str(folder / kernel._NAME), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip(f"{command[0]} has no sanitizers: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    return folder


def preloaded(library: str) -> str:
    done = subprocess.run([compiler(), f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    preload = [preloaded("libasan.so"), preloaded("libstdc++.so.6")]  # the second, or C++'s exceptions are a finding
    environ = {
        **os.environ,
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:exitcode=99",  # Python keeps what it has
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=99",
        "OMP_NUM_THREADS": "2",
        "POWERPROP_KERNEL": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(inspect.getfile(kernel)).parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    return subprocess.run(
        [sys.executable, *command], env=environ, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("cases", CASES, ids=["update", "sparse"])
def test_5000_random_cases_have_no_finding_and_the_results_and_errors_of_torch(cases: Path, folder: Path) -> None:
    done = run(folder, str(cases), str(folder), "5000")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("5000 cases, ")


def test_the_sanitizer_sees_a_write_outside(folder: Path) -> None:
    """Else a test without findings would say nothing."""
    code = (
        "import sys, torch; from powerprop import kernel; kernel.__path__.insert(0, sys.argv[1]); w = torch.ones(40);"
        "b = torch.ones(44); library = kernel._loaded()[0];"
        "row = kernel._ROW.pack(w.data_ptr(), b.data_ptr(), 0, 0, 0, 44, 1.5, 1.0, 0.0, 0.0, 0.0, 1.0);"
        "library.powerprop_update(row, 1, 1)"
    )
    done = run(folder, "-c", code, str(folder))
    assert done.returncode == 99, done.stderr[-2000:]
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
