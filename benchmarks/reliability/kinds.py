"""The kinds of files that powerprop reads: how a good one is written, and how it is read."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from powerprop.commands import read_state
from powerprop.continual import EfficientPackNet
from powerprop.continual.saving import state_of
from powerprop.export.file import read as read_weights
from powerprop.export.file import write
from powerprop.masks import Masks
from powerprop_paper.data.imagenet import Shards, write_shard
from powerprop_paper.data.sets import idx_bytes, load_idx, load_notmnist, read_archive, read_batch
from powerprop_paper.data.sources import MNIST, NOTMNIST, IdxFile
from powerprop_paper.train import load_checkpoint, read_metrics, save_checkpoint


@dataclass(frozen=True)
class Target:
    """A kind of file: `make` writes a good one and `read` reads it; `exact` if damage must never go unnoticed."""

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    exact: bool = True


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def idx_contents() -> list[bytes]:
    numbers = np.random.default_rng(0)
    return [idx_bytes(numbers.integers(0, 10, s).astype(np.uint8)) for s in ((6, 28, 28), (6,), (4, 28, 28), (4,))]


IDX = MNIST._replace(
    files=tuple(
        IdxFile(file.name, md5(content), len(content))
        for file, content in zip(MNIST.files, idx_contents(), strict=True)
    ),
    wheel="",
    mirrors=(),
)


def write_idx(path: Path, compress: bool) -> None:
    """The set around the file to be damaged: `path` is its first file."""
    for file, content in zip(IDX.files, idx_contents(), strict=True):
        name = file.name + ".gz" * compress
        place = path.parent / "set" / IDX.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(gzip.compress(content, mtime=0) if compress else content)
    shutil.copyfile(path.parent / "set" / IDX.folder / (IDX.files[0].name + ".gz" * compress), path)


def read_idx_set(path: Path, compress: bool) -> Any:
    place = path.parent / "set" / IDX.folder / (IDX.files[0].name + ".gz" * compress)
    shutil.copyfile(path, place)
    images = load_idx(IDX, path.parent / "set", download=False)
    return images.train_x, images.train_y, images.test_x, images.test_y


def cifar_batch() -> bytes:
    """A batch as Python 2 and numpy 1 pickled it."""
    rows = np.random.default_rng(0).integers(0, 256, (4, 3072)).astype(np.uint8)
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNK\x00K\x00K\x00tb"
    head = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    raw = b"T" + rows.size.to_bytes(4, "little") + rows.tobytes()
    array = head + b"(K\x01(M\x04\x00M\x00\x0ct" + dtype + b"\x89" + raw + b"tb"
    return b"\x80\x02}(U\x06labels](K\x01K\x02K\x03K\x04eU\x04data" + array + b"u."


def picture(kind: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (8, 8)).save(file, kind)
    return file.getvalue()


def write_letters(path: Path) -> None:
    """An archive of letters as notMNIST's is."""
    with tarfile.open(path, "w:gz") as tar:
        for letter in "ABCDEFGHIJ":
            info = tarfile.TarInfo(f"notMNIST_small/{letter}/x.png")
            content = picture("PNG", "L")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def read_letters(path: Path) -> Any:
    """The set from its archive, of which the checksums are those of the good one."""
    root = path.parent / "set"
    shutil.rmtree(root, ignore_errors=True)
    (root / NOTMNIST.folder).mkdir(parents=True)
    shutil.copyfile(path, root / NOTMNIST.folder / "letters.tar.gz")
    good = path.with_name("good")
    if not good.exists():
        shutil.copyfile(path, good)
    arrays = read_archive(good, NOTMNIST.class_names)
    files = [f._replace(md5=md5(idx_bytes(a))) for f, a in zip(NOTMNIST.files, arrays, strict=True)]
    source = NOTMNIST._replace(
        files=tuple(files),
        mirrors=("http://nowhere/letters.tar.gz",),
        archive_sha256=hashlib.sha256(good.read_bytes()).hexdigest(),
    )
    images = load_notmnist(source, root)
    return images.train_x, images.train_y, images.test_x, images.test_y


def read_shard(path: Path) -> Any:
    shards = Shards([path])
    return shards.labels, [shards.read(row) for row in range(len(shards))]


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"model": {"w": torch.rand(300, generator=generator)}, "step": 3, "name": "α", "list": [1.5, None]}


def learner() -> EfficientPackNet:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return EfficientPackNet(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), alpha=1.5, steps=2)


def read_learner(path: Path) -> Any:
    mine = learner()
    mine.load(path)
    return state_of(mine)


def write_masks(path: Path) -> None:
    Masks({"w": state()["model"]["w"] > 0.5, "v": torch.ones(3, 5, dtype=torch.bool)}).save(path)


def weights() -> dict[str, torch.Tensor]:
    """Stored dense, as bits, as gaps, and as another."""
    draw = torch.Generator().manual_seed(0)
    full, some, few = (torch.rand(size, generator=draw) for size in ((4, 5), (30, 20), (50, 40)))
    tied = few * (few > 0.99)
    return {"full": full, "some": some * (some > 0.5), "few": tied, "tied": tied}


def weights_apart() -> dict[str, torch.Tensor]:
    """The same, none of which lies where another does, for which safetensors has no words."""
    return {name: tensor.clone() for name, tensor in weights().items()}


def read_torch(path: Path) -> Any:
    return read_state(Path(shutil.copyfile(path, path.with_suffix(".pt")))).state


TARGETS: dict[str, Target] = {
    "IDX": Target(lambda path: write_idx(path, False), lambda path: read_idx_set(path, False)),
    "IDX, gzipped": Target(lambda path: write_idx(path, True), lambda path: read_idx_set(path, True)),
    "CIFAR": Target(lambda path: path.write_bytes(cifar_batch()) and None, lambda p: read_batch(p, md5(cifar_batch()))),
    "notMNIST": Target(write_letters, read_letters),
    "shards": Target(lambda path: write_shard(path, [(picture("JPEG"), 3), (picture("PNG"), 1)]), read_shard, False),
    "checkpoint": Target(lambda path: save_checkpoint(path, state()), load_checkpoint),
    "learner": Target(lambda path: learner().save(path), read_learner),
    "masks": Target(write_masks, lambda path: dict(Masks.load(path))),
    "weights": Target(lambda path: write(weights(), path) and None, lambda path: read_weights(path).state),
    "foreign weights": Target(lambda path: save_file(weights_apart(), path), lambda p: read_state(p).state, False),
    "torch's weights": Target(lambda path: torch.save(weights(), path), read_torch, False),
    "metrics": Target(lambda path: path.write_text('{"step": 1, "loss": 0.5}\n' * 9) and None, read_metrics, False),
}
