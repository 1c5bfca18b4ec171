"""The sets that are held whole in memory: MNIST and its like, notMNIST, CIFAR, ten classes of Tiny ImageNet.

Files are read no farther than the published ones are long, and CIFAR's pickles without unpickling anything but bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import io
import math
import os
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from powerprop.files import write_atomically
from powerprop_paper.data.images import Images
from powerprop_paper.data.pictures import decode, read_picture
from powerprop_paper.data.sources import (
    Bytes,
    CifarSource,
    FolderSource,
    IdxFile,
    IdxSource,
    check,
    corrupt,
    digest,
    download_root,
    fetch,
    file_digest,
    located,
    read_checked,
    roots,
)

# MNIST and Fashion-MNIST: four IDX files.


def load_idx(source: IdxSource, root: str | Path | None = None, download: bool = True) -> Images:
    """The set from the first folder that has all four files, else from its mirrors."""
    x, y, test_x, test_y = map(torch.from_numpy, idx_arrays(source, root, download_files if download else None))
    return Images(source.name, x.unsqueeze(1), y.long(), test_x.unsqueeze(1), test_y.long(), source.class_names)


def idx_arrays(
    source: IdxSource, root: str | Path | None, download: Callable[[IdxSource, Path], list[str]] | None
) -> list[Bytes]:
    """The arrays of the source's files, from the first folder that has all of them, or after their download.

    Folders are those under the roots and, unless one root was asked for, those that the machine has installed.
    """
    folders, target = [place / source.folder for place in roots(root)], download_root(root) / source.folder
    if root is None:
        folders += [Path(source.system_folder)] if source.system_folder else []
        folders += wheel_folder(source.wheel, source.files[0].name) if source.wheel else []
    folder = located(
        source.name, folders, lambda place: [file.name for file in source.files if not find(place, file.name)],
        partial(download, source) if download else None, target, source.advice.format(folder=target),
    )  # fmt: skip
    return [read_idx(path, file) for file in source.files if (path := find(folder, file.name))]


def wheel_folder(package: str, name: str) -> list[Path]:
    """The folder of an installed package that holds the file `name`; the package is not imported."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())).parent for file in files if file.name in spellings(name)][:1]


def spellings(name: str) -> tuple[str, ...]:
    """The names under which copies of an IDX file go round."""
    dotted = name.replace("-idx", ".idx")
    return name, f"{name}.gz", dotted, f"{dotted}.gz"


def find(folder: Path, name: str) -> Path | None:
    """The file in the folder, plain or gzipped."""
    return next((folder / spelling for spelling in spellings(name) if (folder / spelling).is_file()), None)


def read_idx(path: Path, file: IdxFile) -> Bytes:
    """The array in an IDX file of bytes, plain or gzipped, whose content must be the published one."""
    data = _gunzip(path, file) if path.suffix == ".gz" else bytearray(read_checked(path, file.md5))
    content = np.frombuffer(data, np.uint8)
    ndim = int(content[3])
    shape = content[4 : 4 + 4 * ndim].view(">u4").tolist()
    return content[4 + 4 * ndim :].reshape(shape)


def _gunzip(path: Path, file: IdxFile) -> bytearray:
    """The content, of which no more is decompressed than there should be."""
    try:
        with gzip.open(path) as stream:
            data = bytearray(stream.read(file.size + 1))
    except (OSError, EOFError, zlib.error) as error:
        reason = f"it cannot be decompressed ({error}) and has the md5 {file_digest(path, file.md5)}"
        raise corrupt(path, f"{reason}, its content is expected to have {file.md5}") from error
    if len(data) > file.size:
        raise corrupt(path, f"its content is longer than the {file.size:,} bytes expected")
    check(digest(data, file.md5), file.md5, path, "its content")
    return data


