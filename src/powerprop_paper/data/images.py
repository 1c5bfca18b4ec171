"""Image sets held whole in memory, and their way from bytes to normalised floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from powerprop.batches import Part, Splits


@dataclass(frozen=True)
class Images:
    """A labelled image set: images uint8 (N, C, H, W), labels int64 (N,).

    `note` says what a reader of results must know, such as that the set is not complete; reports print it.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    class_names: tuple[str, ...]
    note: str = ""

    def __post_init__(self) -> None:
        for x, y in ((self.train_x, self.train_y), (self.test_x, self.test_y)):
            if x.dtype != torch.uint8 or x.ndim != 4 or y.dtype != torch.int64 or y.shape != x.shape[:1]:
                raise ValueError(
                    f"{self.name}: expected uint8 images (N, C, H, W) and int64 labels (N,), "
                    f"got {x.dtype} {tuple(x.shape)} and {y.dtype} {tuple(y.shape)}"
                )

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        c, h, w = self.train_x.shape[1:]
        return c, h, w

    def to(self, device: torch.device | str) -> Images:
        """The same set with its tensors on a device."""
        x, y, test_x, test_y = (t.to(device) for t in (self.train_x, self.train_y, self.test_x, self.test_y))
        return replace(self, train_x=x, train_y=y, test_x=test_x, test_y=test_y)

    def split_validation(self, n_last: int = 5000) -> Splits:
        """Train, validation and test; the last `n_last` training images are the validation set. Nothing is copied."""
        n = len(self.train_x)
        if not 0 <= n_last < n:
            raise ValueError(f"n_last must be in 0..{n - 1} (training images of {self.name}), got {n_last}")
        cut = n - n_last
        train, validation = Part(self.train_x[:cut], self.train_y[:cut]), Part(self.train_x[cut:], self.train_y[cut:])
        return Splits(train, validation, Part(self.test_x, self.test_y))


AT_ONCE = 125
"""Images that are measured together: what convolutions make of 1,000 leaves the cache, and takes 1.8 times as long."""


def channels_last(x: Tensor) -> Tensor:
    """The layout that convolutions read fastest: a step of Conv-6 on a CPU takes two thirds of the time."""
    return x.contiguous(memory_format=torch.channels_last)


def random_shift_flip(shift: int) -> Callable[[Tensor, torch.Generator], Tensor]:
    """What a batch for convolutions goes through: moved by up to so many pixels and half of it mirrored; 0 is neither.

    In the layout that convolutions read fastest.
    """
    return lambda x, generator: channels_last(crop_and_flip(x, generator, shift) if shift else x)


def to_float(x: Tensor) -> Tensor:
    """x / 255 as float32: bytes to [0, 1]."""
    return x.float().div_(255.0)


def mean_std(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every channel of byte images, on the scale of `to_float`."""
    levels = torch.arange(256, dtype=torch.float64, device=x.device)
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in x.unbind(1)])
    share = counts.double() / counts.sum(1, keepdim=True)
    mean = share @ levels
    std = (share @ levels.square() - mean.square()).clamp(min=0).sqrt()
    return (mean / 255).float(), (std / 255).float()


def normalise(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(x / 255 - mean) / std as float32, channel by channel."""
    return to_float(x).sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))


def crop_and_flip(x: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """CIFAR's customary augmentation: each image moved by up to `padding` pixels and mirrored half of the time.

    Uncovered pixels are 0, the mean colour of a normalised image.
    """
    n, c, h, w = x.shape
    device = generator.device
    shift = torch.randint(0, 2 * padding + 1, (2, n, 1), generator=generator, device=device).to(x.device)
    mirror = torch.randint(0, 2, (n, 1), generator=generator, device=device).to(x.device)
    rows = torch.arange(h, device=x.device) + shift[0]
    cols = torch.arange(w, device=x.device)
    cols = torch.where(mirror == 1, cols.flip(0), cols) + shift[1]
    padded = F.pad(x, (padding, padding, padding, padding))
    pixels = (rows.unsqueeze(2) * padded.shape[3] + cols.unsqueeze(1)).view(n, 1, h * w)
    return padded.flatten(2).gather(2, pixels.expand(n, c, h * w)).view(n, c, h, w)
