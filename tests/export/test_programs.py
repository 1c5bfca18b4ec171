"""ONNX files against onnxruntime on real inputs, torch.export programs, and the smaller network they are made of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import powerprop as pp
from powerprop.export import programs
from powerprop.export.programs import MissingOnnxError, answers_of_onnx
from powerprop_paper.data import Images
from powerprop_paper.models import lenet_300_100, mlp, resnet20


def pruned(net: nn.Module, sparsity: float = 0.95) -> nn.Module:
    pp.prune(net, sparsity)
    return net.eval()


def images(real_data: Callable[[str], Images]) -> Tensor:
    return real_data("mnist").test_x[:50].float().div(255).flatten(1)


def test_onnx_answers_as_the_model_on_real_images(real_data: Callable[[str], Images], tmp_path: Path) -> None:
    net, x = pruned(lenet_300_100(generator=torch.Generator().manual_seed(0))), images(real_data)
    size = pp.export.onnx(net, x[:1], tmp_path / "net.onnx")
    assert size == (tmp_path / "net.onnx").stat().st_size
    for n in (1, 50):
        torch.testing.assert_close(answers_of_onnx(str(tmp_path / "net.onnx"), [x[:n]])[0], net(x[:n]))


def test_onnx_of_a_residual_network(tmp_path: Path) -> None:
    net, x = pruned(resnet20(generator=torch.Generator().manual_seed(0))), torch.rand(3, 3, 8, 8)
    pp.export.onnx(net, x, tmp_path / "net.onnx")
    torch.testing.assert_close(answers_of_onnx(str(tmp_path / "net.onnx"), [x])[0], net(x), rtol=1e-4, atol=1e-5)


def test_onnx_of_one_task(tmp_path: Path) -> None:
    net, x = pruned(mlp([6, 12, 3], heads=2), 0.5), torch.randn(4, 6)
    pp.export.onnx(net, (x, 1), tmp_path / "net.onnx")
    torch.testing.assert_close(answers_of_onnx(str(tmp_path / "net.onnx"), [x])[0], net(x, 1))


def test_a_file_that_answers_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "answers_of_onnx", lambda content, inputs: [torch.zeros(2, 3)])
    with pytest.raises(ValueError, match="onnxruntime gives other outputs than the model"):
        pp.export.onnx(mlp([6, 3]), torch.randn(2, 6), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingOnnxError, match=r"ONNX needs onnxruntime: pip install 'powerprop\[onnx\]'"):
        pp.export.onnx(mlp([6, 3]), torch.randn(2, 6), tmp_path / "net.onnx")


def test_telemetry_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    said: list[bool] = []
    monkeypatch.setattr(onnxruntime, "disable_telemetry_events", lambda: said.append(True))
    with pytest.raises(Exception, match=".*"):
        answers_of_onnx(b"", [])
    assert said == [True]


@pytest.mark.parametrize("batch", [1, 4])
def test_programs_take_any_batch(batch: int, tmp_path: Path) -> None:
    net = pruned(lenet_300_100(generator=torch.Generator().manual_seed(0)))
    program = pp.export.program(net, torch.rand(batch, 784))
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    for n in (1, 2, 9):
        x = torch.rand(n, 784)
        torch.testing.assert_close(loaded(x), net(x))


def test_programs_of_models_with_named_inputs() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, a: Tensor, *, b: Tensor) -> Tensor:
            return self.fc(a + b)

    net = Sum()
    program = pp.export.program(net, {"a": torch.randn(2, 5), "b": torch.randn(2, 5)})
    a, b = torch.randn(7, 5), torch.randn(7, 5)
    torch.testing.assert_close(program.module()(a, b), net(a, b=b))


def test_the_smaller_network_is_plain_and_smaller() -> None:
    net = pruned(lenet_300_100(generator=torch.Generator().manual_seed(0)), 0.98)
    x = torch.rand(5, 784)
    small = pp.export.smaller(net, x)
    assert sum(p.numel() for p in small.parameters()) < 0.7 * sum(p.numel() for p in net.parameters())
    torch.testing.assert_close(small(x), net(x))
