"""Picture sets too large for memory: trees or tar files of JPEG files, and batches of them decoded as they are needed.

Tar files are as WebDataset lays them out: `<key>.jpg` beside `<key>.cls`, the label in digits. Their headers are read
once, in a stream, and every picture is then one read at a known offset. Batches are the same whatever the number of
ranks and of worker processes, and resume at any batch: the order of an epoch depends on (seed, epoch) alone, and the
crop of a picture on (seed, epoch, row).
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, count
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from powerprop.files import FileError, read_tensors, write_atomically, write_tensors
from powerprop_paper.data.pictures import MAX_BYTES, centre_crop, random_resized_crop, read_picture, standardise
from powerprop_paper.data.sources import cache_dir, damaged, located, roots
from powerprop_paper.train.distributed import ALONE, Ranks

SUFFIXES = ("jpg", "jpeg", "png")
FORMAT = "powerprop-shards-3"
MAX_LABEL = 2**31
MAX_LABEL_BYTES = 32
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
"""Loaders are not forked: this process has threads (CUDA, collectives) that a copy would lack."""
MIX = 64
"""Tar files whose pictures are shuffled together: reads stay near each other, and the order is random enough."""

Item = tuple[int, int]
"""Epoch and row; the epoch -1 stands for evaluation."""


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
            files = sorted(file for file in os.listdir(folder / name) if file.lower().rpartition(".")[2] in SUFFIXES)
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


class Shards:
    """The pictures of several tar files, in their order.

    paths: the tar files, not compressed; a file list made once is kept in the user's cache.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise ValueError("expected at least one tar file, got none")
        self.paths = [str(path) for path in paths]
        entries = [_indexed(path) for path in paths]
        self.blocks = [len(part) for part in entries]
        self.offsets, self.labels = torch.cat(entries).tensor_split([2], dim=1)
        self.labels = self.labels.flatten()
        self.shards = torch.repeat_interleave(torch.tensor(self.blocks))

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, row: int) -> bytes:
        """The encoded picture."""
        offset, size = self.offsets[row].tolist()
        path = self.paths[int(self.shards[row])]
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(size)
        if len(data) != size:
            raise damaged(Path(path), f"it ends before its picture {row}; its list of pictures is older than the file")
        return data

    def origin(self, row: int) -> str:
        """The tar file and where in it the picture lies."""
        return f"the picture at byte {int(self.offsets[row, 0]):,} of {self.paths[int(self.shards[row])]}"


def _indexed(path: Path) -> Tensor:
    """What `read_index` finds, from the cache if the file was read before and has not changed since."""
    stat = path.stat()
    name = f"{FORMAT}-{path.resolve()}-{stat.st_size}-{stat.st_mtime_ns}"
    cached = cache_dir() / "shards" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.safetensors"
    with suppress(OSError, FileError):  # there is none yet, or it is damaged
        return read_tensors(cached, FORMAT)[0]["entries"]
    found = read_index(path)
    with suppress(OSError):  # without a cache the headers are read again next time
        write_tensors(cached, FORMAT, {"entries": found})
    return found


def read_index(path: Path) -> Tensor:
    """Where every picture lies (offset and size), and its label: a row each. Headers and labels alone are read."""
    pictures: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                key, _, suffix = member.name.rpartition(".")
                if member.isfile() and suffix.lower() in SUFFIXES:
                    pictures[key] = (member.offset_data, _picture_size(member, path))
                elif member.isfile() and suffix == "cls":
                    labels[key] = _label(tar, member, path)
    except (tarfile.TarError, EOFError, OverflowError, UnicodeError) as error:
        raise damaged(path, f"it is not a whole, uncompressed tar file ({error})") from None
    if missing := sorted(pictures.keys() ^ labels.keys()):
        raise damaged(path, f"{missing[0]!r} has no {'label' if missing[0] in pictures else 'picture'} beside it")
    if not pictures:
        raise damaged(path, f"it holds no picture (<key>.{'|'.join(SUFFIXES)} beside <key>.cls)")
    return torch.tensor([(*place, labels[key]) for key, place in pictures.items()])


