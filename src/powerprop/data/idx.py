"""MNIST and Fashion-MNIST: sets of four IDX files."""

from __future__ import annotations

import gzip
import importlib.metadata
import zlib
from pathlib import Path

import numpy as np
import torch

from powerprop.data.fetch import fetch
from powerprop.data.images import Images
from powerprop.data.sources import IdxSource
from powerprop.data.store import Bytes, DataCorrupt, check, download_root, md5, not_found, roots


def load_idx(source: IdxSource, root: str | Path | None = None, download: bool = True) -> Images:
    """The set from the first folder that has all four files, else from its mirrors."""
    looked: list[str] = []
    for folder in folders(source, root):
        paths = [find(folder, file.name) for file in source.files]
        if None not in paths:
            return _images(source, [path for path in paths if path is not None])
        missing = [file.name for file, path in zip(source.files, paths, strict=True) if path is None]
        looked.append(f"{folder} (missing: {', '.join(missing)})")
    if download:
        target = download_root(root) / source.folder
        failures = _download(source, target)
        if not failures:
            return _images(source, [target / f"{file.name}.gz" for file in source.files])
        looked += failures
    raise not_found(source.name, looked, source.advice)


def folders(source: IdxSource, root: str | Path | None) -> list[Path]:
    """Where the files may be: under the roots and, unless one root was asked for, in what the machine has installed."""
    found = [place / source.folder for place in roots(root)]
    if root is None and source.system_folder:
        found.append(Path(source.system_folder))
    if root is None and source.wheel:
        found += wheel_folder(source.wheel, source.files[0].name)
    return found


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


def read_idx(path: Path, expected_md5: str) -> Bytes:
    """The array in an IDX file of bytes, plain or gzipped, whose content must have the md5."""
    data = _gunzip(path, expected_md5) if path.suffix == ".gz" else np.fromfile(path, np.uint8)
    check(data, expected_md5, path, "its content")
    ndim = int(data[3])
    shape = data[4 : 4 + 4 * ndim].view(">u4").tolist()
    return data[4 + 4 * ndim :].reshape(shape)


def _gunzip(path: Path, expected_md5: str) -> Bytes:
    raw = path.read_bytes()
    try:
        return np.frombuffer(bytearray(gzip.decompress(raw)), np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise DataCorrupt(
            f"{path} cannot be decompressed ({error}); it has {len(raw)} bytes and the md5 {md5(raw)}, "
            f"its content must have the md5 {expected_md5}. Delete it and load again to have it downloaded, "
            "or put an intact copy in its place."
        ) from error


def _images(source: IdxSource, paths: list[Path]) -> Images:
    arrays = [read_idx(path, file.md5) for path, file in zip(paths, source.files, strict=True)]
    train_x, train_y, test_x, test_y = (torch.from_numpy(array) for array in arrays)
    return Images(
        source.name, train_x.unsqueeze(1), train_y.long(), test_x.unsqueeze(1), test_y.long(), source.class_names
    )


def _download(source: IdxSource, folder: Path) -> list[str]:
    for file in source.files:
        if find(folder, file.name) is None:
            urls = [f"{mirror}{file.name}.gz" for mirror in source.mirrors]
            failures = fetch(urls, folder / f"{file.name}.gz", file.md5_gz)
            if failures:
                return failures
    return []
