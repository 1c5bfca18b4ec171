"""Pictures that tests write themselves."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = [f"n{i:08d}" for i in range(10)]


def encoded(colour: tuple[int, int, int], width: int = 48, height: int = 40, kind: str = "JPEG") -> bytes:
    """A picture of one colour, darker towards the right."""
    pixels = np.ones((height, width, 3)) * colour * np.linspace(1.0, 0.5, width)[None, :, None]
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, kind)
    return file.getvalue()


def picture(label: int, row: int) -> bytes:
    """Picture `row` of class `label`; the sizes differ."""
    return encoded((25 * label, 255 - 25 * label, (37 * row) % 256), 40 + row % 3, 36 + row % 2)


def write_tiny(root: Path) -> None:
    """A small set in Tiny ImageNet's place under a data root."""
    for split, count in (("train", 6), ("val", 2)):
        for label, name in enumerate(CLASSES):
            place = root / "tiny-imagenet-10" / split / name
            place.mkdir(parents=True)
            for row in range(count):
                (place / f"{name}_{row}.JPEG").write_bytes(picture(label, row))
