"""Picture sets too large for memory: a tree of JPEG files, or tar files of them, read one picture at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from powerprop.data.locate import not_found, roots
from powerprop.data.pictures import read_picture
from powerprop.data.shards import Shards

__all__ = ["Folder", "Pictures", "find_pictures"]

SUFFIXES = (".jpeg", ".jpg", ".png")


class Pictures(Protocol):
    """Encoded pictures with their classes; `blocks` are the lengths of the stretches that are stored together."""

    labels: Tensor
    blocks: list[int]

    def __len__(self) -> int: ...

    def read(self, row: int) -> bytes: ...

    def origin(self, row: int) -> str: ...


class Folder:
    """A tree of class/picture files, classes in the order of their names (torchvision's ImageFolder)."""

    def __init__(self, folder: Path) -> None:
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        self.paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            files = sorted(file for file in os.listdir(folder / name) if file.lower().endswith(SUFFIXES))
            self.paths += [f"{folder}/{name}/{file}" for file in files]
            labels += [label] * len(files)
        if not self.paths:
            raise ValueError(f"{folder} has no pictures: expected {folder}/<class>/*.JPEG")
        self.labels = torch.tensor(labels)
        self.blocks = [len(self.paths)]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, row: int) -> bytes:
        """The encoded picture."""
        return read_picture(Path(self.paths[row]))

    def origin(self, row: int) -> str:
        """The file that holds the picture."""
        return self.paths[row]


def find_pictures(name: str, root: str | Path | None = None) -> tuple[Pictures, Pictures]:
    """Training and validation pictures of a set: `<root>/<name>/{train,val}/<class>/*.JPEG`, or `{train,val}*.tar`.

    name: of the folder, e.g. "imagenet".
    root: the only place to look; by default $POWERPROP_DATA and the user's cache.
    """
    places = [place / name for place in roots(root)]
    for place in places:
        found = [_open_split(place, split) for split in ("train", "val")]
        if found[0] is not None and found[1] is not None:
            _check_classes(place, found[0], found[1])
            return found[0], found[1]
    layout = f"{name}/train/<class>/*.JPEG and {name}/val/<class>/*.JPEG, or {name}/train-*.tar and {name}/val-*.tar"
    raise not_found(name, map(str, places), f"put {layout} into a folder and point $POWERPROP_DATA at it.")


def _open_split(place: Path, split: str) -> Pictures | None:
    tars = sorted(place.glob(f"{split}*.tar")) or sorted((place / split).glob("*.tar"))
    if tars:
        return Shards(tars)
    return Folder(place / split) if (place / split).is_dir() else None


def _check_classes(place: Path, train: Pictures, val: Pictures) -> None:
    """The same folder names on both sides, and no label that was never trained."""
    if isinstance(train, Folder) and isinstance(val, Folder) and train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise ValueError(f"{place} must have the same classes in train and val; on one side only: {', '.join(odd)}")
    trained, asked = int(train.labels.max()), int(val.labels.max())
    if asked > trained:
        raise ValueError(f"{place} has label {asked} in val, but {trained} at most in train")
