"""CIFAR: reading its old pickles safely, archives, partial sets."""

from __future__ import annotations

import hashlib
import os
import pickle
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from powerprop_paper.data import DataCorrupt, DataNotFound
from powerprop_paper.data.sets import load_cifar, read_batch
from powerprop_paper.data.sources import CIFAR10, CIFAR100, CifarSource

pytestmark = pytest.mark.usefixtures("no_data_places")


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def short(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def old_pickle(entries: dict[bytes, bytes]) -> bytes:
    """A dictionary as Python 2 pickled it; the values are pickled already."""
    return b"\x80\x02}(" + b"".join(short(key) + value for key, value in entries.items()) + b"u."


def old_list(values: list[bytes]) -> bytes:
    return b"](" + b"".join(values) + b"e"


def old_array(rows: np.ndarray) -> bytes:
    """An array of bytes as numpy 1 and Python 2 pickled it."""
    number = lambda n: b"M" + n.to_bytes(2, "little")  # noqa: E731
    dtype = b"cnumpy\ndtype\n(" + short(b"u1") + b"K\x00K\x01tR(K\x03" + short(b"|") + b"NNNK\x00K\x00K\x00tb"
    head = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + short(b"b") + b"tR"
    shape = b"(" + b"".join(number(n) for n in rows.shape) + b"t"
    raw = b"T" + rows.size.to_bytes(4, "little") + rows.tobytes()
    return head + b"(K\x01" + shape + dtype + b"\x89" + raw + b"tb"


def batch(seed: int, key: bytes, n: int = 4, classes: int = 10) -> bytes:
    random = np.random.RandomState(seed)
    labels = [b"K" + bytes([label]) for label in random.randint(0, classes, n)]
    rows = random.randint(0, 256, (n, 3072)).astype(np.uint8)
    return old_pickle({b"batch_label": short(b"a batch"), key: old_list(labels), b"data": old_array(rows)})


def cifar_files(source: CifarSource) -> dict[str, bytes]:
    names = old_list([short(f"class {i}".encode()) for i in range(10)])
    files = {name: batch(i, source.label_key.encode()) for i, name in enumerate([*source.train, source.test])}
    return {**files, source.meta: old_pickle({source.names_key.encode(): names})}


def fake_cifar(source: CifarSource, folder: Path, **changes: object) -> CifarSource:
    files = cifar_files(source)
    (folder / source.folder).mkdir(parents=True)
    for name, content in files.items():
        (folder / source.folder / name).write_bytes(content)
    return source._replace(md5={name: md5(content) for name, content in files.items()})._replace(**changes)


@pytest.mark.parametrize("source", [CIFAR10, CIFAR100], ids=lambda source: source.name)
def test_cifar_files_are_read(tmp_path: Path, source: CifarSource) -> None:
    images = load_cifar(fake_cifar(source, tmp_path), tmp_path, download=False)
    n = 4 * len(source.train)
    assert images.train_x.shape == (n, 3, 32, 32)
    assert images.class_names == tuple(f"class {i}" for i in range(10))
    random = np.random.RandomState(len(source.train) - 1)
    assert images.train_y[-4:].tolist() == random.randint(0, 10, 4).tolist()
    assert torch.equal(images.train_x[-4:].flatten(1), torch.from_numpy(random.randint(0, 256, (4, 3072))).byte())


def test_numpy_itself_reads_the_same(tmp_path: Path) -> None:
    content = batch(0, b"labels")
    (tmp_path / "batch").write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy has moved and tightened what the old files refer to
        expected = pickle.loads(content, encoding="bytes")
    read = read_batch(tmp_path / "batch", md5(content))
    assert np.array_equal(read["data"], expected[b"data"])
    assert read["labels"] == expected[b"labels"]
    assert list(read) == ["batch_label", "labels", "data"]


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("pwned",)


def test_pickles_cannot_run_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (0, 2, 4):
        content = pickle.dumps({"data": Evil()}, protocol)
        (tmp_path / "evil").write_bytes(content)
        with pytest.raises(DataCorrupt, match=r"posix\.mkdir has no place in a CIFAR file"):
            read_batch(tmp_path / "evil", md5(content))
    assert not (tmp_path / "pwned").exists()


def test_cifar_corrupt_and_missing(tmp_path: Path) -> None:
    source = fake_cifar(CIFAR10, tmp_path)
    path = tmp_path / "cifar-10-batches-py/data_batch_3"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataCorrupt, match=source.md5["data_batch_3"]):
        load_cifar(source, tmp_path)
    path.unlink()
    with pytest.raises(DataNotFound, match=r"\(missing: data_batch_3\)\nTo get it: unpack https://www.cs.toronto"):
        load_cifar(source, tmp_path, download=False)


def test_cifar_archive_is_fetched_and_unpacked(tmp_path: Path) -> None:
    source = fake_cifar(CIFAR100, tmp_path / "made")
    archive = tmp_path / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "made/cifar-100-python", "cifar-100-python")
    source = source._replace(archive=archive.as_uri(), archive_sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    assert len(load_cifar(source, tmp_path / "root").train_x) == 4
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["cifar-100-python"]


def test_a_partial_training_set_is_labelled(tmp_path: Path) -> None:
    x = np.random.RandomState(0).randint(0, 256, (5, 32, 32, 3)).astype(np.uint8)
    y = np.arange(5, dtype=np.uint8)
    sums = (md5(np.ascontiguousarray(x.transpose(0, 3, 1, 2)).tobytes()), md5(y.tobytes()))
    source = fake_cifar(CIFAR100, tmp_path, partial_md5=sums, partial_rows=5)
    np.savez(tmp_path / source.partial, x=x, fine=y, coarse=y)
    assert load_cifar(source, tmp_path).note == ""
    (tmp_path / "cifar-100-python/train").unlink()
    images = load_cifar(source, tmp_path)
    assert images.note == "cifar100: only the first 5 training images of the published file"
    assert torch.equal(images.train_x[3, :, 1, 2], torch.from_numpy(x[3, 1, 2]))
    assert images.train_y.tolist() == [0, 1, 2, 3, 4]
    assert len(images.test_x) == 4
    with pytest.raises(DataCorrupt, match="its labels has the md5"):
        load_cifar(source._replace(partial_md5=(sums[0], "0" * 32)), tmp_path)


def test_a_partial_set_is_read_no_farther_than_its_rows(tmp_path: Path) -> None:
    source = fake_cifar(CIFAR100, tmp_path, partial_rows=5)
    (tmp_path / "cifar-100-python/train").unlink()
    path = tmp_path / source.partial
    np.savez_compressed(path, x=np.zeros((10**4, 32, 32, 3), np.uint8), fine=np.zeros(10**4, np.uint8))
    with pytest.raises(DataCorrupt, match=r"its array 'x' cannot be read \('x' is longer than 19,456 bytes\)"):
        load_cifar(source, tmp_path)
    for content in (b"", path.read_bytes()[:-30], b"PK" + bytes(100)):
        path.write_bytes(content)
        with pytest.raises(DataCorrupt, match="its array 'x' cannot be read"):
            load_cifar(source, tmp_path)
