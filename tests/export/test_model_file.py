"""Files of models: what is saved comes back, small; content that cannot be, and other models, change nothing."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as to_bytes
from safetensors.torch import save_file
from torch import Tensor, nn

import powerprop as pp
from powerprop.export import file
from powerprop.export.file import decode, encode, from_gaps, read, to_gaps
from powerprop.files import FileError, write_tensors
from powerprop_paper.models import lenet_300_100, mlp, resnet20
from test_files import BYTES, DEEP, SHAPES, refused

HALF = (torch.float16, torch.bfloat16)
ONE = torch.ones(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.out = nn.Linear(6, 10, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("nothing", torch.zeros(0, 3))


def same_state(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) and x[n].dtype == y[n].dtype for n in x)


def fresh(seed: int = 1) -> nn.Module:
    return mlp([20, 30, 5], generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.99])
def test_what_is_saved_comes_back(path: Path, dtype: torch.dtype, sparsity: float) -> None:
    net = lenet_300_100(generator=torch.Generator().manual_seed(0)).to(dtype)
    pp.prune(net, sparsity)
    sizes = pp.save(net, path)
    other = lenet_300_100().to(dtype)
    assert pp.load(path, other) is other
    assert same_state(net, other)
    assert sizes.file_bytes == path.stat().st_size
    assert sizes["fc1.weight"].nonzero == int((net.fc1.weight != 0).sum())
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(("make", "limit"), [(lenet_300_100, 0.1), (resnet20, 0.12)])
def test_95_percent_sparse_takes_less_than_a_tenth(path: Path, dtype: torch.dtype, make: Any, limit: float) -> None:
    net = make().to(dtype)
    pp.prune(net, 0.95)
    save_file(net.state_dict(), path.with_name("dense"))
    sizes = pp.save(net, path)
    assert sizes.file_bytes < limit * path.with_name("dense").stat().st_size
    assert sizes.ratio == sizes.file_bytes / sizes.dense_bytes
    assert str(sizes) == f"{sizes.file_bytes:,} bytes, {sizes.ratio:.1%} of {sizes.dense_bytes:,} dense"


def test_tied_weights_and_buffers(path: Path) -> None:
    net = Tied()
    assert pp.save(net, path)["out.weight"].form == "as embed.weight"
    other = pp.load(path, Tied())
    assert same_state(net, other)
    assert other.out.weight is other.embed.weight


def test_not_a_number_and_zeros_of_both_signs(path: Path) -> None:
    net = nn.Linear(40, 40)
    with torch.no_grad():
        net.weight.zero_()
        net.weight[0, 0], net.weight[1, 1], net.weight[2, 2] = float("nan"), float("inf"), -0.0
    pp.save(net, path)
    other = pp.load(path, nn.Linear(40, 40))
    assert torch.equal(other.weight.isnan(), net.weight.isnan())
    assert other.weight[1, 1] == float("inf")


def test_only_plain_tensors_are_saved(path: Path) -> None:
    class Extra(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    with pytest.raises(TypeError, match="only plain tensors can be saved, '_extra_state' is a dict"):
        pp.save(Extra(), path)
    assert not path.exists()


def test_nothing_in_the_file_is_code(path: Path) -> None:
    pp.save(fresh(), path)
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header.pop("__metadata__").keys() == {"powerprop"}
    assert all(entry.keys() == {"dtype", "shape", "data_offsets"} for entry in header.values())


def test_the_plan_travels_with_the_weights(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = fresh(), torch.randn(8, 20)
    pp.prune(net, 0.9)
    pp.save(net, path)
    torch.testing.assert_close(pp.export.load(path, fresh(3), x)(x), net(x))  # measured
    fast = pp.export.sparse(net, x)
    pp.save(net, path, plan=fast.plan)
    assert read(path).plan == fast.plan
    monkeypatch.setattr("powerprop.export.measure.best_times", None)
    again = pp.export.load(path, fresh(3), x)
    assert again.plan.choices == fast.plan.choices
    torch.testing.assert_close(again(x), fast(x))


def test_the_optimiser_goes_on_from_what_was_loaded(path: Path) -> None:
    net = fresh()
    optimizer = pp.Powerprop(torch.optim.SGD(net.parameters(), lr=0.0), net, alpha=2.0)
    wanted: Tensor = fresh(5).fc1.weight
    pp.save(fresh(5), path)
    pp.load(path, net)
    net(torch.randn(2, 20)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(net.fc1.weight, wanted)


# --- encoding -----------------------------------------------------------------------------------------------------


def test_gaps_by_hand() -> None:
    assert to_gaps(np.array([0, 1, 5]), 6).tolist() == [0, 0, 3]
    assert to_gaps(np.array([254, 255]), 256).tolist() == [254, 0]
    assert to_gaps(np.array([255]), 256).tolist() == [255, 0]
    assert to_gaps(np.array([600]), 1200).tolist() == [255, 255, 90, 255, 255]
    assert from_gaps(torch.tensor([255, 255, 90], dtype=torch.uint8), 601).tolist() == [600]


def test_the_smallest_form_by_hand() -> None:
    """32 weights: 4 bytes of bits, or a byte for each value."""
    few, some, all_of_them = (torch.zeros(32) for _ in range(3))
    few[3], some[::3], all_of_them[:] = 1.0, 2.0, 3.0
    assert {k: v.tolist() for k, v in encode(few).items()} == {"gaps": [3], "values": [1.0]}
    assert list(encode(some)) == ["bits", "values"]
    assert list(encode(all_of_them)) == ["dense"]


@settings(max_examples=100)
@given(st.lists(st.integers(0, 3000), max_size=40, unique=True), st.sampled_from([torch.float32, torch.bfloat16]))
def test_encoding_is_exact(places: list[int], dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 1001, dtype=dtype)
    tensor.view(-1)[places] = torch.randn(len(places), dtype=dtype) + 5
    assert torch.equal(decode(encode(tensor), (3, 1001)), tensor)


def test_zeros_are_stored_as_bytes_so_that_their_number_can_be_believed(path: Path) -> None:
    for weight in (torch.zeros(3000, 3000), torch.eye(700), torch.cat([ONE, torch.zeros(10**6)])):
        file.write({"w": weight}, path)
        assert torch.equal(read(path).state["w"], weight)
        assert len(encode(weight)["gaps"]) >= weight.numel() // 256


# --- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (mlp([20, 30, 5, 5]), "the file has no 'fc3.weight'"),
        (mlp([20, 5]), "the model has no 'fc2.weight'"),
        (mlp([20, 31, 5]), r"'fc1.weight' has shape \(30, 20\) in the file and \(31, 20\) in the model"),
        (mlp([20, 30, 5]).half(), "'fc1.weight' has dtype torch.float32 in the file and torch.float16 in the model"),
    ],
)
def test_another_model(path: Path, net: nn.Module, message: str) -> None:
    pp.save(fresh(), path)
    before = copy.deepcopy(net)
    with pytest.raises(FileError, match=message) as error:
        pp.load(path, net)
    assert str(path) in str(error.value)
    assert same_state(net, before)


@pytest.mark.parametrize("content", [b"", b"these are not the weights", to_bytes({"fc1.weight": ONE})])
def test_a_foreign_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    net = fresh(2)
    before = copy.deepcopy(net)
    refused(lambda: pp.load(path, net), path)
    assert same_state(net, before)


def model_file(path: Path, tensors: dict[str, Tensor], shapes: Any, tied: Any = None, plan: Any = None) -> None:
    """A file of a model with a valid checksum, whatever is in it."""
    write_tensors(path, file.FORMAT, tensors, {"shapes": shapes, "tied": {} if tied is None else tied, "plan": plan})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ["dense", "bits", "gaps"])
def test_shapes_that_the_bytes_of_a_model_do_not_stand_for(shape: Any, form: str, path: Path) -> None:
    model_file(path, {"dense:w": ONE} if form == "dense" else {f"{form}:w": BYTES, "values:w": ONE}, {"w": shape})
    refused(lambda: read(path), path)


@pytest.mark.parametrize("form", ["bits", "gaps"])
@pytest.mark.parametrize("code", [ONE, torch.ones(1, dtype=torch.int64), torch.ones(1, 9, dtype=torch.uint8)])
def test_places_that_are_no_bytes(form: str, code: Tensor, path: Path) -> None:
    model_file(path, {f"{form}:w": code, "values:w": ONE}, {"w": [8]})
    refused(lambda: read(path), path)


@pytest.mark.parametrize(
    "data",
    [
        *({"shapes": shapes} for shapes in ("{", [], 7, {"other": [1]}, {"w": {"w": 1}})),
        *({"tied": tied} for tied in (["w"], {"v": "nothing"}, {"v": ["w"]}, 7)),
        *({"plan": plan} for plan in ("{}", DEEP, "7", 7, '{"choices": 3, "notes": []}')),
    ],
    ids=lambda data: str(data)[:30],
)
def test_content_that_is_none(data: dict[str, Any], path: Path) -> None:
    model_file(path, {"dense:w": ONE}, **{"shapes": {"w": [1]}, **data})
    refused(lambda: read(path), path)


@pytest.mark.parametrize("many", [1, 1000])
def test_a_few_bytes_that_declare_six_hundred_million_zeros(many: int, path: Path) -> None:
    """By another process: the most memory that this one ever had is more than that already."""
    tensors = {f"{part}:w{i}": t for i in range(many) for part, t in (("gaps", BYTES.clone()), ("values", ONE.clone()))}
    model_file(path, tensors, {f"w{i}": [600_000_000 // many] for i in range(many)})
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
