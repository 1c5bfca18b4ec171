"""Files of models: what is saved comes back, small; what is damaged or foreign changes nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as to_bytes
from safetensors.torch import save_file
from torch import Tensor, nn

import powerprop as pp
from powerprop.export.file import decode, encode, from_gaps, read, to_gaps
from powerprop.files import FileError
from powerprop_paper.models import lenet_300_100, mlp, resnet20

HALF = (torch.float16, torch.bfloat16)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.99])
def test_what_is_saved_comes_back(tmp_path: Path, dtype: torch.dtype, sparsity: float) -> None:
    net = lenet_300_100(generator=torch.Generator().manual_seed(0)).to(dtype)
    pp.prune(net, sparsity)
    sizes = pp.save(net, tmp_path / "net.safetensors")
    other = lenet_300_100().to(dtype)
    assert pp.load(tmp_path / "net.safetensors", other) is other
    assert same_state(net, other)
    assert sizes.file_bytes == (tmp_path / "net.safetensors").stat().st_size
    assert sizes["fc1.weight"].nonzero == int((net.fc1.weight != 0).sum())
    assert list(tmp_path.iterdir()) == [tmp_path / "net.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("make", [lenet_300_100, resnet20])
def test_95_percent_sparse_takes_less_than_a_tenth(tmp_path: Path, dtype: torch.dtype, make: type) -> None:
    net = make().to(dtype)
    pp.prune(net, 0.95)
    save_file(net.state_dict(), tmp_path / "dense.safetensors")
    sizes = pp.save(net, tmp_path / "sparse.safetensors")
    dense, limit = (tmp_path / "dense.safetensors").stat().st_size, 0.1 if make is lenet_300_100 else 0.12
    assert sizes.file_bytes < limit * dense
    assert sizes.ratio == sizes.file_bytes / sizes.dense_bytes
    assert str(sizes) == f"{sizes.file_bytes:,} bytes, {sizes.ratio:.1%} of {sizes.dense_bytes:,} dense"


def test_tied_weights_and_buffers(tmp_path: Path) -> None:
    net = Tied()
    sizes = pp.save(net, tmp_path / "net.safetensors")
    assert sizes["out.weight"].form == "as embed.weight"
    other = pp.load(tmp_path / "net.safetensors", Tied())
    assert same_state(net, other)
    assert other.out.weight is other.embed.weight


def test_gaps_by_hand() -> None:
    assert to_gaps(np.array([0, 1, 5]), 6).tolist() == [0, 0, 3]
    assert to_gaps(np.array([254, 255]), 256).tolist() == [254, 0]
    assert to_gaps(np.array([255]), 256).tolist() == [255, 0]
    assert to_gaps(np.array([600]), 601).tolist() == [255, 255, 90]
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
    parts = encode(tensor)
    assert torch.equal(decode(parts, (3, 1001)), tensor)


def test_not_a_number_and_zeros_of_both_signs(tmp_path: Path) -> None:
    net = nn.Linear(40, 40)
    with torch.no_grad():
        net.weight.zero_()
        net.weight[0, 0], net.weight[1, 1], net.weight[2, 2] = float("nan"), float("inf"), -0.0
    pp.save(net, tmp_path / "net.safetensors")
    other = pp.load(tmp_path / "net.safetensors", nn.Linear(40, 40))
    assert torch.equal(other.weight.isnan(), net.weight.isnan())
    assert other.weight[1, 1] == float("inf")


def spoil(content: bytes, how: str) -> bytes:
    if how == "truncated":
        return content[: len(content) // 2]
    if how == "empty":
        return b""
    if how == "flipped":
        return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    if how == "renamed":  # a tensor's name in the header, of the same length
        return content.replace(b"fc1.bias", b"fc9.bias")
    if how == "text":
        return b"these are not the weights that you are looking for"
    return to_bytes({"fc1.weight": torch.ones(3)})


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "renamed", "text", "foreign"])
def test_a_damaged_or_foreign_file(tmp_path: Path, how: str) -> None:
    path = tmp_path / "net.safetensors"
    pp.save(fresh(), path)
    path.write_bytes(spoil(path.read_bytes(), how))
    net = fresh(2)
    before = copy.deepcopy(net)
    with pytest.raises(FileError, match="net.safetensors"):
        pp.load(path, net)
    assert same_state(net, before)


@settings(max_examples=60)
@given(data=st.data())
def test_any_changed_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("files") / "net.safetensors"
    net = nn.Linear(6, 4)
    pp.prune(net, 0.5)
    pp.save(net, path)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    other = nn.Linear(6, 4)
    before = copy.deepcopy(other)
    try:
        pp.load(path, other)
    except FileError:
        assert same_state(other, before)
    else:  # blanks between header and data are not content
        assert same_state(other, net)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (mlp([20, 30, 5, 5]), "the file has no 'fc3.weight'"),
        (mlp([20, 5]), "the model has no 'fc2.weight'"),
        (mlp([20, 31, 5]), r"'fc1.weight' has shape \(30, 20\) in the file and \(31, 20\) in the model"),
        (mlp([20, 30, 5]).half(), "'fc1.weight' has dtype torch.float32 in the file and torch.float16 in the model"),
    ],
)
def test_another_model(tmp_path: Path, net: nn.Module, message: str) -> None:
    path = tmp_path / "net.safetensors"
    pp.save(fresh(), path)
    before = copy.deepcopy(net)
    with pytest.raises(FileError, match=message) as error:
        pp.load(path, net)
    assert str(path) in str(error.value)
    assert same_state(net, before)


def test_only_plain_tensors_are_saved(tmp_path: Path) -> None:
    class Extra(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    with pytest.raises(TypeError, match="only plain tensors can be saved, '_extra_state' is a dict"):
        pp.save(Extra(), tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_the_plan_travels_with_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = fresh(), torch.randn(8, 20)
    pp.prune(net, 0.9)
    fast = pp.export.sparse(net, x)
    pp.save(net, tmp_path / "net.safetensors", plan=fast.plan)
    assert read(tmp_path / "net.safetensors").plan == fast.plan
    monkeypatch.setattr("powerprop.export.measure.best_times", None)
    again = pp.export.load(tmp_path / "net.safetensors", fresh(3), x)
    assert again.plan.choices == fast.plan.choices
    torch.testing.assert_close(again(x), fast(x))


def test_a_file_without_a_plan_is_measured(tmp_path: Path) -> None:
    net, x = fresh(), torch.randn(8, 20)
    pp.save(net, tmp_path / "net.safetensors")
    torch.testing.assert_close(pp.export.load(tmp_path / "net.safetensors", fresh(3), x)(x), net(x))


def test_nothing_in_the_file_is_code(tmp_path: Path) -> None:
    pp.save(fresh(), tmp_path / "net.safetensors")
    content = (tmp_path / "net.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header.pop("__metadata__").keys() == {"powerprop"}
    assert all(entry.keys() == {"dtype", "shape", "data_offsets"} for entry in header.values())


def test_the_optimiser_goes_on_from_what_was_loaded(tmp_path: Path) -> None:
    net = fresh()
    optimizer = pp.Powerprop(torch.optim.SGD(net.parameters(), lr=0.0), net, alpha=2.0)
    wanted: Tensor = fresh(5).fc1.weight
    pp.save(fresh(5), tmp_path / "net.safetensors")
    pp.load(tmp_path / "net.safetensors", net)
    net(torch.randn(2, 20)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(net.fc1.weight, wanted)
