"""Compressed pictures to arrays. Pillow is needed here alone, and only when a picture is decoded."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from powerprop.data.locate import Bytes, damaged

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 64 * 2**20
"""No picture of a data set is larger; an entry that says so is damaged."""


def read_picture(path: Path) -> bytes:
    """The encoded picture in a file; one that is far too large for a picture is an error, and not read."""
    if path.stat().st_size > MAX_BYTES:
        raise damaged(path, f"a picture has at most {MAX_BYTES:,} bytes")
    return path.read_bytes()


def decode(data: bytes, mode: str) -> Bytes:
    """The pixels of a PNG or JPEG file as "L" (H, W) or "RGB" (H, W, 3); OSError if it is no picture."""
    return np.array(open_picture(data, mode), np.uint8)


def open_picture(data: bytes, mode: str) -> Image:
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
