"""Files that carry checksums, whole or not at all: damage is found out before anything is used."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.serialization import get_crc32_options, set_crc32_options

from powerprop.files import FileError, cause, naming, read_json, replacing, sweep, write_atomically
from powerprop.masks import Masks
from powerprop.tensorfiles import read_tensors, write_tensors
from powerprop_paper.train import CheckpointError, load_checkpoint, save_checkpoint

WEIGHTS = {"a": torch.arange(5000).float(), "b": torch.rand(3, 4, generator=torch.Generator().manual_seed(0)).T}


def tensors_file(path: Path) -> Callable[[], Any]:
    write_tensors(path, "numbers-1", WEIGHTS, {"text": "α", "n": 3})
    return lambda: read_tensors(path, "numbers-1")


def checkpoint_file(path: Path) -> Callable[[], Any]:
    save_checkpoint(path, {"weights": WEIGHTS, "step": 3})
    return lambda: load_checkpoint(path)


def masks_file(path: Path) -> Callable[[], Any]:
    Masks({"w": WEIGHTS["a"] > 1000}).save(path)
    return lambda: dict(Masks.load(path))


KINDS = [tensors_file, checkpoint_file, masks_file]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(value, two[name]) for name, value in one.items())
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


# --- damage -------------------------------------------------------------------------------------------------------


@every_kind
def test_what_was_written_is_read(kind: Callable[[Path], Callable[[], Any]], tmp_path: Path) -> None:
    read = kind(tmp_path / "file")
    first, content = read(), (tmp_path / "file").read_bytes()
    read = kind(tmp_path / "file")
    assert same(first, read())
    assert (tmp_path / "file").read_bytes() == content  # equal content, equal bytes
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@every_kind
def test_four_kilobytes_overwritten(kind: Callable[[Path], Callable[[], Any]], tmp_path: Path) -> None:
    path = tmp_path / "file"
    read = kind(path)
    content = bytearray(path.read_bytes())
    size = min(4096, len(content) // 4)
    for start in range(0, len(content) - size, size):
        path.write_bytes(content[:start] + bytes(size) + content[start + size :])
        with pytest.raises(FileError, match=str(path)):
            read()


@every_kind
@given(seed=st.integers(0, 2**32))
def test_any_damage_is_refused_or_harmless(
    kind: Callable[[Path], Callable[[], Any]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"damaged-{kind.__name__}"
    read = kind(path)
    whole = read()
    chance = random.Random(seed)
    content = bytearray(path.read_bytes())
    if chance.random() < 0.3:
        del content[chance.randrange(len(content)) :]
    else:
        for _ in range(chance.choice((1, 2, 50))):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    try:
        found = read()
    except FileError as error:
        found = str(error)
    assert str(path) in found if isinstance(found, str) else same(whole, found)  # the latter: padding


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, "numbers-1", WEIGHTS)
    with pytest.raises(FileError, match="file: expected a file of format 'letters-1', got 'numbers-1'"):
        read_tensors(path, "letters-1")
    write_atomically(path, b"\xff" * 100)
    with pytest.raises(FileError, match="not a complete safetensors file"):
        read_tensors(path, "numbers-1")
    torch.save({"format": "another"}, path)
    with pytest.raises(CheckpointError, match="was not written by powerprop"):
        load_checkpoint(path)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(OSError, match=str(missing)):
            load_checkpoint(missing)


def test_checkpoints_have_checksums_also_where_torch_is_told_to_save_the_time(tmp_path: Path) -> None:
    set_crc32_options(False)
    try:
        save_checkpoint(tmp_path / "c", {"w": WEIGHTS["a"]})
        assert get_crc32_options() is False
    finally:
        set_crc32_options(True)
    assert torch.equal(load_checkpoint(tmp_path / "c")["w"], WEIGHTS["a"])


@pytest.mark.parametrize("content", ["{", "", "\xff", "[" * 100_000])
def test_json_that_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content.encode("latin1"))
    with pytest.raises(FileError, match=r"x\.json is not a JSON file"):
        read_json(tmp_path / "x.json")


# --- disks --------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_named_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space") as error:
        write()
    assert error.value.errno == errno.ENOSPC
    assert cause(error.value) == f"{path}: No space left on device"
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_under_a_checkpoint_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*c\.pt"):
        save_checkpoint(tmp_path / "c.pt", {"w": WEIGHTS["a"]})


def test_errors_that_name_their_file_keep_it() -> None:
    with pytest.raises(FileNotFoundError) as error, naming("one"):
        open("/nowhere/two").close()
    assert cause(error.value, "three") == "/nowhere/two: No such file or directory"
    assert cause(OSError(errno.EIO, "Input/output error"), "three") == "three: Input/output error"
    assert cause(TimeoutError("too slow")) == "too slow"


def test_only_our_own_leftovers_are_swept(tmp_path: Path) -> None:
    ours = [tmp_path / ".a.json.12.tmp", tmp_path / "jobs" / "x" / ".checkpoint.pt.4711.tmp"]
    theirs = [tmp_path / name for name in ("notes.tmp", ".x.tmp", ".a.json.12.tmp.bak", ".vimrc")]
    for path in (*ours, *theirs):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert sorted(sweep(tmp_path)) == sorted(ours)
    assert all(path.exists() for path in theirs)
    assert not any(path.exists() for path in ours)
