"""Task streams: lazy, deterministic task by task, labels local and global."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from powerprop_paper.data import Images, normalise, permuted, rotated, split
from powerprop_paper.data.streams import pixel_order, rotate, task_fraction


def toy(classes: int = 6, channels: int = 1) -> Images:
    """12 training and 6 test images of 4x4; label i mod classes; every pixel of an image differs."""
    x = torch.arange(18 * channels * 16).remainder(251).byte().view(18, channels, 4, 4)
    y = torch.arange(18) % classes
    return Images("toy", x[:12], y[:12], x[12:], y[12:], tuple(map(str, range(classes))))


def test_permuted_tasks_reorder_the_pixels() -> None:
    images = toy()
    stream = permuted(images, 3, seed=5, validation=4)
    assert len(stream) == 3
    for t, task in enumerate(stream):
        order = pixel_order(16, 5, t)
        train = task.train()
        assert train.x.dtype == torch.float32
        assert train.x.shape == (8, 1, 4, 4)
        assert torch.equal(train.x.flatten(1), images.train_x[:8].flatten(1)[:, order].float() / 255)
        assert torch.equal(train.y, images.train_y[:8])
        assert len(task.validation().x) == 4
        assert torch.equal(task.test().x.flatten(1), images.test_x.flatten(1)[:, order].float() / 255)
        assert task.classes == tuple(range(6 * t, 6 * t + 6))
        assert task.global_labels(train.y).tolist() == [6 * t + int(y) for y in train.y]


@given(st.integers(0, 2**32 - 1), st.integers(0, 500))
def test_an_order_is_a_permutation_of_its_own(seed: int, task: int) -> None:
    order = pixel_order(784, seed, task)
    assert torch.equal(order.sort().values, torch.arange(784))
    assert torch.equal(order, pixel_order(784, seed, task))
    assert not torch.equal(order, pixel_order(784, seed, task + 1))
    assert not torch.equal(order, pixel_order(784, seed + 1, task))


def test_orders_never_change_between_versions() -> None:
    assert pixel_order(8, 0, 0).tolist() == [6, 3, 5, 0, 7, 2, 1, 4]
    assert pixel_order(8, 1, 250).tolist() == [2, 7, 5, 6, 4, 1, 3, 0]


def test_task_250_needs_no_other() -> None:
    images = toy()
    far, near = permuted(images, 300, seed=1, validation=0), permuted(images, 251, seed=1, validation=0)
    assert torch.equal(far[250].test().x, near[-1].test().x)
    assert [task.index for task in far[10:13]] == [10, 11, 12]
    with pytest.raises(IndexError):
        far[300]


def test_channels_are_permuted_alike_and_then_transformed() -> None:
    images = toy(channels=3)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0, 3.0])
    task = permuted(images, 1, seed=0, validation=0, transform=partial(normalise, mean=mean, std=std))[0]
    expected = normalise(images.test_x, mean, std).flatten(2)[:, :, pixel_order(16, 0, 0)]
    assert torch.equal(task.test().x.flatten(2), expected)


def test_split_takes_classes_in_order() -> None:
    images = toy()
    stream = split(images, 2, validation=3)
    assert [task.classes for task in stream] == [(0, 1), (2, 3), (4, 5)]
    task = stream[1]
    assert task.name == "classes 2-3"
    train = task.train()  # labels of the first nine training images: 0 1 2 3 4 5 0 1 2
    assert train.y.tolist() == [0, 1, 0]
    assert torch.equal(train.x, images.train_x[[2, 3, 8]].float() / 255)
    assert task.global_labels(train.y).tolist() == [2, 3, 2]
    assert task.validation().y.tolist() == [1]  # of the labels 3 4 5
    assert task.test().y.tolist() == [0, 1]


@pytest.mark.parametrize("classes_per_task", [1, 2, 3, 6])
def test_split_loses_nothing(classes_per_task: int) -> None:
    images = toy()
    stream = split(images, classes_per_task, validation=2)
    assert len(stream) == 6 // classes_per_task
    parts = [part for task in stream for part in (task.train(), task.validation(), task.test())]
    assert sum(len(part.x) for part in parts) == 18
    labels = torch.cat([task.global_labels(task.train().y) for task in stream])
    assert torch.equal(labels.sort().values, images.train_y[:10].sort().values)


def test_tasks_hold_no_images_of_their_own() -> None:
    images = toy()
    tasks = [*permuted(images, 3, seed=0, validation=0), *split(images, 2, validation=0)]
    pointers = {task.splits.train.x.data_ptr() for task in tasks}
    assert pointers == {images.train_x.data_ptr()}
    assert repr(tasks[1]) == "Task(1, 'permutation 1')"


def test_bad_input_is_named() -> None:
    for make in (permuted, rotated):
        with pytest.raises(ValueError, match="tasks must be at least 1, got 0"):
            make(toy(), 0, seed=0, validation=0)
    for bad in (0, 4):
        with pytest.raises(ValueError, match=f"classes_per_task must divide the 6 classes of toy, got {bad}"):
            split(toy(), bad)
    with pytest.raises(ValueError, match="n_last must be .* got 5000"):
        permuted(toy(), 1, seed=0)


# --- rotated images ---------------------------------------------------------------------------------------------------


def test_a_quarter_turn_by_hand() -> None:
    x = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.uint8).view(1, 1, 3, 3)
    assert rotate(x, 90).view(3, 3).tolist() == [[3, 6, 9], [2, 5, 8], [1, 4, 7]]
    assert torch.equal(rotate(x, 180), x.rot90(2, (2, 3)))


@pytest.mark.parametrize("shape", [(28, 28), (6, 6), (5, 9)])
def test_turning_there_and_back(shape: tuple[int, int]) -> None:
    x = torch.randint(0, 256, (5, 2, *shape), generator=torch.Generator().manual_seed(0)).byte()
    assert torch.equal(rotate(x, 180), x.flip(2, 3))
    assert torch.equal(rotate(x, 360), x)
    if shape[0] == shape[1]:
        assert torch.equal(rotate(x, 270), x.rot90(3, (2, 3)))


def test_a_long_image_is_turned_without_being_stretched() -> None:
    x = torch.zeros(1, 1, 5, 9, dtype=torch.uint8)
    x[0, 0, 2, 3:6] = 200  # a bar of three pixels in the middle, which stands upright after a quarter turn
    assert rotate(x, 90)[0, 0].nonzero().tolist() == [[1, 4], [2, 4], [3, 4]]


def test_corners_turn_black_and_bytes_stay_bytes() -> None:
    turned = rotate(torch.full((1, 1, 28, 28), 255, dtype=torch.uint8), 45)
    assert turned.dtype == torch.uint8
    assert turned[0, 0, 0, 0] == 0
    assert turned[0, 0, 14, 14] == 255


def test_tasks_are_turned_by_angles_of_their_own() -> None:
    images = toy()
    stream = rotated(images, 300, seed=1, validation=3)
    angle = 180 * task_fraction(1, 250)
    assert stream[250].name == f"rotation {angle:.1f}°"
    assert torch.equal(stream[250].test().x, rotate(images.test_x, angle).float() / 255)
    assert torch.equal(rotated(images, 251, seed=1, validation=3)[250].test().x, stream[250].test().x)
    assert not torch.equal(rotated(images, 251, seed=2, validation=3)[250].test().x, stream[250].test().x)
    assert stream[2].classes == tuple(range(2 * images.classes, 3 * images.classes))
    assert len(stream[2].validation().x) == 3


def test_angles_are_spread_evenly_and_stay_as_they_are() -> None:
    fractions = torch.tensor([task_fraction(0, t) for t in range(1000)])
    assert 0 <= fractions.min() < 0.01
    assert 0.99 < fractions.max() < 1
    assert fractions.mean() == pytest.approx(0.5, abs=0.03)
    assert task_fraction(0, 0) == pytest.approx(0.47932306384132817, abs=1e-12)
