"""Downloads: to a temporary file beside the target, checked, then moved into place."""

from __future__ import annotations

import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

from rich.console import Console
from rich.progress import wrap_file

from powerprop.data.store import digest
from powerprop.files import write_atomically

TIMEOUT_SECONDS = 20.0
CHUNK_BYTES = 2**20


def read_url(url: str, label: str) -> bytes:
    """The bytes behind a URL, with a progress line on stderr."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
        total = int(response.headers.get("Content-Length") or 0)
        with wrap_file(response, total, description=label, console=Console(stderr=True), transient=True) as file:
            return b"".join(iter(lambda: file.read(CHUNK_BYTES), b""))


def fetch(urls: Sequence[str], target: Path, expected: str) -> list[str]:
    """Save the first of `urls` whose content has the expected md5 or sha256, unless `target` is there and has it.

    Returns what went wrong with each, and an empty list on success.
    """
    if target.is_file() and digest(target.read_bytes(), expected) == expected:
        return []
    failures = []
    for url in urls:
        try:
            data = read_url(url, target.name)
        except (OSError, HTTPException) as error:
            failures.append(f"{url}: {error}")
            continue
        actual = digest(data, expected)
        if actual == expected:
            write_atomically(target, data)
            return []
        failures.append(f"{url}: the download has the md5 {actual}, expected {expected}")
    return failures
