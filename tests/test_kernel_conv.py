"""The forward convolution of the kernel, [channels, height, width, batch]: torch's numbers, by any threads the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from powerprop import kernel

pytestmark = pytest.mark.skipif(kernel.library() is None, reason="the compiled kernel is not here")


@pytest.mark.parametrize("batch", [1, 3, 16, 20, 64, 100])
@pytest.mark.parametrize(("size", "block"), [(16, 4), (16, 99), (17, 3), (20, 5)])
@pytest.mark.parametrize("relu", [False, True])
def test_convolutions_over_runs_of_lanes(batch: int, size: int, block: int, relu: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 9, 3, 3, generator=generator) * (torch.rand(7, 9, 3, 3, generator=generator) < 0.3)
    x, bias = torch.randn(batch, 9, size, size, generator=generator), torch.randn(7, generator=generator)
    padded = F.pad(x, (1, 1, 1, 1)).permute(1, 2, 3, 0).contiguous()
    row = (size + 2) * batch
    o, c, i, j = (index.numpy() for index in weight.nonzero(as_tuple=True))
    order = np.argsort(c // block * 7 + o, kind="stable")
    at = (c * (size + 2) * row + i * row + j * batch).astype("i4")[order]
    values = weight[weight != 0].numpy()[order]
    blocks = -(-9 // block)
    ptr = np.concatenate([[0], np.cumsum(np.bincount(c // block * 7 + o, minlength=7 * blocks))]).astype("i4")
    wanted = F.conv2d(x.double(), weight.double(), bias.double(), padding=1).float().permute(1, 2, 3, 0)
    wanted = wanted.relu() if relu else wanted
    found = []
    for threads in (1, 2, 3):
        y = torch.empty(7, size, size, batch)
        arrays = (
            ptr.ctypes.data,
            at.ctypes.data,
            values.ctypes.data,
            bias.data_ptr(),
            7,
            blocks,
            padded.data_ptr(),
            row,
        )
        kernel.loaded().powerprop_conv_forward(
            *arrays, y.data_ptr(), size * size * batch, size * batch, size, size * batch, relu, threads
        )
        found.append(y)
    torch.testing.assert_close(found[0], wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
