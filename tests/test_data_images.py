"""Image sets in memory: splits, scaling, what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from powerprop_paper.data import Images, mean_std, normalise, to_float


def images_of(n: int = 10, test: int = 3, **changes: object) -> Images:
    x = torch.arange(n + test, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 2, 2, 2).contiguous()
    y = torch.arange(n + test) % 2
    fields = {"train_x": x[:n], "train_y": y[:n], "test_x": x[n:], "test_y": y[n:], **changes}
    return Images(name="toy", class_names=("even", "odd"), **fields)  # type: ignore[arg-type]


def test_the_last_images_are_for_validation() -> None:
    splits = images_of().split_validation(3)
    assert splits.train.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert splits.validation.x[:, 0, 0, 0].tolist() == [7, 8, 9]
    assert splits.validation.y.tolist() == [1, 0, 1]
    assert splits.test.x[:, 0, 0, 0].tolist() == [10, 11, 12]
    assert splits.map(to_float).test.x[0, 0, 0, 0] == pytest.approx(10 / 255)
    for bad in (-1, 10):
        with pytest.raises(ValueError, match=rf"n_last must be in 0\.\.9 .* got {bad}"):
            images_of().split_validation(bad)


def test_images_refuse_what_does_not_fit() -> None:
    for changes in ({"train_x": torch.zeros(10, 2, 2, 2)}, {"test_y": torch.zeros(2, dtype=torch.int64)}):
        with pytest.raises(ValueError, match=r"toy: expected uint8 images \(N, C, H, W\) and int64 labels"):
            images_of(**changes)


def test_images_move() -> None:
    moved = images_of().to("meta")
    assert {t.device.type for t in (moved.train_x, moved.train_y, moved.test_x, moved.test_y)} == {"meta"}
    assert moved.classes == 2
    splits = images_of().split_validation(2).to("meta")
    assert {t.device.type for part in splits for t in part} == {"meta"}


@given(arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))))
def test_normalised_images_have_mean_0_and_variance_1(array: np.ndarray) -> None:
    x = torch.from_numpy(array)
    mean, std = mean_std(x)
    floats = to_float(x).double()
    assert torch.allclose(mean.double(), floats.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(std.double(), floats.var((0, 2, 3), correction=0).sqrt(), atol=1e-6)
    if std.min() > 0:
        out = normalise(x, mean, std)
        assert torch.allclose(out.mean((0, 2, 3)), torch.zeros(x.shape[1]), atol=1e-3)
        assert torch.allclose(out.std((0, 2, 3), correction=0), torch.ones(x.shape[1]), atol=1e-3)
