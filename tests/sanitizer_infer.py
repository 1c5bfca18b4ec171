"""Random networks by compiled programs and by torch: the same results, and no memory but the tensors' own.

    python tests/sanitizer_infer.py <folder of a library> <networks> [first seed]

Run by `test_kernel_sanitizer.py` in a process with AddressSanitizer.
"""

from __future__ import annotations

import random
import sys

import torch

from powerprop import kernel
from random_graphs import check


def main(folder: str, cases: int, first: int = 0) -> None:
    kernel.__path__.insert(0, folder)
    assert kernel.backend().startswith(f"kernel: {folder}"), kernel.backend()
    whole = 0
    for seed in range(first, first + cases):
        chance = random.Random(seed)
        torch.set_num_threads(chance.choice([1, 1, 2, 3]))
        whole += check(seed, chance.choice([1, 2, 5, 6, 16, 17, 40])) <= 3  # a program and its two values
    print(f"{cases} cases, {whole} of them one program")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:]))
