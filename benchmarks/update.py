"""Powerprop's update alone: µs for a million weights by the kernel and by torch, beside torch's own optimisers' steps.

One thread, the best of many rounds in turn. The weights are those of a new layer of 784 inputs, the moves Adam's.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

from powerprop import kernel
from powerprop.update import Move, power_update_
from timing import best_times

COUNT = 1 << 20
ALPHAS = (1.375, 1.5, 2.0, 3.0)


def steps() -> dict[str, Callable[[], object]]:
    draw = torch.Generator().manual_seed(0)
    before = (torch.rand(COUNT, generator=draw) * 2 - 1) / 28
    target, weight = before + 1e-3 * torch.randn(COUNT, generator=draw), before.clone()
    mask = torch.rand(COUNT, generator=draw) < 0.1
    no_kernel = mock.patch.object(kernel, "_loaded", return_value=(None, "off"))

    def update(alpha: float, compiled: bool, masked: bool) -> Callable[[], object]:
        move = Move(weight, before, alpha, *((mask, mask) if masked else ()))

        def step() -> None:
            weight.copy_(target)
            power_update_([move])

        def by_torch() -> None:
            with no_kernel:
                step()

        return step if compiled else by_torch

    def optimiser(kind: type[torch.optim.Optimizer], **options: object) -> Callable[[], object]:
        param = nn.Parameter(before.clone())
        param.grad = torch.randn(COUNT, generator=draw)
        return kind([param], lr=1e-6, **options).step  # type: ignore[arg-type]

    made: dict[str, Callable[[], object]] = {"copy": lambda: weight.copy_(target)}
    for masked in (False, True):
        for compiled in (True, False) if kernel._loaded()[0] else (False,):
            for alpha in ALPHAS:
                name = f"{'kernel' if compiled else 'torch'}, α = {alpha:g}{', masks' if masked else ''}"
                made[name] = update(alpha, compiled, masked)
    made["SGD"], made["SGD fused"] = optimiser(torch.optim.SGD), optimiser(torch.optim.SGD, fused=True)
    made["Adam"], made["Adam fused"] = optimiser(torch.optim.Adam), optimiser(torch.optim.Adam, fused=True)
    return made


def main() -> None:
    print(kernel.backend())
    with torch.no_grad():
        times = best_times(steps(), rounds=30, calls=2, warm=1)
    copy = times.pop("copy")
    for name, seconds in times.items():
        own = seconds - (copy if "α" in name else 0)  # each update begins with a copy, which is no part of it
        print(f"{name:28} {own * 1e6 * 1e6 / COUNT:8.0f} µs")


if __name__ == "__main__":
    main()
