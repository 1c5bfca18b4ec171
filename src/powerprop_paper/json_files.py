"""JSON files, whole or not at all; some carry a checksum of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from powerprop.files import FileError, sha256, write_atomically

__all__ = ["read_json", "read_sealed_json", "write_json", "write_sealed_json"]

CHECKSUM = "checksum"


def json_bytes(value: Any) -> bytes:
    """Indented JSON; floats keep all their digits, NaN is refused."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    write_atomically(path, json_bytes(value))


def read_json(path: str | Path) -> Any:
    """Read a JSON file; one that does not parse is an error that names the file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not a JSON file: {error}") from None


def write_sealed_json(path: str | Path, value: dict[str, Any]) -> None:
    """Write a dictionary as JSON with a checksum of the rest in it."""
    write_json(path, {**value, CHECKSUM: sha256(json_bytes(value))})


def read_sealed_json(path: str | Path) -> dict[str, Any]:
    """Read what `write_sealed_json` wrote; a damaged or edited file is an error that names it."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise FileError(f"{path} is damaged or edited: it has {found!r:.40}")
    value = {name: part for name, part in found.items() if name != CHECKSUM}
    try:
        checksum = sha256(json_bytes(value))
    except ValueError:  # NaN, which we do not write, or half of a surrogate pair
        checksum = None
    if checksum is None or found.get(CHECKSUM) != checksum:
        raise FileError(f"{path} is damaged or edited: it does not have its checksum")
    return value
