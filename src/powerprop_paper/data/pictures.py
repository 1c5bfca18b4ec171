"""Compressed pictures to arrays, and ImageNet's customary crops of them.

Pillow is needed here alone, and only when a picture is decoded.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powerprop_paper.data.sources import Bytes, damaged

MAX_BYTES = 64 * 2**20
"""No picture of a data set is larger; an entry that says so is damaged."""


MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Of ImageNet's training pixels, red, green and blue, on the scale from 0 to 1."""

AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
"""The share of the picture that a training crop covers, and its width to height."""
TRIES = 10

Box = tuple[int, int, int, int]


def read_picture(path: Path) -> bytes:
    """The encoded picture in a file; one that is far too large for a picture is an error, and not read."""
    if path.stat().st_size > MAX_BYTES:
        raise damaged(path, f"a picture has at most {MAX_BYTES:,} bytes")
    return path.read_bytes()


def decode(data: bytes, mode: str) -> Bytes:
    """The pixels of a PNG or JPEG file as "L" (H, W) or "RGB" (H, W, 3); OSError if it is no picture."""
    return np.array(open_picture(data, mode), np.uint8)


def open_picture(data: bytes, mode: str) -> Any:
    """The decoded picture; OSError if it is none, whichever of its many errors Pillow has for that."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("this data set is made of PNG or JPEG files: `pip install pillow` to read them") from error
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.convert(mode)
    except (SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError) as error:
        raise OSError(f"not a picture that can be decoded ({error})") from error


def random_resized_crop(data: bytes, size: int, generator: torch.Generator) -> Tensor:
    """For training: a random part of the picture, resized, mirrored half of the time (Szegedy et al. 2015)."""
    image = open_picture(data, "RGB")
    width, height = image.size
    pixels = _resized(image, size, size, random_box(width, height, generator))
    return pixels.flip(-1) if torch.rand((), generator=generator) < 0.5 else pixels


def random_box(width: int, height: int, generator: torch.Generator) -> Box:
    """left, top, right, bottom: area uniform, log of the ratio uniform; the whole middle if ten tries do not fit."""
    for _ in range(TRIES):
        area, ratio = torch.rand(2, generator=generator).tolist()
        wanted = width * height * (AREA[0] + (AREA[1] - AREA[0]) * area)
        shape = RATIO[0] * (RATIO[1] / RATIO[0]) ** ratio
        w, h = round(math.sqrt(wanted * shape)), round(math.sqrt(wanted / shape))
        if 0 < w <= width and 0 < h <= height:
            left = int(torch.randint(width - w + 1, (), generator=generator))
            top = int(torch.randint(height - h + 1, (), generator=generator))
            return left, top, left + w, top + h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return _middle(width, height, w, h)


def centre_crop(data: bytes, size: int, resize: int) -> Tensor:
    """For evaluation: the shorter side resized to `resize`, then the middle `size` x `size`."""
    if size > resize:
        raise ValueError(f"the crop must not exceed the resized picture, got size {size} and resize {resize}")
    image = open_picture(data, "RGB")
    short = min(image.size)
    width, height = (max(resize, round(side * resize / short)) for side in image.size)
    pixels = _resized(image, width, height, (0, 0, *image.size))
    left, top, right, bottom = _middle(width, height, size, size)
    return pixels[:, top:bottom, left:right].contiguous()


def standardise(x: Tensor, device: torch.device) -> Tensor:
    """(x / 255 - mean) / std as float32 on the device, channels last: what convolutions read fastest."""
    mean, std = (torch.tensor(v, device=device).mul_(255).view(3, 1, 1) for v in (MEAN, STD))
    x = x.to(device, non_blocking=True).float()
    return x.sub_(mean).div_(std).contiguous(memory_format=torch.channels_last)


def _resized(image: Any, width: int, height: int, box: Box) -> Tensor:
    from PIL.Image import Resampling

    part = image.resize((width, height), Resampling.BILINEAR, box)
    return torch.from_numpy(np.array(part, np.uint8)).permute(2, 0, 1)


def _middle(width: int, height: int, w: int, h: int) -> Box:
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
