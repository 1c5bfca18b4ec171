"""notMNIST, the small hand-cleaned set: letters A to J from many fonts (Bulatov, 2011)."""

from __future__ import annotations

import math
import tarfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from powerprop.files import write_atomically
from powerprop_paper.data.files import Bytes, fetch
from powerprop_paper.data.idx import idx_bytes, locate, read_idx
from powerprop_paper.data.images import Images
from powerprop_paper.data.pictures import decode
from powerprop_paper.data.sources import IdxSource

TEST_FRACTION = 0.1
NEAR = 10.0
"""Images are near-duplicates if their pixels differ by at most this many of 255 grey levels (root mean square)."""

BLOCK_ROWS = 512


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
            if not (found[i] and found[j]) and _squared_distance(pixels[i], pixels[j]) <= most:
                found[i] = found[j] = True
    result: npt.NDArray[np.bool_] = found[order.argsort()[inverse.reshape(-1)]]
    return result


def _squared_distance(a: Bytes, b: Bytes) -> int:
    return int(np.square(a.astype(np.int64) - b).sum())


def from_archive(source: IdxSource, folder: Path) -> list[str]:
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
