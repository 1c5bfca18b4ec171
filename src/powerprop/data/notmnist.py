"""notMNIST, the small hand-cleaned set: letters A to J from many fonts (Bulatov, 2011)."""

from __future__ import annotations

import tarfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from powerprop.data.duplicates import has_near_duplicate
from powerprop.data.fetch import fetch
from powerprop.data.idx import locate, read_idx
from powerprop.data.images import Images
from powerprop.data.locate import Bytes
from powerprop.data.pictures import decode
from powerprop.data.sources import IdxSource
from powerprop.files import write_atomically

TEST_FRACTION = 0.1


def load_notmnist(source: IdxSource, root: str | Path | None = None, download: bool = True) -> Images:
    """The set with a fixed tenth for testing: there is no official split. Of near-duplicates see `split_rows`."""
    images_path, labels_path = locate(source, root, from_archive if download else None)
    x, y = read_idx(images_path, source.files[0]), read_idx(labels_path, source.files[1])
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


def from_archive(source: IdxSource, folder: Path) -> list[str]:
    """Make the IDX files from the published archive; what went wrong, if anything."""
    archive = folder / source.mirrors[0].rsplit("/", 1)[1]
    failures = fetch(source.mirrors, archive, source.archive_sha256, source.archive_size)
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


def idx_bytes(array: Bytes) -> bytes:
    """An array of bytes as an IDX file."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.tobytes()
