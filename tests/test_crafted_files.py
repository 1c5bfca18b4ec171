"""Files with the right checksums that were made by hand: nothing is allocated that the bytes do not stand for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powerprop.cli import main
from powerprop.continual import HAT, Naive
from powerprop.continual.saving import FORMAT as LEARNER
from powerprop.continual.saving import state_of
from powerprop.export import file
from powerprop.export.file import encode, read
from powerprop.files import FileError
from powerprop.masks import Masks, pack
from powerprop.tensorfiles import write_tensors
from powerprop_paper.models import mlp

BYTES = torch.zeros(1, dtype=torch.uint8)
NONE = torch.zeros(0, dtype=torch.uint8)
DEEP = "[" * 100_000

SHAPES: list[Any] = [
    [10**13], [2**32, 2**32], [-1], [-1, -8], [2.0, 4], [True], ["8"], "8", None, {"a": 1}, 8, [[8]],
    [10**400], [0, 10**30],
]  # fmt: skip


def model_file(path: Path, tensors: dict[str, Tensor], shapes: Any, tied: Any = None, plan: Any = None) -> Path:
    """A file of a model with a valid checksum, whatever is in it."""
    write_tensors(path, file.FORMAT, tensors, {"shapes": shapes, "tied": tied or {}, "plan": plan})
    return path


def refused(call: Callable[[], Any], path: Path) -> None:
    """One line that names the file."""
    with pytest.raises(FileError) as error:
        call()
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1500


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ["dense", "bits", "gaps"])
def test_shapes_that_the_bytes_of_a_model_do_not_stand_for(shape: Any, form: str, tmp_path: Path) -> None:
    values = torch.ones(1)
    tensors = {"dense:w": values} if form == "dense" else {f"{form}:w": BYTES, "values:w": values}
    path = model_file(tmp_path / "net", tensors, {"w": shape})
    refused(lambda: read(path), path)


@pytest.mark.parametrize(
    ("form", "code"),
    [
        *((form, torch.ones(1, dtype=dtype)) for form in ("bits", "gaps") for dtype in (torch.float32, torch.int64)),
        ("gaps", torch.ones(1, 1, dtype=torch.uint8)),
    ],
)
def test_places_that_are_no_bytes(form: str, code: Tensor, tmp_path: Path) -> None:
    path = model_file(tmp_path / "net", {f"{form}:w": code, "values:w": torch.ones(1)}, {"w": [8]})
    refused(lambda: read(path), path)


@pytest.mark.parametrize(
    "shapes", ["{", [], 7, {"other": [1]}, {"w": {"w": 1}}], ids=["cut", "list", "number", "missing", "names"]
)
def test_shapes_that_are_none(shapes: Any, tmp_path: Path) -> None:
    path = model_file(tmp_path / "net", {"dense:w": torch.ones(1)}, shapes)
    refused(lambda: read(path), path)


@pytest.mark.parametrize("tied", [["w"], {"v": "nothing"}, {"v": ["w"]}, 7])
def test_ties_to_nothing(tied: Any, tmp_path: Path) -> None:
    path = model_file(tmp_path / "net", {"dense:w": torch.ones(1)}, {"w": [1]}, tied)
    refused(lambda: read(path), path)


@pytest.mark.parametrize(
    "plan", ["{}", DEEP, "7", '{"choices": 3, "notes": []}'], ids=["empty", "deep", "7", "choices"]
)
def test_a_plan_that_is_none_names_its_file(plan: str, tmp_path: Path) -> None:
    path = model_file(tmp_path / "net", {"dense:w": torch.ones(1)}, {"w": [1]}, plan=plan)
    refused(lambda: read(path), path)


@pytest.mark.parametrize("many", [1, 1000])
def test_a_few_bytes_that_declare_six_hundred_million_zeros(many: int, tmp_path: Path) -> None:
    """By another process: the most memory that this one ever had is more than that already."""
    tensors = {
        f"{part}:w{i}": t for i in range(many) for part, t in (("gaps", BYTES.clone()), ("values", torch.ones(1)))
    }
    path = model_file(tmp_path / "net", tensors, {f"w{i}": [600_000_000 // many] for i in range(many)})
    code = (
        "import resource, sys\nfrom powerprop.export.file import read\nfrom powerprop.files import FileError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    read(sys.argv[1])\nexcept FileError as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    message, grown = done.stdout.splitlines()
    assert message.startswith(str(path))
    assert int(grown) < 100_000  # kilobytes


def test_zeros_are_stored_as_bytes_so_that_their_number_can_be_believed(tmp_path: Path) -> None:
    for weight in (torch.zeros(3000, 3000), torch.eye(700), torch.cat([torch.ones(1), torch.zeros(10**6)])):
        file.write({"w": weight}, tmp_path / "net")
        assert torch.equal(read(tmp_path / "net").state["w"], weight)
        assert len(encode(weight)["gaps"]) >= weight.numel() // 256


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
