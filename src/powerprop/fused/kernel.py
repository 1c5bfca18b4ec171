"""The compiled kernel as Python sees it: the tables that `kernel.c` reads, and its two calls."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from powerprop.absorb import is_dense, masked
from powerprop.fused.build import compiled
from powerprop.power import abs_power, floor_of

__all__ = ["ADAM", "DECOUPLED", "GROUP", "ITEM", "MAXIMIZE", "MOVED", "NESTEROV", "SGD", "Kinds", "kernel", "row_of"]

MOVED, SGD, ADAM = range(3)
NESTEROV, MAXIMIZE, DECOUPLED = 1, 2, 4


class Kinds:
    """What a step makes of a weight: the base optimiser alone, with a mask, with θ behind it, or with φ."""

    PLAIN, MASKED, LINEAR, POWER = range(4)


class Rests:
    """What α - 1 is beyond a whole number."""

    NOTHING, HALF, OTHER = range(3)


_POINTERS = ("weight", "phi", "factor", "grad", "first", "second", "step", "active", "trainable")
_WHOLE = ("size", "group", "power", "kind", "fresh")
_REAL = ("decay_active", "decay_rest", "shrink")
ITEM = np.dtype(
    [(n, np.int64) for n in (*_POINTERS, *_WHOLE)]
    + [(n, np.float64) for n in _REAL]
    + [("rate", np.float32), ("root", np.float32)]
)
GROUP = np.dtype(
    [("kind", np.int64), ("flags", np.int64)]
    + [(n, np.float64) for n in ("lr", "decay", "momentum", "keep", "beta1", "beta2", "eps")]
)
POWER = np.dtype(
    [
        ("whole", np.int64),
        ("rest", np.int64),
        ("alpha", np.float64),
        ("floor", np.float64),
        ("mantissa", np.float32, (8,)),
        ("exponent", np.float32, (8,)),
        ("high", np.float32),
        ("low", np.float32),
    ]
)
_STRETCH = 1 << 14
_MOST_PRODUCTS = 8
_HIGH_BITS = 16
"""Of a fraction; with the exponent of a float they make a product without rounding."""


class Kernel:
    """The library's calls, with types."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._step, self._powers = library.powerprop_step, library.powerprop_powers
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._step.argtypes = [pointer, number, pointer, pointer, pointer, number, number, ctypes.c_int]
        self._powers.argtypes = [pointer, pointer, pointer, number]
        self._masked = library.powerprop_masked
        self._masked.argtypes = [pointer, pointer, pointer, number]
        self._step.restype = self._powers.restype = self._masked.restype = None
        self._kth = library.powerprop_kth
        self._kth.argtypes, self._kth.restype = [pointer, number, number], ctypes.c_float

    def suits(self, alpha: float) -> bool:
        """False for powers that overflow before they are of any use."""
        return alpha - 1 < _MOST_PRODUCTS + 1

    def recomputes(self, alpha: float) -> bool:
        """True if |φ|^(α-1) is a product or two, or a square root, for which no memory need be kept."""
        return (2 * alpha).is_integer()

    def power(self, phi: Tensor, alpha: float) -> Tensor:
        """|φ|^(α-1), to the bit what the step computes; by torch where the kernel cannot."""
        out = torch.empty_like(phi)
        if phi.device.type != "cpu" or phi.dtype != torch.float32 or not is_dense(phi) or not self.suits(alpha):
            return abs_power(phi, alpha - 1, out, torch.empty_like(phi))
        self._powers(row_of(alpha).ctypes.data, phi.data_ptr(), out.data_ptr(), phi.numel())
        return out

    def masked(self, tensor: Tensor, mask: Tensor) -> Tensor:
        """A copy that is zero where the mask is, whatever stood there; by torch where the kernel cannot."""
        fits = tensor.device.type == mask.device.type == "cpu" and tensor.dtype == torch.float32 and is_dense(tensor)
        if not fits or tensor.stride() != mask.stride():
            return masked(tensor, mask.to(tensor.device))
        out = torch.empty_like(tensor)
        self._masked(tensor.data_ptr(), mask.data_ptr(), out.data_ptr(), tensor.numel())
        return out

    def kth_smallest(self, values: Tensor, k: int) -> float:
        """The number at position k of the sorted ones, NaN last: three passes over them, whatever they are."""
        return float(self._kth(values.data_ptr(), values.numel(), k))

    def step(self, items: int, count: int, groups: int, powers: int, places: int, stretches: int) -> None:
        """One step of all items: the addresses of the tables, and how many items and places there are."""
        threads = min(torch.get_num_threads(), stretches)
        self._step(items, count, groups, powers, places, stretches, _STRETCH, threads)


@lru_cache(maxsize=1)
def kernel() -> Kernel | None:
    """The kernel, or None where there is no compiler."""
    library = compiled()
    return None if library is None else Kernel(library)


def places_of(sizes: Sequence[int]) -> np.ndarray:
    """Where the stretches of all items begin: threads share them out."""
    pairs = [(item, at) for item, size in enumerate(sizes) for at in range(0, size, _STRETCH)]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


# --- |φ|^(α-1) ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def row_of(alpha: float) -> np.ndarray:
    """What the kernel needs to know of an α."""
    whole = math.floor(alpha - 1)
    fraction = alpha - 1 - whole
    high = round(fraction * 2**_HIGH_BITS) / 2**_HIGH_BITS
    row = np.zeros(1, dtype=POWER)
    row["whole"], row["rest"] = whole, {0.0: Rests.NOTHING, 0.5: Rests.HALF}.get(fraction, Rests.OTHER)
    row["alpha"], row["floor"] = alpha, floor_of(torch.float32, alpha)
    row["mantissa"] = _polynomial(lambda t: (1 + t) ** fraction, math.sqrt(0.5) - 1, math.sqrt(2) - 1)
    row["exponent"] = _polynomial(lambda t: 2.0**t, -0.5, 0.5)
    row["high"], row["low"] = high, fraction - high
    return row


def _polynomial(function: Callable[[float], float], low: float, high: float) -> list[float]:
    """Coefficients of the polynomial that meets a function at eight of Chebyshev's points of an interval.

    Newton's form first, then multiplied out. What is left of m^e and 2^r is less than half a unit in the last place.
    """
    count = 8
    nodes = [(low + high) / 2 + (high - low) / 2 * math.cos((i + 0.5) * math.pi / count) for i in range(count)]
    table = [function(t) for t in nodes]
    for width in range(1, count):
        for i in range(count - 1, width - 1, -1):
            table[i] = (table[i] - table[i - 1]) / (nodes[i] - nodes[i - width])
    result = [table[-1]]
    for node, value in zip(nodes[-2::-1], table[-2::-1], strict=True):
        result = [
            value - node * result[0],
            *(a - node * b for a, b in pairwise(result)),
            result[-1],
        ]
    return result
