"""Random moves, by the kernel and by torch: the same results or the same errors, and no memory but the tensors' own.

    python tests/sanitizer_cases.py <folder of a library> <cases> [first seed]

Run by `test_kernel_sanitizer.py` in a process with AddressSanitizer. A case is a function of its seed, so that each
form gets tensors of its own with the same numbers, and one case can be run again alone.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn

from powerprop import kernel
from powerprop.update import Move, power_update_

ODD = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-38, -1e-40, 3e38]
ALPHAS = [1.0, 1.01, 1.375, 1.5, 2.0, 3.0, 5.0, 6.5]
Layout = Callable[[random.Random, Tensor], Tensor]


def offset(chance: random.Random, t: Tensor) -> Tensor:
    """The same numbers somewhere inside of a larger storage, or exactly at its end."""
    before, after = chance.choice([0, 1, 7]), chance.choice([0, 3])
    wide = torch.zeros(before + t.numel() + after, dtype=t.dtype)
    return wide[before : before + t.numel()].view(t.shape).copy_(t)


def turned(chance: random.Random, t: Tensor) -> Tensor:
    """Another order of the dimensions in memory."""
    order = chance.sample(range(t.dim()), t.dim())
    back = [order.index(d) for d in range(t.dim())]
    return t.permute(order).contiguous().permute(back)


def spaced(chance: random.Random, t: Tensor) -> Tensor:
    """Gaps between the numbers."""
    if t.dim() == 0:
        return t
    wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
    return wide[..., ::2].copy_(t)


def expanded(chance: random.Random, t: Tensor) -> Tensor:
    """One number for all of a dimension."""
    return t[:1].expand(t.shape) if t.dim() and t.shape[0] else t


LAYOUTS: list[Layout] = [lambda _, t: t.clone(), lambda _, t: t.clone(), offset, turned, spaced, expanded]


class Own(Tensor):
    """Anybody's subclass."""


KINDS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.double(),
    lambda t: t.half(),
    lambda t: t.to(torch.bool),
    lambda t: t.to("meta"),
    lambda t: t.to_sparse() if t.dtype != torch.bool else t,
    lambda t: t.flatten(),
    lambda t: t[..., :1] if t.dim() else t[None],
    lambda t: t.as_subclass(Own),
    lambda t: torch._neg_view(-t) if t.dtype != torch.bool else t,
    lambda t: nn.Parameter(t, requires_grad=t.is_floating_point()) if t.is_floating_point() else t,
]


def case(seed: int) -> Move:
    """A move with tensors of any shape, layout, storage and kind; most of them such as an optimiser would hand over."""
    chance, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    dims = [chance.choice([0, 1, 2, 3, 5, 17, 128, 129]) for _ in range(chance.choice([0, 1, 1, 2, 2, 3]))]
    shape = [70_001] if chance.random() < 0.01 else [d if math.prod(dims) < 20_000 else min(d, 17) for d in dims]
    alike = chance.random() < 0.5
    same: Layout = chance.choice(LAYOUTS[:4])
    order = chance.random()

    def made(kind: str) -> Tensor:
        t = torch.rand(shape, generator=draw) < 0.5 if kind == "mask" else torch.randn(shape, generator=draw)
        if kind != "mask" and chance.random() < 0.3 and t.numel():
            t.view(-1)[chance.randrange(t.numel())] = chance.choice(ODD)
        laid = same(random.Random(order), t) if alike else chance.choice(LAYOUTS)(chance, t)
        return chance.choice(KINDS)(laid) if chance.random() < 0.06 else laid

    target, before = made("weight"), made("weight")
    active, trainable = (made("mask") if chance.random() < 0.4 else None for _ in range(2))
    theta = chance.choice([None, None, before, made("weight")])
    if chance.random() < 0.1:
        trainable = active
    if chance.random() < 0.08 and target.dim() == 1 and len(target) > 3:  # runs of one storage that overlap
        shared, n = torch.randn(2 * len(target), generator=draw), len(target)
        starts = [chance.randrange(n) for _ in range(3)]
        target, before = shared[starts[0] :][:n], shared[starts[1] :][:n]
        theta = chance.choice([None, shared[starts[2] :][:n]])
    shrink = chance.choice([1.0, 1.0, 0.9, torch.tensor(0.9), torch.tensor(0.9, dtype=torch.float64)])
    decay = chance.choice([(0.0, 0.0), (0.0, 0.0), (0.01, 0.1)])
    rate = chance.choice([1.0, 1.0, None])
    return Move(target, before, chance.choice(ALPHAS), active, trainable, theta, shrink, decay, rate)


def outcome(move: Move, compiled: bool, grads: bool, threads: int) -> tuple[str, list[Tensor]]:
    """What becomes of the tensors, or the error."""
    loaded = kernel._loaded() if compiled else (None, "off")
    torch.set_num_threads(threads)
    with mock.patch.object(kernel, "_loaded", return_value=loaded), torch.set_grad_enabled(grads):
        try:
            power_update_([move])
        except (RuntimeError, ValueError, NotImplementedError, TypeError, IndexError) as error:
            return f"{type(error).__name__}: {error}", []
    written = [move.target] if move.theta is None else [move.target, move.theta]
    return "", [t.detach().as_subclass(Tensor) for t in written if t.device.type == "cpu"]


def agree(ours: Tensor, theirs: Tensor, before: Tensor) -> bool:
    """Equal, or as near as the two forms' roundings: both of the move and of the larger weight."""
    a, b, w = (t.double() for t in (ours, theirs, before))
    error, scale = (a - b).abs(), torch.maximum(b.abs(), w.abs())
    close = error <= 1e-5 * (b - w).abs() + 3e-7 * scale + 2.7e-38
    return bool(((a == b) | close | (a.isnan() & b.isnan()) | (scale > 1e37)).all())


def main(folder: str, count: int, first: int = 0) -> None:
    kernel.__path__.insert(0, folder)
    assert kernel.backend().startswith(f"kernel: {folder}"), kernel.backend()
    suited = errors = 0
    for seed in range(first, first + count):
        move, twin, grads = case(seed), case(seed), seed % 5 == 0
        before = move.before.detach().clone()
        suited += kernel._row(move) is not None
        (said, ours), (wanted, theirs) = outcome(move, True, grads, 1 + seed % 2), outcome(twin, False, grads, 1)
        errors += bool(said)
        assert said == wanted, f"case {seed}: {said!r} by the kernel, {wanted!r} by torch"
        if ours:
            start = before.to_dense().as_subclass(Tensor)
            assert all(agree(a, b, start) for a, b in zip(ours, theirs, strict=True)), f"case {seed}: {case(seed)}"
        values = torch.randn(1 + seed % 300, generator=torch.Generator().manual_seed(seed))[seed % 2 :]
        if len(values):
            assert kernel.kth_smallest(values, seed % len(values)) == values.sort().values[seed % len(values)]
    assert count < 500 or (suited > count // 5 and errors > count // 50), (suited, errors)
    print(f"{count} cases, {suited} by the kernel, {errors} errors")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:]))