def download_files(source: IdxSource, folder: Path) -> list[str]:
    """Fetch the published .gz files that are not in the folder yet; what went wrong, if anything."""
    for file in source.files:
        if find(folder, file.name) is None:
            urls = [f"{mirror}{file.name}.gz" for mirror in source.mirrors]
            if failures := fetch(urls, folder / f"{file.name}.gz", file.sha256_gz):
                return failures
    return []


def idx_bytes(array: Bytes) -> bytes:
    """An array of bytes as an IDX file."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


# notMNIST, the small hand-cleaned set: letters A to J from many fonts (Bulatov, 2011).

TEST_FRACTION = 0.1
NEAR = 10.0
"""Images are near-duplicates if their pixels differ by at most this many of 255 grey levels (root mean square)."""
BLOCK_ROWS = 512


def load_notmnist(source: IdxSource, root: str | Path | None = None, download: bool = True) -> Images:
    """The set with a fixed tenth for testing: there is no official split. Of near-duplicates see `split_rows`."""
    x, y = idx_arrays(source, root, unpack_letters if download else None)
    train, test = split_rows(has_near_duplicate(x))
    images, labels = torch.from_numpy(x).unsqueeze(1), torch.from_numpy(y).long()
    note = f"{source.name}: own split, {len(train):,} training and {len(test):,} test images; there is no official one"
    return Images(source.name, images[train], labels[train], images[test], labels[test], source.class_names, note)


def split_rows(near: npt.NDArray[np.bool_]) -> tuple[torch.Tensor, torch.Tensor]:
    """Shuffled rows for training and testing; near: which images have a near-duplicate in the set.

    The test images have none, nor have the last training images: those with near-duplicates come first. So none is on
    both sides of the split, and none of `split_validation`'s, as long as it takes no more than the images without any.
    """
    random = np.random.RandomState(0)  # numpy has frozen the streams of this generator for good
    order = random.permutation(len(near))
    alone, paired = order[~near[order]], order[near[order]]
    tested = min(len(alone), round(TEST_FRACTION * len(near)))
    return torch.from_numpy(np.concatenate([paired, alone[tested:]])), torch.from_numpy(alone[:tested])


def has_near_duplicate(x: Bytes, limit: float = NEAR) -> npt.NDArray[np.bool_]:
    """For each image, whether the set has another that is near it: sqrt(mean (a - b)²) ≤ limit over the pixels.

    It is exact and the same on every machine: candidates come from a product of matrices, and their distance is then
    computed in whole numbers. Images are compared only with those of nearly the same sum of pixels, as the difference
    of two sums is at most limit times the number of pixels.
    """
    pixels, inverse, copies = np.unique(x.reshape(len(x), -1), axis=0, return_inverse=True, return_counts=True)
    order = pixels.sum(1, dtype=np.int64).argsort(kind="stable")
    pixels, found = pixels[order], (copies > 1)[order]
    sums = pixels.sum(1, dtype=np.int64)
    ends = np.searchsorted(sums, sums + math.floor(limit * pixels.shape[1]), side="right")
    floats = pixels.astype(np.float32)
    squares = np.einsum("ij,ij->i", floats, floats)
    most = limit**2 * pixels.shape[1]
    for start in range(0, len(pixels), BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, len(pixels))
        block = slice(start, int(ends[stop - 1]))
        distance = squares[start:stop, None] + squares[None, block] - 2 * floats[start:stop] @ floats[block].T
        # float32 is off by less than a few hundred here; the margin lets no pair slip through
        left, right = np.nonzero(np.triu(distance <= 1.1 * most + 1000, 1))
        for i, j in zip(left + start, right + start, strict=True):
            if not (found[i] and found[j]) and np.square(pixels[i].astype(np.int64) - pixels[j]).sum() <= most:
                found[i] = found[j] = True
    result: npt.NDArray[np.bool_] = found[order.argsort()[inverse.reshape(-1)]]
    return result


def unpack_letters(source: IdxSource, folder: Path) -> list[str]:
    """Make the IDX files from the published archive; what went wrong, if anything."""
    archive = folder / source.mirrors[0].rsplit("/", 1)[1]
    failures = fetch(source.mirrors, archive, source.archive_sha256)
    if not failures:
        for file, array in zip(source.files, read_archive(archive, source.class_names), strict=True):
            write_atomically(folder / file.name, idx_bytes(array))
    return failures


def read_archive(archive: Path, class_names: tuple[str, ...]) -> tuple[Bytes, Bytes]:
    """Images and labels of a tar of */<class>/<name>.png, ordered by class and name.

    Two of the published files hold no picture and are left out.
    """
    pictures: dict[tuple[str, str], Bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(".png") else None
            if file is not None:
                path = Path(member.name)
                with suppress(OSError):
                    pictures[path.parent.name, path.name] = decode(file.read(), "L")
    keys = sorted(pictures)
    labels = np.array([class_names.index(letter) for letter, _ in keys], np.uint8)
    return np.stack([pictures[key] for key in keys]), labels


# CIFAR-10 and CIFAR-100.

NPY_HEADER_BYTES = 4096


class _Array:
    """Stands in for a pickled numpy array; keeps the bytes and the shape, whatever type they claim."""

    def __init__(self, *_: object) -> None:
        self.value: Bytes = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, _, _, raw = state
        self.value = np.frombuffer(bytearray(raw), np.uint8).reshape(shape)


class _Type:
    """Stands in for numpy's dtype and ndarray, of which nothing is needed."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


