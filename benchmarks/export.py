"""Latency of pruned networks on one core: exported, dense PyTorch, onnxruntime, torch.sparse and DeepSparse.

    OMP_NUM_THREADS=1 [DEEPSPARSE_PYTHON=...] python benchmarks/export.py [--rounds 10] [--models mlp conv6 ...]

All are called in turn, round after round, and the least processor time of a call counts, so that other programs on
the machine disturb all alike. Networks are untrained and pruned by magnitude to one sparsity in every layer, those of
the GPT's blocks. onnxruntime computes densely; torch.sparse is a chain of `torch.addmm` with CSR weights, for linear
layers. DeepSparse, whose licence is yours to accept, runs where DEEPSPARSE_PYTHON names a python that has it:

    python3.11 -m venv ds && ds/bin/pip install deepsparse==1.8.0 'onnx<1.15' 'protobuf<5'

The exit code is 1 if a network is slower than dense PyTorch by more than 3%.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import powerprop as pp
from powerprop_paper.models import conv6, gpt, mlp, resnet50

SERVER = """
import sys, time
import numpy as np
from deepsparse import compile_model
path, kind, *shape = sys.argv[1:]
shape = [int(n) for n in shape]
x = np.random.rand(*shape).astype("f4") if kind == "float" else np.random.randint(0, 64, shape)
engine = compile_model(path, batch_size=shape[0], num_cores=1)
engine.run([x])
print("ready", flush=True)
for line in sys.stdin:
    start = time.process_time()
    for _ in range(int(line)):
        engine.run([x])
    print((time.process_time() - start) / int(line), flush=True)
"""
"""A process beside this one: it calls the engine as often as it is told, and answers with the time of a call."""


@dataclass(frozen=True)
class Case:
    """A network, pruned, at a batch size."""

    model: str
    sparsity: float
    batch: int

    def make(self) -> tuple[nn.Module, Tensor]:
        """The network and an input."""
        draw = torch.Generator().manual_seed(0)
        if self.model == "mlp":
            return mlp([784, 1000, 1000, 10], generator=draw), torch.rand(self.batch, 784, generator=draw)
        if self.model == "conv6":
            return conv6(generator=draw), torch.rand(self.batch, 3, 32, 32, generator=draw)
        if self.model == "gpt":
            return gpt(64, 512, 4, 8, 128, generator=draw), torch.randint(0, 64, (self.batch, 128), generator=draw)
        return resnet50(generator=draw), torch.rand(self.batch, 3, 224, 224, generator=draw)


def cases(models: list[str]) -> Iterator[Case]:
    for model in models:
        sparsities = {"gpt": (0.8, 0.9, 0.95), "resnet50": (0.9, 0.95)}.get(model, (0.9, 0.95, 0.98))
        for sparsity in sparsities:
            for batch in {"gpt": (1,), "resnet50": (1, 16)}.get(model, (1, 64)):
                yield Case(model, sparsity, batch)


def called(call: Callable[[], object]) -> Callable[[int], float]:
    """Processor seconds of a call, of so many."""

    def timed(count: int) -> float:
        start = time.thread_time()
        for _ in range(count):
            call()
        return (time.thread_time() - start) / count

    return timed


def by_torch_sparse(net: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """A perceptron by torch's own sparse products, activations as columns."""
    layers = [m for m in net.modules() if isinstance(m, nn.Linear)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = [(layer.weight.detach().to_sparse_csr(), layer.bias.detach()[:, None]) for layer in layers]

    def answer() -> Tensor:
        h = x.t().contiguous()
        for i, (weight, bias) in enumerate(weights):
            h = torch.addmm(bias, weight, h)
            h = h.relu_() if i + 1 < len(weights) else h
        return h.t()

    return answer


def by_onnxruntime(path: Path, x: Tensor) -> Callable[[], object]:
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def by_deepsparse(path: Path, x: Tensor, python: str) -> tuple[Callable[[int], float], subprocess.Popen[str]]:
    kind = "float" if x.is_floating_point() else "int"
    command = [python, "-c", SERVER, str(path), kind, *map(str, x.shape)]
    environ = {**os.environ, "NM_DISABLE_ANALYTICS": "True"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environ)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    while (said := stdout.readline()) != "ready\n":
        if not said:
            raise RuntimeError(f"{python} cannot run DeepSparse on {path.name}")

    def timed(count: int) -> float:
        stdin.write(f"{count}\n")
        stdin.flush()
        return float(stdout.readline())

    return timed, process


def measure(case: Case, rounds: int, folder: Path) -> tuple[dict[str, list[float]], str]:
    """The seconds of every round of each, and which network the export chose."""
    net, x = case.make()
    net = net.eval().requires_grad_(False)
    pp.prune(net, case.sparsity, where=["blocks.*.weight"] if case.model == "gpt" else None)
    fast = pp.export.sparse(net, x)
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
    path = folder / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (x,), path, dynamo=False, opset_version=14)
    calls = {"dense": called(lambda: net(x)), "exported": called(lambda: fast(x))}
    if case.model == "mlp":
        calls["torch.sparse"] = called(by_torch_sparse(net, x))
    calls["onnxruntime"] = called(by_onnxruntime(path, x))
    process = None
    if python := os.environ.get("DEEPSPARSE_PYTHON"):
        calls["DeepSparse"], process = by_deepsparse(path, x, python)
    try:
        counts = {name: max(1, min(50, round(0.02 / call(2)))) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(call(counts[name]))
    finally:
        if process is not None:
            process.kill()
            process.communicate()
    return times, fast.plan.network


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=["mlp", "conv6", "gpt", "resnet50"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = ["dense", "onnxruntime", "torch.sparse", "DeepSparse", "exported"]
    title = f"one thread, microseconds of processor time, best of {arguments.rounds} rounds (median)"
    table = Table("network", "zero", "batch", *names, "over dense", "of DeepSparse", "how", title=title)
    missed = []
    with TemporaryDirectory() as folder:
        for case in cases(arguments.models):
            found, how = measure(case, arguments.rounds, Path(folder))
            best = {name: min(times) for name, times in found.items()}
            middle = {name: sorted(times)[len(times) // 2] for name, times in found.items()}
            shown = [f"{best[n] * 1e6:,.0f} ({middle[n] * 1e6:,.0f})" if n in best else "" for n in names]
            mark = f"{best['exported'] / best['DeepSparse']:.2f}x" if "DeepSparse" in best else ""
            faster = best["dense"] / best["exported"]
            table.add_row(case.model, f"{case.sparsity:.0%}", str(case.batch), *shown, f"{faster:.2f}x", mark, how)
            print(case, *shown, f"{faster:.2f}x", mark, how, sep=" | ", flush=True)
            if faster < 0.97:
                missed.append(f"{case.model} {case.batch} {case.sparsity:.0%}")
    Console(width=160).print(table)
    print("slower than dense:", ", ".join(missed) or "none")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
