"""Mask updates in place: who is largest, who stays, who is grown, against the same on whole matrices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from powerprop import kernel
from powerprop.sparse.moving import largest, regrow
from powerprop.sparse.pattern import Pattern
from powerprop.sparsify.base import top_among


def blocks(matrix: Tensor, heights: list[int]) -> Iterator[Tensor]:
    """The matrix in pieces of these heights and the rest."""
    start = 0
    for height in [*heights, len(matrix)]:
        yield matrix[start : start + height].clone()
        start += height


def test_a_regrowth_by_hand() -> None:
    """Of three weights the last two are dropped, and the last one comes back because its gradient is the largest."""
    pattern = Pattern.of(torch.tensor([[True, False, True], [False, True, False]]))
    gradient = torch.tensor([[9.0, -2.0, 1.0], [0.5, -3.0, 0.25]])
    moved = regrow(pattern, torch.tensor([True, False, False]), iter([gradient]), 2)
    assert moved.pattern.places().tolist() == [0, 1, 4]
    assert moved.stays.tolist() == [True, False, True]
    assert moved.grown.tolist() == [1]
    assert moved.against.tolist() == [-2.0]
    assert moved.carried(torch.tensor([10.0, 20.0, 30.0]), torch.tensor([7.0])).tolist() == [10.0, 7.0, 30.0]


@pytest.mark.parametrize("compiled", [True, False])
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 40),
    density=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    kept=st.sampled_from([0.0, 0.5, 1.0]),
    share=st.floats(0, 1),
    heights=st.lists(st.integers(0, 5), max_size=3),
    levels=st.sampled_from([2, 5, 10**6]),
    seed=st.integers(0, 10**6),
)
@example(
    rows=8, columns=35, density=1.0, kept=0.5, share=0.5, heights=[1], levels=10**6, seed=0
)  # more than the first block has, and the second block's guess is above some of these
def test_it_chooses_what_a_ranking_of_the_whole_matrix_would(
    compiled: bool,
    rows: int,
    columns: int,
    density: float,
    kept: float,
    share: float,
    heights: list[int],
    levels: int,
    seed: int,
) -> None:
    """Few levels: many are equal, and the first in memory are taken."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, columns, generator=draw) < density
    pattern = Pattern.of(mask)
    survivors = torch.rand(pattern.count, generator=draw) < kept
    gradient = torch.randint(-levels, levels, (rows, columns), generator=draw).float()
    staying = pattern.mask(survivors)
    count = int(share * int((~staying).sum()))
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(kernel, "_loaded", lambda: (None, "torch"))
        moved = regrow(pattern, survivors, blocks(gradient, heights), count)
    wanted = staying | top_among(gradient, ~staying, count)
    assert torch.equal(moved.pattern.mask(), wanted)
    assert torch.equal(pattern.mask(moved.stays), mask & wanted)
    assert torch.equal(moved.pattern.places()[moved.grown], (wanted & ~mask).flatten().nonzero().squeeze(1))
    carried = moved.carried(pattern.gather(gradient), moved.against)
    assert torch.equal(carried, gradient[wanted])
    assert torch.equal(moved.against, gradient[wanted & ~mask])


def test_the_threshold_rises_from_piece_to_piece_and_loses_nobody() -> None:
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    for order in (values, values.abs().sort().values, values.abs().sort(descending=True).values):
        at, found = largest([order.clone()], 500, np.zeros(0, np.int64))
        wanted = order.abs().topk(500).indices.sort().values
        assert torch.equal(torch.from_numpy(at), wanted)
        assert torch.equal(torch.from_numpy(found), order[wanted])


def test_rows_in_blocks_are_all_rows() -> None:
    for shape in ((0, 5), (5, 0), (3, 7), (3000, 1000), (2, 3 << 20)):
        ends = list(Pattern.at_places(shape, np.zeros(0, np.int64)).row_blocks())
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])][: len(ends)]
        assert (ends[-1][1] if ends else 0) == shape[0]
