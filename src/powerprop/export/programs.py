"""Other forms of a network: a smaller plain one, torch.export programs, ONNX files."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves

from powerprop.export.exported import Exported, Plan
from powerprop.export.graph import Call, UntraceableError, inference_copy, same
from powerprop.export.measure import as_graph
from powerprop.files import write_atomically

__all__ = ["MissingOnnxError", "answers_of_onnx", "onnx", "program", "smaller"]


class MissingOnnxError(ImportError):
    """ONNX was asked for and its packages are not installed."""


def smaller(model: nn.Module, example: Any) -> nn.Module:
    """The network with batch norms folded and dead units removed, as a plain dense module that takes tensors alone.

    A model that is not one graph comes back as a copy.

    Examples:
        >>> small = pp.export.smaller(model, x)
    """
    return _smaller(model, example)[0]


def program(model: nn.Module, example: Any) -> ExportedProgram:
    """The smaller network as a `torch.export` program, for any batch size if the model allows it.

    Examples:
        >>> program = pp.export.program(model, x)
    """
    network, call = _smaller(model, example)
    with _quiet():
        return torch.export.export(network, call.args, call.kwargs, dynamic_shapes=_dynamic(call, network))


def onnx(model: nn.Module, example: Any, path: str | Path) -> int:
    """Write the smaller network as an ONNX file through torch's exporter, for any batch size if the model allows it.

    The file is run by onnxruntime on the example and must give the model's outputs, or nothing is written. Returns its
    bytes. Needs `pip install 'powerprop[onnx]'`.

    Examples:
        >>> size = pp.export.onnx(model, x, "net.onnx")
    """
    network, call = _smaller(model, example)
    _require_onnx()
    with _quiet():
        exported = torch.onnx.export(
            network, call.args, kwargs=call.kwargs, dynamo=True, verbose=False, dynamic_shapes=_dynamic(call, network)
        )
    assert exported is not None
    content: bytes = exported.model_proto.SerializeToString()
    with torch.no_grad():
        wanted = [x.cpu() for x in tree_leaves(call(network)) if isinstance(x, Tensor)]
    if not same(answers_of_onnx(content, call.inputs(network)), wanted):
        raise ValueError(f"onnxruntime gives other outputs than the model, so that {path} was not written")
    write_atomically(path, content)
    return len(content)


def answers_of_onnx(content: bytes | str, inputs: list[Tensor]) -> list[Tensor]:
    """What onnxruntime says to these inputs, on the CPU with as many threads as torch has; its telemetry is off."""
    runtime = _require_onnx()
    runtime.disable_telemetry_events()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    feeds = {i.name: x.detach().cpu().numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.as_tensor(y) for y in session.run(None, feeds)]


@torch.no_grad()
def _smaller(model: nn.Module, example: Any) -> tuple[nn.Module, Call]:
    """The verified graph of a model, or a copy of it, and its call; of one input twice: one is taken for a constant."""
    dense, call = inference_copy(model), Call.of(example)
    try:
        candidate = as_graph(dense, call)
        plan = Plan("smaller", True, call.batch(), torch.get_num_threads())
        candidate.check(Exported(candidate.network, plan, candidate.arguments))
        network, call = candidate.network, candidate.inputs
    except UntraceableError:
        network = dense
    return network, call.resized(2) if call.batch() == 1 and call.is_batched() else call


def _dynamic(call: Call, model: nn.Module) -> dict[str, Any] | None:
    """The batch axis of every tensor is free, where they share one."""
    if not call.is_batched():
        return None
    names = call.named(model)
    given = [n for n in names if n in call.kwargs] + list(names)[: len(call.args)]
    return {n: {0: Dim.AUTO} if isinstance(names[n], Tensor) else None for n in given}


def _require_onnx() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingOnnxError(f"ONNX needs {error.name}: pip install 'powerprop[onnx]'") from None
    return onnxruntime


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporters say of themselves: a deprecation inside torch, and that torchvision is absent."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
            yield
    finally:
        log.setLevel(level)
