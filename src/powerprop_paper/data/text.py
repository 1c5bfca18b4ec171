"""Text for language models: Tiny Shakespeare, or any file of one's own, as numbers of characters or bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from powerprop_paper.data.sources import DataNotFound, damaged, download_root, fetch, located, read_checked, roots

__all__ = ["SHAKESPEARE", "Text", "Windows", "load_text", "read_text"]

SHAKESPEARE = "tinyshakespeare"
FILE = "input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
MIRROR = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"

Unit = Literal["characters", "bytes"]


@dataclass(frozen=True, eq=False)
class Text:
    """A text as numbers.

    ids: of every position, in 0..kinds-1.
    symbols: the characters by their number; None where the numbers are bytes.
    """

    name: str
    ids: Tensor
    symbols: str | None

    @property
    def kinds(self) -> int:
        """How many different numbers there may be."""
        return 256 if self.symbols is None else len(self.symbols)

    def decode(self, ids: Tensor) -> str:
        """Numbers as text again; bytes that are no UTF-8 become a replacement character."""
        if self.symbols is None:
            return bytes(ids.tolist()).decode(errors="replace")
        return "".join(self.symbols[i] for i in ids.tolist())

    def parts(self, validation: float, test: float) -> tuple[Tensor, Tensor, Tensor]:
        """What is trained on, and the fractions before the end that choices are made on and that are reported."""
        ends = [round(len(self.ids) * (1 - part)) for part in (validation + test, test)]
        train, held_back, tested = torch.tensor_split(self.ids, ends)
        return train, held_back, tested


def load_text(name: str = SHAKESPEARE, unit: Unit = "characters", *, download: bool = True) -> Text:
    """Tiny Shakespeare (1,115,394 characters of 65 kinds, Karpathy 2015), checked, or the text file of this name.

    Tiny Shakespeare is looked for in $POWERPROP_DATA and in the user's cache, and downloaded into the latter.
    """
    if name != SHAKESPEARE:
        return read_text(Path(name), unit)
    folder = located(
        SHAKESPEARE, [root / SHAKESPEARE for root in roots()], lambda folder: [FILE] * (not (folder / FILE).is_file()),
        (lambda folder: fetch([MIRROR], folder / FILE, SHA256)) if download else None,
        download_root(None) / SHAKESPEARE,
        f"put the file that {MIRROR} had into one of these places, or name a text file of your own.",
    )  # fmt: skip
    path = folder / FILE
    return _numbered(SHAKESPEARE, read_checked(path, SHA256), path, unit)


def read_text(path: Path, unit: Unit = "characters") -> Text:
    """A UTF-8 text file by characters, or any file by bytes."""
    if not path.is_file():
        raise DataNotFound(f"text {str(path)!r} was not found: name a file that exists, or {SHAKESPEARE!r}")
    return _numbered(path.name, path.read_bytes(), path, unit)


def _numbered(name: str, content: bytes, path: Path, unit: Unit) -> Text:
    if len(content) < 2:
        raise damaged(path, "a text must have at least two characters")
    if unit == "bytes":
        return Text(name, torch.frombuffer(bytearray(content), dtype=torch.uint8).long(), None)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise damaged(path, f"it is no UTF-8 text ({error}); read it by bytes") from None
    symbols = "".join(sorted(set(text)))
    number = {symbol: i for i, symbol in enumerate(symbols)}
    return Text(name, torch.tensor([number[symbol] for symbol in text]), symbols)


class Windows:
    """Endless batches (x, y) of windows at random places; y is x one position later.

    The state is the generator's: after `load_state_dict` the next batch is the one that would have come.
    """

    def __init__(self, ids: Tensor, context: int, batch: int, generator: torch.Generator) -> None:
        if len(ids) <= context:
            raise ValueError(f"a text must be longer than the context of {context}, got {len(ids)}")
        self.ids, self.context, self.batch, self.generator = ids, context, batch, generator

    def __iter__(self) -> Windows:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.ids) - self.context, (self.batch, 1), generator=self.generator)
        places = starts + torch.arange(self.context)
        return self.ids[places], self.ids[places + 1]

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.generator.set_state(state["generator"])
