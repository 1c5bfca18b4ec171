"""Which layers compute sparsely: those that are measured to be faster so, at their shape, sparsity and batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

from powerprop.sparse import products
from powerprop.sparse.pattern import Pattern

__all__ = ["Choice", "Report", "pays"]

_MOST = 0.6
"""Above this density nothing is measured."""
_SECONDS = 0.05


@dataclass(frozen=True)
class Choice:
    """What was decided for one layer, and the seconds that its three products take in either form."""

    name: str
    shape: tuple[int, int]
    weights: int
    form: str
    dense: float | None = None
    sparse: float | None = None
    reason: str = ""

    @property
    def sparsity(self) -> float:
        """The fraction of the layer that is not held."""
        return 1 - self.weights / max(1, self.shape[0] * self.shape[1])

    def __str__(self) -> str:
        times = [f"{1e6 * s:9,.0f}" if s is not None else 9 * " " for s in (self.dense, self.sparse)]
        size = f"{self.shape[0]} × {self.shape[1]}"
        return f"{size:>15} {self.sparsity:8.2%} {times[0]} {times[1]}  {self.form:6}  {self.reason}".rstrip()


class Report(dict[str, Choice]):
    """The choices by the names of the weights; prints as a table."""

    def __init__(self, choices: Iterable[Choice] = ()) -> None:
        super().__init__({choice.name: choice for choice in choices})

    def __str__(self) -> str:
        width = max([len(name) for name in self], default=0)
        head = f"{'':{width}} {'shape':>15} {'sparsity':>8} {'dense µs':>9} {'sparse µs':>9}  form"
        return "\n".join([head, *(f"{name:{width}} {choice}" for name, choice in self.items())])


def pays(name: str, pattern: Pattern, dtype: torch.dtype, batch: int) -> Choice:
    """Measure a layer of this shape and density, forward and backward, in both forms."""
    density = pattern.count / max(1, pattern.shape[0] * pattern.shape[1])
    if density > _MOST:
        return Choice(name, pattern.shape, pattern.count, "dense", reason=f"less than {1 - _MOST:.0%} is zero")
    threads = torch.get_num_threads()
    dense, sparse = _measured(pattern.shape, max(0.001, round(density, 3)), dtype, batch, threads)
    return Choice(name, pattern.shape, pattern.count, "sparse" if sparse < dense else "dense", dense, sparse)


@lru_cache(maxsize=256)
def _measured(
    shape: tuple[int, int], density: float, dtype: torch.dtype, batch: int, threads: int
) -> tuple[float, float]:
    """Seconds of the three products of a layer, dense and sparse."""
    draw = torch.Generator().manual_seed(0)
    rows, columns = shape
    pattern = Pattern.of(torch.rand(shape, generator=draw) < density)
    x, g = (torch.randn(size, batch, generator=draw).to(dtype) for size in (columns, rows))
    values = torch.randn(pattern.count, generator=draw).to(dtype)
    weight, bias = pattern.scatter(values), torch.zeros(rows, dtype=dtype)

    def dense() -> None:
        torch.nn.functional.linear(x.t(), weight, bias)
        g.t() @ weight
        g @ x.t()

    def sparse() -> None:
        products.forward(pattern, values, x, bias)
        products.backward(pattern, values, x, g)

    return _best(dense), _best(sparse)


def _best(call: Callable[[], None]) -> float:
    best, end = float("inf"), time.perf_counter() + _SECONDS
    call()
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best