def _picture_size(member: tarfile.TarInfo, path: Path) -> int:
    if member.issparse() or not 0 <= member.size <= MAX_BYTES:
        raise damaged(path, f"{member.name!r} has {member.size:,} bytes, a picture at most {MAX_BYTES:,}")
    return member.size


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> int:
    file = tar.extractfile(member)
    text = b"" if file is None else file.read(MAX_LABEL_BYTES)
    if not text.strip().isdigit() or int(text) >= MAX_LABEL:
        raise damaged(path, f"the label of {member.name!r} must be a number below {MAX_LABEL:,}, got {text[:20]!r}")
    return int(text)


def write_shard(path: Path, pictures: Iterable[tuple[bytes, int]]) -> None:
    """Write encoded pictures with their labels as one tar file of this layout."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for row, (data, label) in enumerate(pictures):
            for suffix, part in (("jpg", data), ("cls", str(label).encode())):
                info = tarfile.TarInfo(f"{row:08d}.{suffix}")
                info.size = len(part)
                tar.addfile(info, io.BytesIO(part))
    write_atomically(path, content.getvalue())


def find_pictures(name: str, root: str | Path | None = None) -> tuple[Pictures, Pictures]:
    """Training and validation pictures of a set: `<root>/<name>/{train,val}/<class>/*.JPEG`, or `{train,val}*.tar`.

    name: of the folder, e.g. "imagenet".
    root: the only place to look; by default $POWERPROP_DATA and the user's cache.
    """
    layout = f"{name}/train/<class>/*.JPEG and {name}/val/<class>/*.JPEG, or {name}/train-*.tar and {name}/val-*.tar"
    place = located(
        name, [place / name for place in roots(root)],
        lambda place: [each for each in ("train", "val") if not _tars(place, each) and not (place / each).is_dir()],
        None, Path(), f"put {layout} into a folder and point $POWERPROP_DATA at it.",
    )  # fmt: skip
    found = [Shards(tars) if (tars := _tars(place, each)) else Folder(place / each) for each in ("train", "val")]
    _check_classes(place, *found)
    return found[0], found[1]


def _tars(place: Path, split: str) -> list[Path]:
    return sorted(place.glob(f"{split}*.tar")) or sorted((place / split).glob("*.tar"))


def _check_classes(place: Path, train: Pictures, val: Pictures) -> None:
    """The same folder names on both sides, and no label that was never trained."""
    if isinstance(train, Folder) and isinstance(val, Folder) and train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise ValueError(f"{place} must have the same classes in train and val; on one side only: {', '.join(odd)}")
    trained, asked = int(train.labels.max()), int(val.labels.max())
    if asked > trained:
        raise ValueError(f"{place} has label {asked} in val, but {trained} at most in train")


# Batches.


def seeded(*numbers: int) -> torch.Generator:
    """A generator whose numbers depend on all of these."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 6364136223846793005 + number + 1442695040888963407) % 2**63
    return torch.Generator().manual_seed(mixed)


def epoch_order(blocks: Sequence[int], seed: int, epoch: int, mix: int = MIX) -> Tensor:
    """All rows in random order: the blocks shuffled, then the rows of every `mix` blocks that follow each other."""
    generator = seeded(seed, epoch)
    starts = list(accumulate(blocks, initial=0))
    order = torch.randperm(len(blocks), generator=generator).tolist()
    parts = []
    for first in range(0, len(order), mix):
        rows = torch.cat([torch.arange(starts[b], starts[b] + blocks[b]) for b in order[first : first + mix]])
        parts.append(rows[torch.randperm(len(rows), generator=generator)])
    return torch.cat(parts)


