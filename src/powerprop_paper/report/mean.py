"""Mean ± standard deviation of repeated runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

MAX_DIGITS = 6


@dataclass(frozen=True)
class Mean:
    """Mean and sample standard deviation (n - 1 in the denominator) of ``n`` repetitions; ``std`` is NaN for n = 1."""

    mean: float
    std: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """The mean of the repetitions ``values`` (at least one, all finite)."""
        numbers = [float(value) for value in values]
        if not numbers:
            raise ValueError("a mean needs at least one value, got none")
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError(f"the values of a mean must be finite, got {numbers}")
        std = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
        return cls(statistics.fmean(numbers), std, len(numbers))

    def data(self) -> dict[str, float | None]:
        """As summary.json has it."""
        return {"mean": self.mean, "std": self.std if math.isfinite(self.std) else None, "n": self.n}

    @property
    def digits(self) -> int:
        """Decimals that show two significant digits of ``std`` (of one run: four significant digits of the mean)."""
        known = math.isfinite(self.std) and self.std > 0
        magnitude = self.std if known else abs(self.mean)
        if magnitude == 0:
            return 1
        significant = 2 if known else 4
        return min(max(significant - 1 - math.floor(math.log10(magnitude)), 0), MAX_DIGITS)

    def scaled(self, factor: float) -> Mean:
        """The mean of ``factor * values``."""
        return Mean(self.mean * factor, self.std * abs(factor), self.n)

    def format(self, digits: int | None = None) -> str:
        """``97.31 ± 0.12``, or ``97.31`` when there is one value only."""
        digits = self.digits if digits is None else digits
        error = f" ± {self.std:.{digits}f}" if math.isfinite(self.std) else ""
        return f"{fixed(self.mean, digits)}{error}"

    def __str__(self) -> str:
        return f"{self.format()} (n={self.n})"


def fixed(value: float, digits: int) -> str:
    """Fixed decimals, without the minus sign of a rounded zero."""
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("-") and not text.strip("-0.") else text
