"""Files that carry checksums, whole or not at all: damage and crafted content are found out before anything is used."""

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
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from powerprop.cli import main
from powerprop.continual import HAT, Naive
from powerprop.continual.saving import FORMAT as LEARNER
from powerprop.continual.saving import state_of
from powerprop.export.file import read as read_model
from powerprop.export.file import write as write_model
from powerprop.files import FileError, cause, naming, read_tensors, replacing, sweep, write_atomically, write_tensors
from powerprop.masks import Masks, pack
from powerprop_paper.folder import read_json
from powerprop_paper.models import mlp
from powerprop_paper.train import CheckpointError, load_checkpoint, save_checkpoint

BYTES = torch.zeros(1, dtype=torch.uint8)
NONE = torch.zeros(0, dtype=torch.uint8)
DEEP = "[" * 100_000
SHAPES: list[Any] = [
    [10**13], [2**32, 2**32], [-1], [-1, -8], [2.0, 4], [True], ["8"], "8", None, {"a": 1}, 8, [[8]],
    [10**400], [0, 10**30],
]  # fmt: skip
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


def model_file(path: Path) -> Callable[[], Any]:
    write_model({"w": WEIGHTS["a"] * (WEIGHTS["a"] % 9 == 0), "b": WEIGHTS["b"]}, path)
    return lambda: read_model(path).state


KINDS = [tensors_file, checkpoint_file, masks_file, model_file]
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
    torch.save(torch.nn.Linear(2, 2), path)  # which only a pickle could make again
    with pytest.raises(CheckpointError, match="is damaged or not a checkpoint"):
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


# --- crafted content ----------------------------------------------------------------------------------------------


def refused(call: Callable[[], Any], path: Path) -> None:
    """One line that names the file."""
    with pytest.raises(FileError) as error:
        call()
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1500


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [BYTES, NONE])
def test_masks_whose_shapes_are_none(shape: Any, bits: Tensor, tmp_path: Path) -> None:
    write_tensors(tmp_path / "masks", "powerprop-masks-2", {"w": bits}, {"w": shape})
    refused(lambda: Masks.load(tmp_path / "masks"), tmp_path / "masks")


@pytest.mark.parametrize(
    ("tensors", "shapes"),
    [
        ({"w": torch.ones(1)}, {"w": [8]}),
        ({"w": BYTES}, {"v": [8]}),
        ({"w": BYTES}, [8]),
        ({"w": BYTES}, None),
        ({"w": torch.ones(1, 1, dtype=torch.int64)}, {"w": [8]}),
    ],
)
def test_masks_with_other_content(tensors: dict[str, Tensor], shapes: Any, tmp_path: Path) -> None:
    write_tensors(tmp_path / "masks", "powerprop-masks-2", tensors, shapes)
    refused(lambda: Masks.load(tmp_path / "masks"), tmp_path / "masks")


def test_the_masks_that_there_are(tmp_path: Path) -> None:
    mask = torch.tensor([[True, False, True]])
    write_tensors(tmp_path / "masks", "powerprop-masks-2", {"w": pack(mask)}, {"w": [1, 3]})
    assert torch.equal(Masks.load(tmp_path / "masks")["w"], mask)


@pytest.mark.parametrize("data", [None, 7, [], {}, {"identity": 7}, {"identity": {}, "tasks": 3}])
def test_a_learner_of_other_content(data: Any, tmp_path: Path) -> None:
    learner = Naive(mlp([4, 3]), lambda p: torch.optim.SGD(p, lr=0.1))
    write_tensors(tmp_path / "learner", LEARNER, {}, data)
    refused(lambda: learner.load(tmp_path / "learner"), tmp_path / "learner")
    assert learner.tasks == []


def test_a_learner_that_declares_more_tasks_than_it_has(tmp_path: Path) -> None:
    learner = HAT(mlp([4, 5, 3]), lambda p: torch.optim.SGD(p, lr=0.1))
    tensors, data = state_of(learner)
    data["parts"]["gates"]["tasks"] = 10**12
    write_tensors(tmp_path / "learner", LEARNER, tensors, data)
    refused(lambda: learner.load(tmp_path / "learner"), tmp_path / "learner")


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.pt", b""),
        ("short.pt", b"PK"),
        ("junk.pt", b"junk"),
        ("empty.safetensors", b""),
        ("deep.safetensors", header(DEEP)),
        ("list.safetensors", header("[]")),
        ("words.safetensors", header('{"__metadata__": [1, 2]}')),
        ("huge.safetensors", (2**63).to_bytes(8, "little") + b"{}"),
    ],
)
def test_inspect_of_crafted_files_is_one_line(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["inspect", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / name}")
    assert error.count("\n") == 1


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
