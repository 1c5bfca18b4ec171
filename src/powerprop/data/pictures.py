"""Compressed pictures to arrays. Pillow is needed here alone, and only when a picture is decoded."""

from __future__ import annotations

import io

import numpy as np

from powerprop.data.store import Bytes


def decode(data: bytes, mode: str) -> Bytes:
    """The pixels of a PNG or JPEG file as "L" (H, W) or "RGB" (H, W, 3); OSError if it is no picture."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("this data set is made of PNG or JPEG files: `pip install pillow` to read them") from error
    with Image.open(io.BytesIO(data)) as image:
        return np.array(image.convert(mode), np.uint8)
