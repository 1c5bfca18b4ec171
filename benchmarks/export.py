"""Latency of pruned networks: dense PyTorch, dense onnxruntime and the exported network, side by side.

    python benchmarks/export.py [--quick] [--threads 1 2]

Dense PyTorch and the exported network are timed in turn, onnxruntime after them, the best of many rounds. "faster" is
dense PyTorch's time over the exported network's. The exit code is 1 if a network is slower than dense PyTorch (one that
came back as it was: by more than the noise of 3%), or, with one thread, a fully connected one misses its limit. The
networks are untrained and pruned by magnitude; trained ones have fewer dead units.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import powerprop as pp
from powerprop.export.measure import best_times
from powerprop_paper.models import conv6, lenet_300_100, mlp, resnet20

LIMITS = {64: {0.9: 2.0, 0.95: 3.0, 0.98: 6.0, 0.99: 10.0}, 1: {0.9: 1.1, 0.95: 1.4, 0.98: 2.5, 0.99: 3.5}}
"""By batch and sparsity: how many times faster than dense PyTorch a fully connected network must be."""


WRITTEN: dict[tuple[str, tuple[int, ...]], bytes] = {}
"""ONNX files by network and shape: they take longer to write than all else here."""


@dataclass(frozen=True)
class Case:
    """A network, pruned, at a batch size."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    sparsity: float
    batch: int

    @property
    def limit(self) -> float:
        return LIMITS[self.batch][self.sparsity] if len(self.shape) == 1 else 1.0


def cases() -> Iterator[Case]:
    nets = {"784-1000-1000-10": lambda: mlp([784, 1000, 1000, 10], generator=seeded()), "LeNet-300-100": lenet}
    for name, make in nets.items():
        for batch in (1, 64):
            for sparsity in (0.9, 0.95, 0.98, 0.99):
                yield Case(name, make, (784,), sparsity, batch)
    for name, make in {"Conv-6": lambda: conv6(generator=seeded()), "ResNet-20": residual}.items():
        for batch in (1, 16):
            yield Case(name, make, (3, 32, 32), 0.95, batch)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def lenet() -> nn.Module:
    return lenet_300_100(generator=seeded())


def residual() -> nn.Module:
    return resnet20(generator=seeded())


def measure(case: Case, seconds: float) -> tuple[dict[str, float], str]:
    """Seconds a call of each, and what the export chose."""
    net = case.make().eval().requires_grad_(False)
    pp.prune(net, case.sparsity)
    x = torch.rand(case.batch, *case.shape, generator=seeded())
    fast = pp.export.sparse(net, x)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x), rtol=1e-3, atol=1e-4)
        times = best_times({"dense": lambda: net(x), "exported": lambda: fast(x)}, torch.device("cpu"), seconds)
    # After the others: threads of onnxruntime go on asking for work after a call, on the cores of whatever comes next.
    session = dense_onnx(case.name, case.make, tuple(x.shape))
    feed = {session.get_inputs()[0].name: x.numpy()}
    times |= best_times({"onnx": lambda: session.run(None, feed)}, torch.device("cpu"), seconds)
    return times, fast.plan.network


def dense_onnx(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> onnxruntime.InferenceSession:
    """The same network before pruning: a pruned one would be written without its dead units."""
    onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    if (name, shape) not in WRITTEN:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "net.onnx"
            pp.export.onnx(make(), torch.rand(shape, generator=seeded()), path)
            WRITTEN[name, shape] = path.read_bytes()
    return onnxruntime.InferenceSession(WRITTEN[name, shape], options, providers=["CPUExecutionProvider"])


def least(case: Case, threads: int, how: str) -> float:
    """How many times faster a network must have been; one that came back as it was, is compared with itself."""
    return case.limit if threads == 1 and case.limit > 1 else 0.97 if how == "dense" else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less time for each network")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    missed = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        table = Table("network", "batch", "zero", "dense", "onnx", "exported", "faster", "over onnx", "limit", "how",
                      title=f"{threads} threads, microseconds")  # fmt: skip
        for case in cases():
            times, how = measure(case, 0.1 if arguments.quick else 0.5)
            faster = times["dense"] / times["exported"]
            shown = [f"{times[n] * 1e6:,.0f}" for n in ("dense", "onnx", "exported")]
            table.add_row(case.name, str(case.batch), f"{case.sparsity:.0%}", *shown, f"{faster:.2f}x",
                          f"{times['onnx'] / times['exported']:.2f}x", f"{case.limit:g}x", how)  # fmt: skip
            if faster < least(case, threads, how):
                missed.append(f"{case.name} {case.batch} {case.sparsity:.0%}")
        Console(width=110).print(table)
    print("missed:", ", ".join(missed) or "none")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
