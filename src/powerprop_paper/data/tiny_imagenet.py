"""Ten classes of Tiny ImageNet, as folders of JPEG files."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from powerprop.files import write_atomically
from powerprop_paper.data.files import corrupt, download_root, fetch, not_found, roots
from powerprop_paper.data.images import Images
from powerprop_paper.data.pictures import decode, read_picture
from powerprop_paper.data.sources import FolderSource


def load_tiny(source: FolderSource, root: str | Path | None = None, download: bool = True) -> Images:
    """The set from the first root that has its folder, else from the published archive; `val` is its test set."""
    folders = [place / source.folder for place in roots(root)]
    for folder in folders:
        if folder.is_dir():
            return read_folder(source, folder)
    looked = [str(folder) for folder in folders]
    if download:
        target = download_root(root) / source.folder
        failures = from_archive(source, target)
        if not failures:
            return read_folder(source, target)
        looked += failures
    advice = f"put {source.archive} into {download_root(root)} and load again; its classes are taken out of it."
    raise not_found(source.name, looked, advice)


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


def from_archive(source: FolderSource, folder: Path) -> list[str]:
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
