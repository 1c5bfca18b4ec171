"""Batches: every image once an epoch, exact resume, augmentation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from powerprop_paper.data import Batches, crop_and_flip


def batches(n: int, size: int, seed: int = 0, augment: bool = False) -> Batches:
    """Image i is filled with i, and its label is i."""
    y = torch.arange(n)
    x = y.float().view(-1, 1, 1, 1).expand(-1, 2, 5, 5).contiguous()
    return Batches(x, y, size, torch.Generator().manual_seed(seed), crop_and_flip if augment else None)


@given(st.integers(1, 20), st.data())
def test_every_epoch_is_a_permutation(n: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, n))
    stream = batches(n, size)
    seen: list[int] = []
    while len(seen) < 3 * n:
        x, y = next(stream)
        assert y.shape == (size,)
        assert torch.equal(x[:, 0, 0, 0], y.float())
        seen += y.tolist()
    for epoch in range(3):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_differ_and_are_counted() -> None:
    stream = batches(100, 50)
    first = torch.cat([next(stream)[1], next(stream)[1]])
    assert stream.epoch == 0
    second = torch.cat([next(stream)[1], next(stream)[1]])
    assert stream.epoch == 1
    assert not torch.equal(first, second)


def test_the_seed_decides_and_nothing_else() -> None:
    state = torch.get_rng_state()
    a, b, c = batches(50, 7), batches(50, 7), batches(50, 7, seed=1)
    ys = [[next(stream)[1] for _ in range(20)] for stream in (a, b, c)]
    assert all(torch.equal(y, z) for y, z in zip(ys[0], ys[1], strict=True))
    assert not all(torch.equal(y, z) for y, z in zip(ys[0], ys[2], strict=True))
    assert torch.equal(state, torch.get_rng_state())


def take(stream: Batches, count: int) -> list[tuple[Tensor, Tensor]]:
    return [next(stream) for _ in range(count)]


@given(st.integers(0, 12), st.booleans())
def test_resume_is_exact_at_any_batch(done: int, augment: bool) -> None:
    whole = batches(17, 5, augment=augment)
    take(whole, done)
    state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in whole.state_dict().items()}
    expected = take(whole, 9)
    resumed = batches(17, 5, seed=99, augment=augment)
    take(resumed, 2)
    resumed.load_state_dict(state)
    assert resumed.epoch == max(0, (done * 5 - 1) // 17)
    for (x, y), (x2, y2) in zip(expected, take(resumed, 9), strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
    assert whole.epoch == resumed.epoch
    assert torch.equal(whole.generator.get_state(), resumed.generator.get_state())


def test_the_state_is_small_and_loads_without_pickle(tmp_path: Path) -> None:
    stream = batches(2000, 60)
    take(stream, 3)
    torch.save(stream.state_dict(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 20_000
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = batches(2000, 60)
    resumed.load_state_dict(loaded)
    assert torch.equal(next(stream)[1], next(resumed)[1])


def test_a_taken_state_does_not_move_on() -> None:
    stream = batches(17, 5, augment=True)
    state = stream.state_dict()
    expected = take(stream, 8)
    stream.load_state_dict(state)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(expected, take(stream, 8), strict=True))


def test_crop_and_flip_gives_every_shift_and_mirror() -> None:
    image = torch.arange(1.0, 10).view(1, 1, 3, 3)
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
    crops = [padded[0, 0, i : i + 3, j : j + 3] for i in range(3) for j in range(3)]
    allowed = {tuple(c.flatten().tolist()) for crop in crops for c in (crop, crop.flip(1))}
    out = crop_and_flip(image.expand(2000, 1, 3, 3), torch.Generator().manual_seed(0), padding=1)
    assert {tuple(row.tolist()) for row in out.flatten(1)} == allowed
    assert len(allowed) == 18


def test_crop_and_flip_moves_channels_together() -> None:
    x = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(0)).expand(-1, 3, -1, -1)
    out = crop_and_flip(x, torch.Generator().manual_seed(1))
    assert torch.equal(out[:, 0], out[:, 2])
    assert not torch.equal(out, x)
    assert torch.equal(out, crop_and_flip(x, torch.Generator().manual_seed(1)))


def test_bad_input_is_named() -> None:
    x, y, g = torch.zeros(5, 1), torch.zeros(5), torch.Generator()
    with pytest.raises(ValueError, match="x and y must have the same length, got 5 and 4"):
        Batches(x, y[:4], 2, g)
    with pytest.raises(ValueError, match="x and y must be on one device, got meta and cpu"):
        Batches(x.to("meta"), y, 2, g)
    for size in (0, 6):
        with pytest.raises(ValueError, match=rf"batch_size must be in 1\.\.5 .* got {size}"):
            Batches(x, y, size, g)
    with pytest.raises(ValueError, match="batches from 6 images, these are 5"):
        Batches(x, y, 2, g).load_state_dict(batches(6, 2).state_dict())
