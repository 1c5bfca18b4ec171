"""CIFAR-10 and CIFAR-100 from their published files, read without unpickling anything but arrays of bytes."""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powerprop.files import write_atomically
from powerprop_paper.data.files import (
    Bytes,
    check,
    corrupt,
    digest,
    download_root,
    fetch,
    not_found,
    read_checked,
    roots,
)
from powerprop_paper.data.images import Images
from powerprop_paper.data.sources import CifarSource

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
    looked: list[str] = []
    for place in roots(root):
        missing = [name for name in source.md5 if not (place / source.folder / name).is_file()]
        if not missing:
            return _images(source, place / source.folder, *_train(source, place / source.folder))
        if source.partial and set(missing) == set(source.train) and (place / source.partial).is_file():
            return _images(source, place / source.folder, *_partial_train(source, place / source.partial))
        looked.append(f"{place / source.folder} (missing: {', '.join(missing)})")
    if download:
        folder = download_root(root) / source.folder
        failures = _download(source, folder)
        if not failures:
            return _images(source, folder, *_train(source, folder))
        looked += failures
    raise not_found(source.name, looked, f"unpack {source.archive} into {download_root(root)}.")


def _rows(source: CifarSource, folder: Path, name: str) -> tuple[Tensor, Tensor]:
    batch = read_batch(folder / name, source.md5[name])
    return torch.from_numpy(batch["data"]).view(-1, 3, 32, 32), torch.tensor(batch[source.label_key])


def _train(source: CifarSource, folder: Path) -> tuple[Tensor, Tensor, str]:
    xs, ys = zip(*(_rows(source, folder, name) for name in source.train), strict=True)
    return torch.cat(xs), torch.cat(ys), ""


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


def _images(source: CifarSource, folder: Path, train_x: Tensor, train_y: Tensor, note: str) -> Images:
    test_x, test_y = _rows(source, folder, source.test)
    names = read_batch(folder / source.meta, source.md5[source.meta])[source.names_key]
    return Images(source.name, train_x, train_y, test_x, test_y, tuple(name.decode() for name in names), note)


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
