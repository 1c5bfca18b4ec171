"""Random sparse products by the kernel and by torch: the same results, and no memory but the tensors' own.

    python tests/sanitizer_sparse.py <folder of a library> <cases> [first seed]

Run by `test_kernel_sanitizer.py` in a process with AddressSanitizer; patterns of any shape and batch, and what is no
pattern, which must be an error.
"""

from __future__ import annotations

import random
import sys
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from powerprop import kernel
from powerprop.sparse import products
from powerprop.sparse.moving import _above
from powerprop.sparse.pattern import Pattern

SIZES = [0, 1, 2, 3, 7, 16, 17, 33, 100]
BATCHES = [0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 79, 127, 128, 129]


def own(t: Tensor) -> Tensor:
    """Numbers in memory of their own, so that one beyond the last is seen."""
    return t.clone()


def case(seed: int) -> str:
    chance, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, columns, n = chance.choice(SIZES), chance.choice(SIZES), chance.choice(BATCHES)
    pattern = Pattern.of(torch.rand(rows, columns, generator=draw) < chance.choice([0.0, 0.05, 0.3, 1.0]))
    if chance.random() < 0.3:
        return broken(chance, pattern)
    values, x, g, bias = (torch.randn(s, generator=draw) for s in ((pattern.count,), (columns, n), (rows, n), (rows,)))
    bias_or_none = chance.choice([None, bias])
    relu, *wants = (chance.random() < 0.5 for _ in range(3))
    torch.set_num_threads(chance.choice([1, 1, 2, 3]))

    def results() -> list[Tensor]:
        y = products.forward(pattern, own(values), own(x), bias_or_none, relu)
        return [y, *(t for t in products.backward(pattern, own(values), own(x), own(g), *wants) if t is not None)]

    found = results()
    with mock.patch.object(kernel, "_loaded", return_value=(None, "torch")):
        wanted = results()
    searched(chance, draw)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape, (seed, a.shape, b.shape)
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4), seed
    return "product"


def searched(chance: random.Random, draw: torch.Generator) -> None:
    """Where numbers reach a threshold, at the very end of memory too."""
    numbers = torch.randn(chance.choice([0, 1, 15, 16, 17, 1000]), generator=draw).numpy().copy()
    for threshold in (0.0, 1.0, 9.0):
        assert np.array_equal(_above(numbers, threshold), np.flatnonzero(np.abs(numbers) >= threshold))


def broken(chance: random.Random, pattern: Pattern) -> str:
    """One number of a pattern changed, anywhere."""
    pointers, indices = (np.frombuffer(c, np.int32).copy() for c in (pattern.pointers, pattern.indices))
    array = chance.choice([pointers, indices])
    if array.size:
        array[chance.randrange(array.size)] = chance.choice([-1, 0, 1, 5, 99, 2**31 - 1, -(2**31)])
    try:
        Pattern(pattern.shape, pointers, indices)
    except ValueError:
        return "refused"
    return "pattern"


def main(folder: str, cases: int, first: int = 0) -> None:
    kernel.__path__.insert(0, folder)
    assert kernel.backend().startswith(f"kernel: {folder}"), kernel.backend()
    kinds = [case(seed) for seed in range(first, first + cases)]
    print(f"{cases} cases, " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:]))
