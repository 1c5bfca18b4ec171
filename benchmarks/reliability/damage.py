"""Accidents that files meet: bits, blocks and ends of them, JSON that somebody edited, and headers made by hand."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable

from powerprop.files import BLANK, KEY, sha256


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content with one to four accidents."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        content = chance.choice(ACCIDENTS)(content, chance)
    return content


def flip(content: bytes, chance: random.Random) -> bytes:
    if not content:
        return b"\0"
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


def overwrite(content: bytes, chance: random.Random) -> bytes:
    place, size = chance.randrange(len(content) + 1), chance.choice((1, 4, 64, 4096))
    return (
        content[:place] + chance.choice((bytes(size), b"\xff" * size, chance.randbytes(size))) + content[place + size :]
    )


def at_the_start(content: bytes, chance: random.Random) -> bytes:
    """Headers have the lengths and types."""
    place = chance.randrange(min(64, len(content) + 1))
    return content[:place] + chance.randbytes(chance.choice((1, 2, 4, 8))) + content[place + 8 :]


def repeat(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content) + 1)
    return content[:place] + content[place : place + chance.choice((1, 16, 512))] * 3 + content[place:]


ACCIDENTS: list[Callable[[bytes, random.Random], bytes]] = [
    flip,
    flip,
    overwrite,
    at_the_start,
    repeat,
    lambda content, chance: content[: chance.randrange(len(content) + 1)],
    lambda content, chance: content[chance.randrange(len(content) + 1) :],
    lambda content, chance: chance.randbytes(chance.choice((0, 1, 8, 100, 5000))),
    lambda content, chance: chance.choice(
        (b"{}", b"null", b"[]", b"\x80\x02.", b"PK\x05\x06" + bytes(18), b"\x1f\x8b")
    ),
]


def rezipped(content: bytes, chance: random.Random) -> bytes:
    """A checkpoint whose parts are damaged and have the checksums of what they now are."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            part = old.read(name)
            new.writestr(name, damaged(part, chance) if chance.random() < 0.4 else part)
    return out.getvalue()


ODD = (None, [], {}, "x", -1, 10**30, 1.5, True, [None], {"a": []}, float("nan"))
SIZES = ([10**13], [2**32, 2**32], [-1], [2.0], [0, 10**30], [10**400], 600_000_000, [[8]], "α" * 3000)
"""What nothing that is stored stands for."""


def edited(content: bytes | str, chance: random.Random, odds: tuple[object, ...] = ODD) -> bytes:
    """A JSON file in which somebody changed, dropped or added something."""
    value = json.loads(content)
    odd, inner = chance.choice(odds), value
    while isinstance(inner, dict) and inner and chance.random() < 0.8:
        key = chance.choice(list(inner))
        if not isinstance(inner[key], dict) or chance.random() < 0.3:
            if chance.random() < 0.3:
                del inner[key]
            else:
                inner[key] = odd
            return json.dumps(value).encode()
        inner = inner[key]
    return json.dumps(odd).encode()


def crafted(content: bytes, chance: random.Random) -> bytes:
    """A file of safetensors of which the header was made by hand, with the checksums of what it says now."""
    size = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    if chance.random() < 0.3:
        return _joined(edited(json.dumps(header), chance, ODD + SIZES), body)
    metadata = header["__metadata__"]
    if chance.random() < 0.1:
        return _joined(json.dumps({**header, "__metadata__": {KEY: "[" * 100_000}}).encode(), body)
    entry = {**json.loads(metadata[KEY]), "checksum": BLANK}
    entry["data"] = json.loads(edited(json.dumps(entry["data"]), chance, ODD + SIZES))
    blank = _joined(json.dumps({**header, "__metadata__": {KEY: json.dumps(entry)}}).encode(), body)
    return blank.replace(BLANK.encode(), sha256(blank).encode(), 1)


def _joined(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body
