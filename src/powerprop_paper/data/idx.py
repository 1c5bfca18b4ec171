"""MNIST and Fashion-MNIST: sets of four IDX files."""

from __future__ import annotations

import gzip
import importlib.metadata
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from powerprop_paper.data.files import (
    Bytes,
    check,
    corrupt,
    digest,
    download_root,
    fetch,
    file_digest,
    not_found,
    read_checked,
    roots,
)
from powerprop_paper.data.images import Images
from powerprop_paper.data.sources import IdxFile, IdxSource

Download = Callable[[IdxSource, Path], list[str]]


def load_idx(source: IdxSource, root: str | Path | None = None, download: bool = True) -> Images:
    """The set from the first folder that has all four files, else from its mirrors."""
    paths = locate(source, root, download_files if download else None)
    arrays = [read_idx(path, file) for path, file in zip(paths, source.files, strict=True)]
    train_x, train_y, test_x, test_y = (torch.from_numpy(array) for array in arrays)
    return Images(
        source.name, train_x.unsqueeze(1), train_y.long(), test_x.unsqueeze(1), test_y.long(), source.class_names
    )


def locate(source: IdxSource, root: str | Path | None, download: Download | None) -> list[Path]:
    """The paths of the source's files in the first folder that has all of them, or after their download."""
    looked: list[str] = []
    for folder in folders(source, root):
        paths = [path for file in source.files if (path := find(folder, file.name))]
        if len(paths) == len(source.files):
            return paths
        missing = [file.name for file in source.files if not find(folder, file.name)]
        looked.append(f"{folder} (missing: {', '.join(missing)})")
    target = download_root(root) / source.folder
    if download:
        failures = download(source, target)
        if not failures:
            return [path for file in source.files if (path := find(target, file.name))]
        looked += failures
    raise not_found(source.name, looked, source.advice.format(folder=target))


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
            failures = fetch(urls, folder / f"{file.name}.gz", file.sha256_gz)
            if failures:
                return failures
    return []


def idx_bytes(array: Bytes) -> bytes:
    """An array of bytes as an IDX file."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.tobytes()
