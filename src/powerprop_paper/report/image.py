"""A picture with the words that stand for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Image:
    """An SVG file or a GIF clip, what it shows (for those who do not see it), a caption; ``wide`` takes the width of
    the page."""

    path: Path
    alt: str
    caption: str = ""
    wide: bool = False

    def __post_init__(self) -> None:
        if not self.alt.strip():
            raise ValueError(f"picture {str(self.path)!r} needs an alt text that says what it shows, got none")