ADMITTED: dict[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Type,
    ("numpy", "dtype"): _Type,
}


class _BytesUnpickler(pickle.Unpickler):
    """Knows the three names that an array of bytes is made of, and refuses every other."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR file")
        return ADMITTED[module, name]


def read_batch(path: Path, expected_md5: str) -> dict[str, Any]:
    """The dictionary in a CIFAR file whose md5 must be the published one; arrays are of bytes."""
    data = read_checked(path, expected_md5)
    try:
        content = _BytesUnpickler(io.BytesIO(data), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise corrupt(path, str(error)) from error
    return {key.decode(): value.value if isinstance(value, _Array) else value for key, value in content.items()}


def load_cifar(source: CifarSource, root: str | Path | None = None, download: bool = True) -> Images:
    """The set from the first root that has its files (or the known part of them), else from where it is published."""

    def missing(folder: Path) -> list[str]:
        names = [name for name in source.md5 if not (folder / name).is_file()]
        has_part = source.partial and (folder.parent / source.partial).is_file()
        return [] if has_part and names == list(source.train) else names

    folder = located(
        source.name, [place / source.folder for place in roots(root)], missing,
        partial(_download, source) if download else None, download_root(root) / source.folder,
        f"unpack {source.archive} into {download_root(root)}.",
    )  # fmt: skip
    if not all((folder / name).is_file() for name in source.train):
        x, y, note = _partial_train(source, folder.parent / source.partial)
    else:
        xs, ys = zip(*(_rows(source, folder, name) for name in source.train), strict=True)
        x, y, note = torch.cat(xs), torch.cat(ys), ""
    names = read_batch(folder / source.meta, source.md5[source.meta])[source.names_key]
    return Images(source.name, x, y, *_rows(source, folder, source.test), tuple(n.decode() for n in names), note)


def _rows(source: CifarSource, folder: Path, name: str) -> tuple[Tensor, Tensor]:
    batch = read_batch(folder / name, source.md5[name])
    return torch.from_numpy(batch["data"]).view(-1, 3, 32, 32), torch.tensor(batch[source.label_key])


def _partial_train(source: CifarSource, path: Path) -> tuple[Tensor, Tensor, str]:
    pixels, y = _partial_array(source, path, "x", 3072), _partial_array(source, path, "fine", 8)
    x = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    for array, expected, what in zip((x, y), source.partial_md5, ("its pixels", "its labels"), strict=True):
        check(digest(array, expected), expected, path, what)
    note = f"{source.name}: only the first {len(y):,} training images of the published file"
    return torch.from_numpy(x), torch.from_numpy(y).long(), note


def _partial_array(source: CifarSource, path: Path, name: str, row_bytes: int) -> Any:
    """One of the arrays, of which no more is decompressed than there should be."""
    limit = source.partial_rows * row_bytes + NPY_HEADER_BYTES
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"{name!r} is longer than {limit:,} bytes")
        return np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, KeyError, OSError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise corrupt(path, f"its array {name!r} cannot be read ({error})") from error


def _download(source: CifarSource, folder: Path) -> list[str]:
    archive = folder.parent / source.archive.rsplit("/", 1)[1]
    failures = fetch([source.archive], archive, source.archive_sha256)
    if not failures:
        with tarfile.open(archive) as tar:
            for name in source.md5:
                member = tar.extractfile(f"{source.folder}/{name}")
                assert member is not None  # its sha256 is that of the published archive, which has the file
                write_atomically(folder / name, member.read())
        archive.unlink()
    return failures


# Ten classes of Tiny ImageNet, as folders of JPEG files.


def load_tiny(source: FolderSource, root: str | Path | None = None, download: bool = True) -> Images:
    """The set from the first root that has its folder, else from the published archive; `val` is its test set."""
    folder = located(
        source.name, [place / source.folder for place in roots(root)],
        lambda place: [split for split in ("train", "val") if not (place / split).is_dir()],
        partial(unpack_classes, source) if download else None, download_root(root) / source.folder,
        f"put {source.archive} into {download_root(root)} and load again; its classes are taken out of it.",
    )  # fmt: skip
    return read_folder(source, folder)


def read_folder(source: FolderSource, folder: Path) -> Images:
    """Decode every picture, in the order of the paths; grey ones become RGB. They are hashed before any is decoded."""
    paths = {
        split: [(p, i) for i, wnid in enumerate(source.classes) for p in sorted((folder / split / wnid).glob("*.JPEG"))]
        for split in ("train", "val")
    }
    total = hashlib.sha256()
    for path, _ in (*paths["train"], *paths["val"]):
        total.update(read_picture(path))
    if total.hexdigest() != source.sha256:
        count = sum(map(len, paths.values()))
        raise corrupt(folder, f"its {count} pictures have the sha256 {total.hexdigest()}, expected {source.sha256}")
    names = tuple(source.classes.values())
    return Images(source.name, *_tensors(paths["train"]), *_tensors(paths["val"]), names, source.note)


def _tensors(rows: list[tuple[Path, int]]) -> tuple[Tensor, Tensor]:
    pictures = np.stack([decode(read_picture(path), "RGB") for path, _ in rows])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous(), torch.tensor([label for _, label in rows])


def unpack_classes(source: FolderSource, folder: Path) -> list[str]:
    """Fetch the published archive of all classes and write those of the source; what went wrong, if anything."""
    archive = folder.parent / source.archive.rsplit("/", 1)[1]
    failures = fetch([source.archive], archive, source.archive_sha256)
    if not failures:
        with zipfile.ZipFile(archive) as published, TemporaryDirectory(dir=folder.parent) as temporary:
            for path, member in archive_members(source, published).items():
                write_atomically(Path(temporary) / folder.name / path, published.read(member))
            os.replace(Path(temporary) / folder.name, folder)
    return failures


def archive_members(source: FolderSource, published: zipfile.ZipFile) -> dict[str, str]:
    """Path in our folder -> name in the archive, for the pictures of the source's classes."""
    top = Path(source.archive).stem
    annotations = published.read(f"{top}/val/val_annotations.txt").decode().splitlines()
    wnid_of = dict(line.split("\t")[:2] for line in annotations)
    members = {}
    for name in published.namelist():
        path = Path(name)
        wnid = wnid_of.get(path.name) if f"{top}/val/" in name else path.name.split("_")[0]
        if path.suffix == ".JPEG" and wnid in source.classes and f"{top}/test/" not in name:
            members[f"{path.relative_to(top).parts[0]}/{wnid}/{path.name}"] = name
    return members
