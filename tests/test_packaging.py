"""The package as it is installed: wheel and sdist, with a compiler and without, each in an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from powerprop import kernel

ROOT = Path(__file__).parents[1]
TRAIN = """
import torch, powerprop as pp
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3))
optimizer = pp.Powerprop(torch.optim.SGD(model.parameters(), lr=0.1), model, 1.5)
x, y, losses = torch.randn(64, 20), torch.randint(3, (64,)), []
for _ in range(10):
    optimizer.zero_grad()
    losses.append(torch.nn.functional.cross_entropy(model(x), y))
    losses[-1].backward()
    optimizer.step()
assert losses[-1] < losses[0], losses
print(pp.__file__)
print(pp.backend())
"""


def run(*command: str, **environ: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "POWERPROP_KERNEL")}
    done = subprocess.run(command, env={**clean, **environ}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the build backend is: in this environment, or fetched once into a folder."""
    if importlib.util.find_spec("scikit_build_core"):
        return {}
    folder = tmp_path_factory.mktemp("tools")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--target",
        str(folder),
        "scikit-build-core>=0.11,<1",
        "cmake",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"scikit-build-core is not here and cannot be fetched: {done.stderr.strip()[-300:]}")
    return {"PYTHONPATH": str(folder), "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def sdist(tools: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    code = (
        f"import os; os.chdir({str(ROOT)!r}); from scikit_build_core import build; build.build_sdist({str(folder)!r})"
    )
    run(sys.executable, "-c", code, **tools)
    (made,) = folder.iterdir()
    return made


def wheel(source: Path, folder: Path, environ: dict[str, str]) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, "--wheel-dir", str(folder), str(source), **environ)
    (made,) = folder.glob("*.whl")
    return made


def trained(made: Path, folder: Path) -> tuple[Path, str]:
    """Where the package of a new environment is, and its backend, after ten steps of training there.

    torch and the like are lent to it from here, by the path alone.
    """
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    site = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, str(made))
    where, backend = run(str(python), "-c", TRAIN).splitlines()
    assert Path(where).is_relative_to(folder)
    return Path(where).parent, backend


def contents(made: Path) -> Iterator[str]:
    with zipfile.ZipFile(made) if made.suffix == ".whl" else tarfile.open(made) as archive:
        names = archive.namelist() if isinstance(archive, zipfile.ZipFile) else archive.getnames()
    return (name for name in names if "kernel/" in name or "cmake" in name.lower())


def test_the_sdist_has_the_sources_and_nothing_built(sdist: Path) -> None:
    inside = [name.split("/", 1)[1] for name in contents(sdist)]
    sources = {f"src/powerprop/kernel/{name}" for name in (*kernel._SOURCES, "__init__.py")}
    assert {"cmake/CMakeLists.txt", *sources} == set(inside)


def test_a_wheel_of_the_tree_has_the_kernel_and_trains_with_it(tools: dict[str, str], tmp_path: Path) -> None:
    made = wheel(ROOT, tmp_path / "wheels", tools)
    assert "-py3-none-" in made.name
    assert not made.name.endswith("-any.whl")
    inside = {name.rsplit("/", 1)[1] for name in contents(made)}
    assert inside == {"__init__.py", *kernel._SOURCES, kernel._NAME}
    package, backend = trained(made, tmp_path / "env")
    assert backend.startswith(f"kernel: {package / 'kernel'}")


def test_the_sdist_without_a_compiler_is_a_pure_wheel_that_trains(
    tools: dict[str, str], sdist: Path, tmp_path: Path
) -> None:
    made = wheel(sdist, tmp_path / "wheels", {**tools, "CC": "/nowhere/cc"})
    assert made.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith(".so") for name in contents(made))
    _, backend = trained(made, tmp_path / "env")
    assert backend.startswith("torch: the package was installed without its compiled kernel")


def test_the_sdist_with_a_compiler_has_the_kernel(tools: dict[str, str], sdist: Path, tmp_path: Path) -> None:
    made = wheel(sdist, tmp_path / "wheels", tools)
    package, backend = trained(made, tmp_path / "env")
    assert backend.startswith(f"kernel: {package / 'kernel'}")
