"""Pictures for ImageNet: crops, folders and shards, and batches that resume."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pictures import encoded, picture
from powerprop_paper.data import DataCorrupt, DataNotFound
from powerprop_paper.data.imagenet import (
    Folder,
    PictureBatches,
    Shards,
    epoch_order,
    evaluation_batches,
    find_pictures,
    write_shard,
)
from powerprop_paper.data.pictures import MEAN, STD, centre_crop, random_box, random_resized_crop, standardise
from powerprop_paper.train.distributed import Ranks


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shards:
    """Three tar files of four pictures each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = [tmp_path / f"train-{i}.tar" for i in range(3)]
    for i, path in enumerate(paths):
        write_shard(path, [(picture(label, i), label) for label in range(4 * i, 4 * i + 4)])
    return Shards(paths)


# --- crops ------------------------------------------------------------------------------------------------------


def test_centre_crop_by_hand() -> None:
    """A 6x4 PNG, resized not at all: the middle 2x2 are rows 1-2 and columns 2-3."""
    pixels = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(4, 6, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    cropped = centre_crop(file.getvalue(), 2, 4)
    assert torch.equal(cropped, torch.from_numpy(pixels[1:3, 2:4]).permute(2, 0, 1))


def test_the_shorter_side_is_resized() -> None:
    tall = centre_crop(encoded((200, 100, 50), 40, 80), 20, 20)
    assert tall.shape == (3, 20, 20)
    assert tall[0, 0, 0] > tall[0, 0, -1] + 50, "the whole width is there, from light to dark"


def test_grey_pictures_become_rgb() -> None:
    file = io.BytesIO()
    Image.new("L", (8, 8), 77).save(file, "PNG")
    assert torch.equal(centre_crop(file.getvalue(), 8, 8), torch.full((3, 8, 8), 77, dtype=torch.uint8))


def test_random_boxes_cover_what_they_should() -> None:
    """1,000 boxes on a 100x80 picture: inside it, 8% to 100% of its area, 3:4 to 4:3, all corners reached."""
    generator = torch.Generator().manual_seed(0)
    boxes = torch.tensor([random_box(100, 80, generator) for _ in range(1000)]).double()
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, ratio = width * height / 8000, width / height
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2] <= 100).all()
    assert (boxes[:, 3] <= 80).all()
    assert 0.07 < area.min() < 0.1
    assert 0.9 < area.max() <= 1.0
    assert ratio.min() >= 0.7
    assert ratio.max() <= 1.4
    assert area.mean() == pytest.approx(0.46, abs=0.04)


def test_a_picture_too_narrow_for_any_box_gives_its_middle() -> None:
    assert random_box(1000, 10, torch.Generator().manual_seed(0)) == (493, 0, 506, 10)


def test_half_of_the_crops_are_mirrored() -> None:
    data = encoded((255, 255, 255), 64, 64)
    crops = [random_resized_crop(data, 16, torch.Generator().manual_seed(i)) for i in range(200)]
    mirrored = sum(int(crop[0, 0, 0]) < int(crop[0, 0, -1]) for crop in crops)
    assert 75 < mirrored < 125


def test_standardise() -> None:
    x = standardise(torch.full((2, 3, 4, 4), 255, dtype=torch.uint8), torch.device("cpu"))
    assert torch.allclose(x[0, :, 0, 0], (1 - torch.tensor(MEAN)) / torch.tensor(STD))
    assert x.is_contiguous(memory_format=torch.channels_last)


# --- folders and shards -----------------------------------------------------------------------------------------


def test_a_folder_is_read_class_by_class(at_pictures: Path) -> None:
    train, val = find_pictures("tiny-imagenet-10")
    assert (len(train), len(val)) == (60, 20)
    assert train.labels.tolist() == [label for label in range(10) for _ in range(6)]
    assert train.read(13) == picture(2, 1)


def test_shards_hold_the_same_pictures(shards: Shards) -> None:
    assert len(shards) == 12
    assert shards.blocks == [4, 4, 4]
    assert shards.labels.tolist() == list(range(12))
    assert [shards.read(row) for row in (0, 5, 11)] == [picture(0, 0), picture(5, 1), picture(11, 2)]


