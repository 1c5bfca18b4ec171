"""Sets made of compressed pictures: notMNIST and Tiny ImageNet."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from powerprop_paper.data import DataCorrupt, DataNotFound
from powerprop_paper.data.pictures import MAX_BYTES, decode
from powerprop_paper.data.sets import has_near_duplicate, idx_bytes, load_notmnist, load_tiny, split_rows
from powerprop_paper.data.sources import NOTMNIST, TINY_IMAGENET_10, FolderSource, IdxFile

pytestmark = pytest.mark.usefixtures("no_data_places")


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def picture(array: np.ndarray, kind: str) -> bytes:
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.fromarray(array).save(buffer, kind)
    return buffer.getvalue()


def test_notmnist_is_made_from_its_archive(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    letters = {f"{c}/{i:02d}.png": random.randint(0, 256, (28, 28)).astype(np.uint8) for c in "AB" for i in range(20)}
    letters["B/99.png"] = letters["A/00.png"]
    archive = tmp_path / "notMNIST_small.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, array in reversed(letters.items()):
            info = tarfile.TarInfo(f"notMNIST_small/{name}")
            data = picture(array, "PNG")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        tar.addfile(tarfile.TarInfo("notMNIST_small/A/broken.png"))
    names = sorted(letters)
    x = idx_bytes(np.stack([letters[name] for name in names]))
    y = idx_bytes(np.array(["AB".index(name[0]) for name in names], np.uint8))
    source = NOTMNIST._replace(
        files=tuple(IdxFile(f.name, md5(data), len(data)) for f, data in zip(NOTMNIST.files, (x, y), strict=True)),
        mirrors=(archive.as_uri(),),
        archive_sha256=hashlib.sha256(archive.read_bytes()).hexdigest(),
    )
    images = load_notmnist(source, tmp_path / "root")
    assert len(images.train_x) + len(images.test_x) == 41
    assert len(images.test_x) == 4
    assert "there is no official one" in images.note
    train, test = ({row.numpy().tobytes() for row in part} for part in (images.train_x, images.test_x))
    assert not train & test
    again = load_notmnist(source, tmp_path / "root", download=False)
    assert torch.equal(again.train_x, images.train_x)
    for x_row, label in zip(images.test_x, images.test_y, strict=True):
        assert any(np.array_equal(letters[n], x_row[0]) and "AB".index(n[0]) == label for n in names)


def tiny_source(folder: Path) -> FolderSource:
    """Two classes with two training pictures and one for validation each, the second class grey."""
    random = np.random.RandomState(0)
    total = hashlib.sha256()
    for split, count in (("train", 2), ("val", 1)):
        for wnid, shape in (("n01", (64, 64, 3)), ("n02", (64, 64))):
            (folder / split / wnid).mkdir(parents=True)
            for i in range(count):
                data = picture(random.randint(0, 256, shape).astype(np.uint8), "JPEG")
                name = f"val_{wnid}.JPEG" if split == "val" else f"{wnid}_{i}.JPEG"
                (folder / split / wnid / name).write_bytes(data)
                total.update(data)
    return TINY_IMAGENET_10._replace(classes={"n01": "newt", "n02": "gnu"}, sha256=total.hexdigest())


def test_tiny_imagenet_folder(tmp_path: Path) -> None:
    source = tiny_source(tmp_path / "tiny-imagenet-10")
    images = load_tiny(source, tmp_path, download=False)
    assert images.train_x.shape == (4, 3, 64, 64)
    assert images.train_y.tolist() == [0, 0, 1, 1]
    assert images.test_y.tolist() == [0, 1]
    assert images.class_names == ("newt", "gnu")
    assert torch.equal(images.test_x[1, 0], images.test_x[1, 2])
    assert "10 of the 200 classes" in images.note
    (tmp_path / "tiny-imagenet-10/train/n02/n02_1.JPEG").unlink()
    with pytest.raises(DataCorrupt, match=f"its 5 pictures have the sha256 .* expected {source.sha256}"):
        load_tiny(source, tmp_path)


def test_tiny_imagenet_is_taken_out_of_its_archive(tmp_path: Path) -> None:
    made = tmp_path / "made"
    source = tiny_source(made)
    archive = tmp_path / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(archive, "w") as published:
        for path in (made / "train").rglob("*.JPEG"):
            published.write(path, f"tiny-imagenet-200/train/{path.parent.name}/images/{path.name}")
        for path in (made / "val").rglob("*.JPEG"):
            published.write(path, f"tiny-imagenet-200/val/images/{path.name}")
        published.writestr("tiny-imagenet-200/train/n03/images/n03_0.JPEG", b"another class")
        published.writestr("tiny-imagenet-200/test/images/test_0.JPEG", b"unlabelled")
        lines = [f"val_{wnid}.JPEG\t{wnid}\t0\t0\t62\t62\n" for wnid in ("n01", "n02")]
        published.writestr("tiny-imagenet-200/val/val_annotations.txt", "".join(lines))
    source = source._replace(archive=archive.as_uri(), archive_sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    assert load_tiny(source, tmp_path / "root").train_x.shape == (4, 3, 64, 64)
    assert load_tiny(source, tmp_path / "root", download=False).test_y.tolist() == [0, 1]


def test_tiny_imagenet_missing(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match="tiny-imagenet-200.zip into .* and load again"):
        load_tiny(TINY_IMAGENET_10, tmp_path, download=False)


def test_a_file_too_large_for_a_picture_is_not_read(tmp_path: Path) -> None:
    source = tiny_source(tmp_path / "tiny-imagenet-10")
    large = tmp_path / "tiny-imagenet-10/val/n01/val_n01.JPEG"
    with open(large, "wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(DataCorrupt, match=r"val_n01\.JPEG .* cannot be used: a picture has at most 67,108,864 bytes"):
        load_tiny(source, tmp_path)


def test_a_picture_of_too_many_pixels_is_no_picture() -> None:
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.new("1", (20_000, 20_000)).save(buffer, "PNG")
    with pytest.raises(OSError, match="not a picture that can be decoded"):
        decode(buffer.getvalue(), "L")


# --- near-duplicates --------------------------------------------------------------------------------------------------


def test_near_duplicates_by_hand() -> None:
    """Four pixels each; the limit of 10 is a sum of squares of 400."""
    chain, apart, copy = [[0, 0, 0, 0], [20, 0, 0, 0], [21, 0, 0, 0]], [[90, 90, 0, 0], [0, 0, 90, 90]], [7, 7, 7, 200]
    x = np.array([*chain, *apart, copy, copy], np.uint8).reshape(-1, 2, 2)
    assert has_near_duplicate(x).tolist() == [True, True, True, False, False, True, True]
    assert has_near_duplicate(x[[0, 2, 3]]).tolist() == [False, False, False], "441 is more than 400"


@pytest.mark.parametrize("limit", [0.0, 20.0, 60.0])
def test_near_duplicates_are_those_that_a_comparison_of_all_finds(limit: float) -> None:
    random = np.random.RandomState(1)
    x = random.randint(0, 256, (1500, 3)).astype(np.uint8)
    x[700] = x[3]
    apart = ((x[:, None].astype(np.int64) - x[None]) ** 2).sum(2) <= limit**2 * 3
    assert np.array_equal(has_near_duplicate(x, limit), apart.sum(1) > 1)


def test_no_near_duplicate_is_on_both_sides() -> None:
    near = np.random.RandomState(0).rand(1000) < 0.3
    train, test = split_rows(near)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(1000))
    assert len(test) == 100
    assert not near[test].any()
    assert near[train].tolist() == sorted(near[train].tolist(), reverse=True), "those with near-duplicates come first"
    again = split_rows(near)
    assert torch.equal(again[0], train)
    assert torch.equal(again[1], test)
