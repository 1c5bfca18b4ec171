"""Fixtures that more than one test file needs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from pictures import write_tiny
from powerprop_paper.data import DataNotFound, Images, load
from sparse_nets import set_times

# A deadline measures how busy the machine is.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

UNPACKER = Path(__file__).parents[2] / "shared" / "data" / "unpack.py"
PACKED = {
    "mnist": "mnist",
    "cifar10": "cifar10",
    "cifar100": "cifar100",
    "notmnist": "notmnist",
    "tiny-imagenet-10": "tiny_imagenet",
}


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Images]:
    """A function name -> the real data set, which skips the test where the set is not at hand."""
    return _load_or_skip


@cache
def _load_or_skip(name: str) -> Images:
    try:
        return load(name, download=False)
    except DataNotFound as error:
        root = os.environ.get("POWERPROP_DATA")
        if not (root and UNPACKER.is_file() and name in PACKED):
            pytest.skip(f"{name} is not on this machine: {error}")
    _unpack(PACKED[name], Path(root))
    return load(name, download=False)


def _unpack(packed: str, root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        subprocess.run([sys.executable, str(UNPACKER), temporary, packed], check=True, stdout=subprocess.DEVNULL)
        for entry in Path(temporary).iterdir():
            os.replace(entry, root / entry.name)


@pytest.fixture
def no_data_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the data of this machine: no $POWERPROP_DATA, and an empty cache at tmp_path/cache."""
    monkeypatch.delenv("POWERPROP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def pictures_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with a small set in Tiny ImageNet's place."""
    root = tmp_path_factory.mktemp("pictures")
    write_tiny(root)
    return root


@pytest.fixture
def at_pictures(pictures_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`pictures_root`, where the data of the test are found."""
    monkeypatch.setenv("POWERPROP_DATA", str(pictures_root))
    return pictures_root


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch refuses algorithms that are not deterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def sparse_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sparse layers are always faster."""
    order = {"dense": 8.0, "smaller": 4.0, "sparse": 2.0, "chain": 3.0}
    set_times(monkeypatch, lambda calls, device, seconds=0: {n: order[n] for n in calls})


@pytest.fixture
def dense_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    order = {"dense": 1.0, "smaller": 4.0, "sparse": 2.0, "chain": 3.0}
    set_times(monkeypatch, lambda calls, device, seconds=0: {n: order[n] for n in calls})
