"""The commands for files of networks: what they show and write, and how they answer bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import powerprop as pp
from powerprop.cli import main
from powerprop.export.file import read
from powerprop.export.programs import answers_of_onnx
from powerprop_paper.models import lenet_300_100

LENET = "powerprop_paper.models:lenet_300_100"


@pytest.fixture
def net() -> nn.Module:
    net = lenet_300_100(generator=torch.Generator().manual_seed(0))
    pp.prune(net, 0.95)
    return net


@pytest.fixture
def file(net: nn.Module, tmp_path: Path) -> Path:
    pp.save(net, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


@pytest.mark.parametrize("origin", ["powerprop", "safetensors", "torch", "lightning"])
def test_inspect_reads_files_of_any_origin(
    origin: str, net: nn.Module, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = net.state_dict()
    if origin == "safetensors":
        save_file(state, file)
    elif origin in ("torch", "lightning"):
        file = tmp_path / "net.pt"
        torch.save(state if origin == "torch" else {"epoch": 3, "state_dict": state}, file)
    assert run("inspect", file) == 0
    shown = capsys.readouterr().out
    assert "fc1.weight" in shown
    assert "300x784" in shown
    assert "266,200 weights, 95.00% zero" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_inspect_fits_80_columns_and_an_ascii_pipe(tmp_path: Path) -> None:
    long = ".".join(["encoder", "transformer", "layers", "11", "attention", "projection", "output", "dense", "weight"])
    save_file({long: torch.randn(64, 64), "x.bias": torch.zeros(3)}, tmp_path / "a.safetensors")
    command = [sys.executable, "-m", "powerprop", "inspect", str(tmp_path / "a.safetensors")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, capture_output=True, check=True, env=environment)
    lines = result.stdout.decode("ascii").splitlines()
    assert max(map(len, lines)) <= 80
    assert any("####" in line for line in lines)


@pytest.mark.parametrize("content", [torch.zeros(4, 4), torch.full((4, 4), float("nan")), torch.zeros(0, 3)])
def test_inspect_of_odd_weights(content: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"w": content, "n": torch.tensor(3)}, tmp_path / "a.safetensors")
    assert run("inspect", tmp_path / "a.safetensors") == 0
    assert "(none)" in (shown := capsys.readouterr().out) or "(some are not finite)" in shown


def test_prune_needs_no_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = lenet_300_100(generator=torch.Generator().manual_seed(0))
    state = {**net.state_dict(), "embed.weight": torch.randn(10, 10)}
    save_file(state, tmp_path / "dense.safetensors")
    assert run("prune", tmp_path / "dense.safetensors", tmp_path / "out.safetensors", "--sparsity", 0.95) == 0
    pp.prune(net, 0.95)
    pruned = read(tmp_path / "out.safetensors").state
    assert all(torch.equal(pruned[n], t) for n, t in net.state_dict().items())
    assert torch.equal(pruned["embed.weight"], state["embed.weight"])
    assert "95.00%" in capsys.readouterr().out
    assert (tmp_path / "out.safetensors").stat().st_size < 0.1 * (tmp_path / "dense.safetensors").stat().st_size


def test_prune_chosen_weights(net: nn.Module, file: Path, tmp_path: Path) -> None:
    arguments = ["--sparsity", 0.99, "--where", "fc2.w*", "--distribution", "global"]
    assert run("prune", file, tmp_path / "out.safetensors", *arguments) == 0
    state = read(tmp_path / "out.safetensors").state
    assert int((state["fc2.weight"] != 0).sum()) == 300
    assert torch.equal(state["fc1.weight"], net.fc1.weight)
    assert run("prune", file, tmp_path / "two.safetensors", "--sparsity", 0.99, "--model", LENET) == 0
    assert int((read(tmp_path / "two.safetensors").state["fc1.weight"] != 0).sum()) == 2352


def test_export_sparse(net: nn.Module, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", file, "--model", LENET, "--shape", 784, "--batch", 8) == 0
    out = file.with_name("net.sparse.safetensors")
    assert "fc1" in (shown := capsys.readouterr().out)
    assert out.name in shown
    x = torch.rand(8, 784)
    fast = pp.export.load(out, lenet_300_100(), x)
    assert fast.plan.batch == 8
    torch.testing.assert_close(fast(x), net(x))


def test_export_onnx(net: nn.Module, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "other.onnx"
    assert run("export", file, "--format", "onnx", "--model", LENET, "--shape", 784, "--out", out) == 0
    x = torch.rand(5, 784)
    torch.testing.assert_close(answers_of_onnx(str(out), [x])[0], net(x))


def test_export_program(net: nn.Module, file: Path) -> None:
    assert run("export", file, "--format", "pt2", "--model", LENET, "--shape", 784) == 0
    x = torch.rand(5, 784)
    torch.testing.assert_close(torch.export.load(file.with_suffix(".pt2")).module()(x), net(x))


def test_export_dense_needs_no_network(net: nn.Module, file: Path) -> None:
    assert run("export", file, "--format", "dense") == 0
    state = load_file(file.with_name("net.dense.safetensors"))
    assert all(torch.equal(state[n], t) for n, t in net.state_dict().items())


def test_bench_model(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench-model", file, "--model", LENET, "--shape", 784, "--batches", 1, 4) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "microseconds" in shown[0]
    assert [line.split()[0] for line in shown[2:]] == ["batch", "1", "4"]
    assert all("of 3" in line for line in shown[3:])
    assert max(map(len, shown)) <= 80


def test_a_network_of_the_current_folder(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_networks.py").write_text(
        "from powerprop_paper.models import lenet_300_100 as make\nseven = lambda: 7\n"
    )
    monkeypatch.chdir(tmp_path)
    assert run("bench-model", file, "--model", "my_networks:make", "--shape", 784, "--batches", 2) == 0
    assert run("bench-model", file, "--model", "my_networks:seven", "--shape", 784) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{tmp}/none.safetensors"], "none.safetensors is not there, or not a file"),
        (["inspect", "{tmp}/text.safetensors"], "text.safetensors: not a complete safetensors file"),
        (["inspect", "{tmp}/text.pt"], "text.pt: not a torch checkpoint of tensors alone"),
        (["inspect", "{tmp}/list.pt"], "list.pt: expected a state dict, names and tensors, got list"),
        (["prune", "{file}", "{tmp}/o", "--sparsity", "1.5"], "sparsity must be in [0, 1), got 1.5"),
        (["prune", "{file}", "{tmp}/o", "--distribution", "even"], "argument --distribution: invalid choice: 'even'"),
        (["prune", "{file}", "{tmp}/o", "--where", "conv*"], "--where 'conv*' matches no tensor; there are fc1.weight"),
        (["export", "{file}", "--format", "zip"], "argument --format: invalid choice: 'zip'"),
        (["export", "{file}"], "--model must be package.module:function"),
        (["export", "{file}", "--model", "nowhere:net"], "--model nowhere:net: No module named 'nowhere'"),
        (["export", "{file}", "--model", "powerprop_paper.models:net"], "has no attribute 'net'"),
        (["export", "{file}", "--model", LENET], "--shape must be the positive sizes of one input"),
        (["export", "{file}", "--model", "powerprop_paper.models:resnet20", "--shape", "784"], "is of another model"),
        (["bench-model", "{file}", "--model", LENET], "the following arguments are required: --shape"),
        (["bench-model", "{file}", "--model", LENET, "--shape", "784", "--batches"], "expected at least one argument"),
        (["prune", "{file}"], "the following arguments are required: out; see powerprop prune --help"),
        (["inspect", "{file}", "--all"], "unrecognized arguments: --all; see powerprop --help"),
        ([], "expected a command: inspect, prune, export, bench-model, advise, run, list"),
        (["inspct", "{file}"], "unknown command 'inspct' (did you mean inspect or list?); known are inspect"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    arguments: list[str], message: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("text.safetensors", "text.pt"):
        (tmp_path / name).write_text("no tensors here, but a few words of text that go on for a while")
    torch.save([1, 2], tmp_path / "list.pt")
    before = sorted(tmp_path.iterdir())
    assert run(*(a.format(tmp=tmp_path, file=file) for a in arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert sorted(tmp_path.iterdir()) == before