def test_the_list_of_a_shard_is_read_once_and_anew_when_it_changes(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [Path(path) for path in shards.paths]
    monkeypatch.setattr(tarfile, "open", lambda *_: pytest.fail("read again"))
    assert Shards(paths).labels.tolist() == list(range(12))
    monkeypatch.undo()
    write_shard(paths[2], [(picture(3, 0), 3)])
    os.utime(paths[2], ns=(0, 1))
    assert Shards(paths).labels.tolist() == [*range(8), 3]


def test_shards_are_found_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for split in ("train", "val"):
        write_shard(tmp_path / "imagenet" / f"{split}-00000.tar", [(picture(0, 0), 0), (picture(1, 1), 1)])
    train, val = find_pictures("imagenet", tmp_path)
    assert isinstance(train, Shards)
    assert len(val) == 2


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.jpg": b"x"}, "'a' has no label beside it"),
        ({"a.cls": b"1"}, "'a' has no picture beside it"),
        ({"a.jpg": b"x", "a.cls": b"9" * 5000}, "must be a number below 2,147,483,648, got b'99999999999999999999'"),
        ({"a.txt": b"x"}, r"bad.tar .* cannot be used: it holds no picture .* Put an intact copy in its place"),
        (
            {"a.jpg": b"x", "a.cls": b"goldfish"},
            "the label of 'a.cls' must be a number below 2,147,483,648, got b'goldfish'",
        ),
    ],
)
def test_bad_shards_are_named(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    path = tmp_path / "bad.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            add(tar, name, content)
    with pytest.raises(DataCorrupt, match=message):
        Shards([path])


def test_broken_files_are_named(tmp_path: Path, shards: Shards) -> None:
    path = tmp_path / "half.tar"
    path.write_bytes(Path(shards.paths[0]).read_bytes()[:700])
    with pytest.raises(DataCorrupt, match=r"half.tar \(700 bytes\) cannot be used: it is not a whole"):
        Shards([path])
    Path(shards.paths[2]).write_bytes(b"")
    with pytest.raises(DataCorrupt, match="it ends before its picture 11"):
        shards.read(11)
    with pytest.raises(ValueError, match="expected at least one tar file, got none"):
        Shards([])


def test_an_entry_too_large_for_a_picture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.size = 2**40
        tar.addfile(info)
    with pytest.raises(DataCorrupt, match=r"'a\.jpg' has 1,099,511,627,776 bytes, a picture at most 67,108,864"):
        Shards([path])


@pytest.mark.parametrize(
    "content",
    [
        lambda old: old[: len(old) // 2],
        lambda old: b"",
        lambda old: b"null",
        lambda old: b"\xff\xfe\n",
        lambda old: old.replace(b"[[", b"[[9"),
        lambda old: old[:-1] + b" ",
    ],
)
def test_a_damaged_list_in_the_cache_is_made_again(
    shards: Shards, tmp_path: Path, content: Callable[[bytes], bytes]
) -> None:
    folder = tmp_path / "cache/powerprop/shards"
    whole = {cached: cached.read_bytes() for cached in folder.iterdir()}
    for cached, old in whole.items():
        cached.write_bytes(content(old))
    again = Shards([Path(path) for path in shards.paths])
    assert torch.equal(again.offsets, shards.offsets)
    assert again.labels.tolist() == list(range(12))
    assert {cached: cached.read_bytes() for cached in folder.iterdir()} == whole


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(Shards([Path(path) for path in shards.paths])) == 12


def test_missing_pictures_say_where_they_belong(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match=r"imagenet/train/<class>/\*.JPEG and .* \$POWERPROP_DATA"):
        find_pictures("imagenet", tmp_path)
    (tmp_path / "imagenet" / "train" / "n1").mkdir(parents=True)
    (tmp_path / "imagenet" / "val" / "n2").mkdir(parents=True)
    with pytest.raises(ValueError, match="has no pictures: expected .*/<class>/"):
        find_pictures("imagenet", tmp_path)
    for split, name in (("train", "n1"), ("val", "n2")):
        (tmp_path / "imagenet" / split / name / "a.jpg").write_bytes(picture(0, 0))
    with pytest.raises(ValueError, match="the same classes in train and val; on one side only: n1, n2"):
        find_pictures("imagenet", tmp_path)


# --- batches ----------------------------------------------------------------------------------------------------


def test_an_epoch_has_every_row_once_and_near_its_neighbours() -> None:
    order = epoch_order([5, 3, 4], seed=1, epoch=2)
    assert sorted(order.tolist()) == list(range(12))
    assert not torch.equal(order, epoch_order([5, 3, 4], 1, 3))
    assert not torch.equal(order, epoch_order([5, 3, 4], 2, 2))
    near = epoch_order([100] * 8, 0, 0, mix=2).view(4, 200) // 100
    assert all(len(part.unique()) == 2 for part in near), "two blocks at a time"


def take(batches: PictureBatches, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [next(batches) for _ in range(count)]


def make(pictures_root: Path, **options: object) -> PictureBatches:
    return PictureBatches(Folder(pictures_root / "tiny-imagenet-10" / "train"), 8, 16, 3, **options)  # type: ignore[arg-type]


def test_every_picture_comes_once_an_epoch_and_differently_in_the_next(pictures_root: Path) -> None:
    batches = make(pictures_root)
    rows = [item for step in range(15) for item in batches.items(step)]
    assert sorted(rows) == [(epoch, row) for epoch in range(2) for row in range(60)]
    assert [row for _, row in rows[:60]] != [row for _, row in rows[60:]]
    first, again = batches.decoded[0, 7][0], batches.decoded[1, 7][0]
    assert torch.equal(first, batches.decoded[0, 7][0])
    assert not torch.equal(first, again)


def test_batches_resume_and_do_not_depend_on_ranks(pictures_root: Path) -> None:
    whole = take(make(pictures_root), 12)
    assert whole[0][0].shape == (8, 3, 16, 16)
    stopped = make(pictures_root)
    take(stopped, 9)
    resumed = make(pictures_root)
    resumed.load_state_dict(stopped.state_dict())
    for a, b in zip(take(resumed, 3), whole[9:], strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    parts = [take(make(pictures_root, ranks=Ranks(rank, 4)), 12) for rank in range(4)]
    assert torch.equal(torch.cat([part[11][0] for part in parts]), whole[11][0])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores, on a machine with one
def test_worker_processes_change_nothing(pictures_root: Path) -> None:
    state = torch.get_rng_state()
    for a, b in zip(take(make(pictures_root, loaders=2), 3), take(make(pictures_root), 3), strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"


def test_evaluation_sees_every_picture_once_on_any_number_of_ranks(pictures_root: Path) -> None:
    val = Folder(pictures_root / "tiny-imagenet-10" / "val")
    labels = torch.cat([y for _, y in evaluation_batches(val, 8, 16, 18)])
    assert labels.tolist() == val.labels.tolist()
    shared = [torch.cat([y for _, y in evaluation_batches(val, 3, 16, 18, ranks=Ranks(r, 3))]) for r in range(3)]
    assert sorted(torch.cat(shared).tolist()) == sorted(val.labels.tolist())


def test_bad_batches_are_refused(pictures_root: Path) -> None:
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        PictureBatches(Folder(pictures_root / "tiny-imagenet-10" / "train"), 0, 16, 0)
    with pytest.raises(ValueError, match="8 rows cannot be shared equally by 3 ranks"):
        make(pictures_root, ranks=Ranks(0, 3))
    with pytest.raises(ValueError, match="the state is of batches with .*'batch': 4.*, these have .*'batch': 8"):
        make(pictures_root).load_state_dict({"step": 1, "pictures": 60, "batch": 4, "seed": 3})
    with pytest.raises(ValueError, match="the crop must not exceed the resized picture, got size 9 and resize 8"):
        centre_crop(encoded((1, 2, 3)), 9, 8)


def test_a_broken_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(b"not a picture")
    with pytest.raises(ValueError, match=r"a/1\.jpg cannot be decoded \(.*\); put an intact copy in its place"):
        next(PictureBatches(Folder(tmp_path), 1, 8, 0))
