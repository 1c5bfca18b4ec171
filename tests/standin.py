"""Made-up images for tests on machines without the real data; as a script, the command line with them.

The library never does this by itself: a data set that is not found is an error there.
"""

from __future__ import annotations

import sys
from functools import cache

import torch

from powerprop_paper import data
from powerprop_paper.data import DataNotFound, Images

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
real_load = data.load


@cache
def load(name: str) -> Images:
    """The real images if they are on this machine, else ten noisy patterns of the same shape."""
    try:
        return real_load(name, download=False)
    except DataNotFound:
        return made_up(name)


def made_up(name: str, train: int = 3000, test: int = 600) -> Images:
    """Ten fixed patterns with noise, easy to learn."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, *SHAPES[name], generator=generator)
    y = torch.randint(10, (train + test,), generator=generator)
    noise = torch.rand(len(y), *SHAPES[name], generator=generator)
    x = (127 * (patterns[y] + noise)).byte()
    return Images(name, x[:train], y[:train], x[train:], y[train:], tuple("0123456789"))


def install() -> None:
    """Let the experiments of this process see these images."""
    data.load = load  # type: ignore[assignment]


# At import, because worker processes import this file again as their main module.
if __name__ in ("__main__", "__mp_main__"):
    install()

if __name__ == "__main__":
    from powerprop_paper.cli import main

    sys.exit(main(sys.argv[1:]))
