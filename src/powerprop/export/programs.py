"""Other forms of a network: a smaller plain one, torch.export programs, ONNX files."""

from __future__ import annotations

import copy
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

from powerprop.export.calls import Call, same
from powerprop.export.draft import Draft, make_draft
from powerprop.files import write_atomically
from powerprop.reparam import fold

__all__ = ["MissingOnnxError", "answers_of_onnx", "onnx", "program", "smaller"]


class MissingOnnxError(ImportError):
    """ONNX was asked for and its packages are not installed."""


def smaller(model: nn.Module, example: Any) -> nn.Module:
    """The network with batch norms folded and dead units removed, as a plain dense module that takes tensors alone.

    A model that is not one graph comes back as a copy.
    """
    return _draft(model, Call.of(example)).network


def program(model: nn.Module, example: Any) -> ExportedProgram:
    """The smaller network as a `torch.export` program, for any batch size if the model allows it."""
    draft = _draft(model, Call.of(example))
    call = _two_or_more(draft.call)
    with _quiet():
        return torch.export.export(draft.network, call.args, call.kwargs, dynamic_shapes=_dynamic(call, draft.network))


def onnx(model: nn.Module, example: Any, path: str | Path) -> int:
    """Write the smaller network as an ONNX file through torch's exporter, for any batch size if the model allows it.

    The file is run by onnxruntime on the example and must give the model's outputs, or nothing is written. Returns its
    bytes. Needs `pip install 'powerprop[onnx]'`.
    """
    draft = _draft(model, Call.of(example))
    call = _two_or_more(draft.call)
    _require_onnx()
    with _quiet():
        exported = torch.onnx.export(
            draft.network, call.args, kwargs=call.kwargs, dynamo=True, verbose=False,
            dynamic_shapes=_dynamic(call, draft.network),
        )  # fmt: skip
    assert exported is not None
    content: bytes = exported.model_proto.SerializeToString()
    with torch.no_grad():
        wanted = call(draft.network)
    if not same(answers_of_onnx(content, call.inputs(draft.network)), _tensors(wanted)):
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


def _draft(model: nn.Module, call: Call) -> Draft:
    with torch.no_grad():
        return make_draft(fold(copy.deepcopy(getattr(model, "_orig_mod", model))).eval().requires_grad_(False), call)


def _tensors(outputs: Any) -> list[Tensor]:
    return [x.cpu() for x in tree_leaves(outputs) if isinstance(x, Tensor)]


def _batched(call: Call) -> bool:
    return all(x.dim() and len(x) == call.batch() for x in call.tensors())


def _two_or_more(call: Call) -> Call:
    """One input twice: a size of one would be taken for a constant."""
    if call.batch() != 1 or not _batched(call):
        return call
    double = {n: torch.cat([v, v]) if isinstance(v, Tensor) else v for n, v in call.kwargs.items()}
    return Call(tuple(torch.cat([v, v]) if isinstance(v, Tensor) else v for v in call.args), double)


def _dynamic(call: Call, model: nn.Module) -> dict[str, Any] | None:
    """The batch axis of every tensor is free, where they share one."""
    if not _batched(call):
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
