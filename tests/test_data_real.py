"""The real data sets, where they are at hand: shapes, class counts and known statistics (md5 is checked on loading)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from powerprop_paper.data import Images, mean_std, split
from powerprop_paper.data.sets import NEAR

Get = Callable[[str], Images]


def counts(y: torch.Tensor) -> list[int]:
    return torch.bincount(y).tolist()


def test_mnist(real_data: Get) -> None:
    images = real_data("mnist")
    assert images.train_x.shape == (60_000, 1, 28, 28)
    assert images.test_x.shape == (10_000, 1, 28, 28)
    assert counts(images.train_y) == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert counts(images.test_y) == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    mean, std = mean_std(images.train_x)
    assert (mean.item(), std.item()) == pytest.approx((0.1307, 0.3081), abs=1e-4)
    assert images.train_y[:5].tolist() == [5, 0, 4, 1, 9]


def test_split_mnist(real_data: Get) -> None:
    stream = split(real_data("mnist"), 2)
    assert [len(task.test().x) for task in stream] == [2115, 2042, 1874, 1986, 1983]
    assert sum(len(task.train().x) + len(task.validation().x) for task in stream) == 60_000


def test_fashion_mnist(real_data: Get) -> None:
    images = real_data("fashion-mnist")
    assert counts(images.train_y) == [6000] * 10
    assert counts(images.test_y) == [1000] * 10
    assert images.class_names[images.train_y[0]] == "ankle boot"


def test_cifar10(real_data: Get) -> None:
    images = real_data("cifar10")
    assert images.train_x.shape == (50_000, 3, 32, 32)
    assert counts(images.train_y) == [5000] * 10
    assert counts(images.test_y) == [1000] * 10
    assert images.class_names[0] == "airplane"
    mean, std = mean_std(images.train_x)
    assert mean.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
    assert std.tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=1e-4)


def test_cifar100(real_data: Get) -> None:
    images = real_data("cifar100")
    assert images.test_x.shape == (10_000, 3, 32, 32)
    assert counts(images.test_y) == [100] * 100
    assert images.class_names[:2] == ("apple", "aquarium_fish")
    assert len(images.train_x) in (25_000, 50_000)
    assert ("only the first 25,000" in images.note) == (len(images.train_x) == 25_000)
    assert len(torch.unique(images.train_y)) == 100


def test_notmnist(real_data: Get) -> None:
    images = real_data("notmnist")
    assert len(images.train_x) + len(images.test_x) == 18_724
    both = torch.cat([images.train_y, images.test_y])
    assert counts(both) == [1872, 1873, 1873, 1873, 1873, 1872, 1872, 1872, 1872, 1872]
    assert len(images.test_x) == 1_872
    train, test = ({row.numpy().tobytes() for row in x} for x in (images.train_x, images.test_x))
    assert not train & test
    assert len(train | test) == 18_232
    splits = images.split_validation(5000)
    for part, others in ((splits.test.x, images.train_x), (splits.validation.x, splits.train.x)):
        assert nearest(part[::25], others) > NEAR


def nearest(some: torch.Tensor, others: torch.Tensor) -> float:
    """The smallest root mean square difference between images of the two, in grey levels."""
    return float(torch.cdist(some.flatten(1).double(), others.flatten(1).double()).min()) / 28


def test_tiny_imagenet_10(real_data: Get) -> None:
    pytest.importorskip("PIL")
    images = real_data("tiny-imagenet-10")
    assert images.train_x.shape == (5000, 3, 64, 64)
    assert images.test_x.shape == (500, 3, 64, 64)
    assert counts(images.train_y) == [500] * 10
    assert counts(images.test_y) == [50] * 10
    assert images.class_names[0] == "goldfish"