class Decoded(Dataset[tuple[Tensor, Tensor]]):
    """Cropped pictures by (epoch, row): at random in training, the middle in evaluation."""

    def __init__(self, pictures: Pictures, size: int, resize: int, seed: int) -> None:
        self.pictures, self.size, self.resize, self.seed = pictures, size, resize, seed

    def __getitem__(self, item: Item) -> tuple[Tensor, Tensor]:
        epoch, row = item
        data = self.pictures.read(row)
        try:
            if epoch < 0:
                x = centre_crop(data, self.size, self.resize)
            else:
                x = random_resized_crop(data, self.size, seeded(self.seed, epoch, row))
        except OSError as error:
            where = self.pictures.origin(row)
            raise ValueError(f"{where} cannot be decoded ({error}); put an intact copy in its place") from None
        return x, self.pictures.labels[row]


class PictureBatches:
    """Endless shuffled training batches (x, y) of this rank, standardised, on a device.

    batch: pictures per step over all ranks.
    size: of the square crops.
    seed: decides order and crops.
    loaders: worker processes of this rank that read and decode; 0 does it here.
    """

    def __init__(
        self, pictures: Pictures, batch: int, size: int, seed: int, *, device: torch.device | str = "cpu",
        ranks: Ranks = ALONE, loaders: int = 0,
    ) -> None:  # fmt: skip
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        ranks.share(batch)
        self.pictures, self.batch, self.seed, self.ranks, self.loaders = pictures, batch, seed, ranks, loaders
        self.device = torch.device(device)
        self.decoded = Decoded(pictures, size, size, seed)
        self.step = 0
        self._epoch, self._order = -1, Tensor()
        self._stream: Iterator[tuple[Tensor, Tensor]] | None = None

    def __iter__(self) -> PictureBatches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self._stream is None:
            self._stream = _load(self.decoded, self._remaining(), self.loaders, self.device)
        x, y = next(self._stream)
        self.step += 1
        return x, y

    def _remaining(self) -> Iterator[list[Item]]:
        """The items of every batch from the current one on, for the loader, which asks ahead."""
        return map(self.items, count(self.step))

    def items(self, step: int) -> list[Item]:
        """What this rank decodes at a step: its share of the next `batch` places of the endless order."""
        share = self.ranks.share(self.batch)
        places = range(step * self.batch, (step + 1) * self.batch)[share]
        return [(place // len(self.pictures), self._row(place)) for place in places]

    def _row(self, place: int) -> int:
        epoch, position = divmod(place, len(self.pictures))
        if self._epoch != epoch:
            self._epoch, self._order = epoch, epoch_order(self.pictures.blocks, self.seed, epoch)
        return int(self._order[position])

    def state_dict(self) -> dict[str, Any]:
        """The number of batches taken, and what the order depends on."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the batch after those that were taken, on any number of ranks."""
        if (there := {k: v for k, v in state.items() if k != "step"}) != self._identity():
            raise ValueError(f"the state is of batches with {there}, these have {self._identity()}")
        self.step, self._stream = state["step"], None

    def _identity(self) -> dict[str, int]:
        return {"pictures": len(self.pictures), "batch": self.batch, "seed": self.seed}


def evaluation_batches(
    pictures: Pictures, batch: int, size: int, resize: int, *, device: torch.device | str = "cpu",
    ranks: Ranks = ALONE, loaders: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Every picture once, the middle of it, in order; each rank gets every `world`-th one."""
    rows = range(ranks.rank, len(pictures), ranks.world)
    lists = [[(-1, row) for row in rows[first : first + batch]] for first in range(0, len(rows), batch)]
    return _load(Decoded(pictures, size, resize, 0), lists, loaders, torch.device(device))


def _load(
    decoded: Decoded, lists: Iterable[list[Item]], loaders: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    loader = DataLoader(
        decoded, batch_sampler=lists, num_workers=loaders, pin_memory=device.type == "cuda",
        multiprocessing_context=START if loaders else None,
        generator=torch.Generator(),  # the loader draws a seed for its workers; not from the global generator
    )  # fmt: skip
    for x, y in loader:
        yield standardise(x, device), y.to(device, non_blocking=True)
