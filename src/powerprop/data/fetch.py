"""Downloads: to a temporary file beside the target, checked, then moved into place."""

from __future__ import annotations

import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

from rich.console import Console
from rich.progress import wrap_file

from powerprop.data.locate import CHUNK_BYTES, digest, file_digest
from powerprop.files import write_atomically

TIMEOUT_SECONDS = 20.0


def read_url(url: str, label: str, size: int) -> bytes:
    """The bytes behind a URL, with a progress line on stderr; more than `size` of them are an error, and not read."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
        total = int(response.headers.get("Content-Length") or 0)
        data = bytearray()
        with wrap_file(response, total, description=label, console=Console(stderr=True), transient=True) as file:
            while len(data) <= size and (part := file.read(CHUNK_BYTES)):
                data += part
    if len(data) > size:
        raise OSError(f"the download is longer than the {size:,} bytes of the published file")
    return bytes(data)


def fetch(urls: Sequence[str], target: Path, expected: str, size: int) -> list[str]:
    """Save the first of `urls` whose content has the expected md5 or sha256, unless `target` is there and has it.

    Nothing is read any farther than `size` bytes. Returns what went wrong with each, and an empty list on success.
    """
    if target.is_file() and file_digest(target, expected) == expected:
        return []
    failures = []
    for url in urls:
        try:
            data = read_url(url, target.name, size)
        except (OSError, HTTPException, ValueError) as error:
            failures.append(f"{url}: {error}")
            continue
        actual = digest(data, expected)
        if actual == expected:
            write_atomically(target, data)
            return []
        failures.append(f"{url}: the download has the md5 {actual}, expected {expected}")
    return failures
