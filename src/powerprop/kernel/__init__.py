"""Compiled code for what no library has: Powerprop's update and the exact k-th smallest number (`kernel.c`), and
products with sparse matrices (`sparse.c`, called by `powerprop.sparse`).

The library is built when the package is installed and found in the package's own folders; there is no compiler, cache
or temporary folder at run time. Addresses are taken, checked and handed over within one call, and none is kept.
What the kernel does not suit, and everything where there is no library, is done by torch.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _dispatch_keys
from torch.autograd.graph import increment_version
from torch.nn import Parameter

if TYPE_CHECKING:
    from powerprop.update import Move

__all__ = ["backend", "is_plain", "kth_smallest", "library", "loaded", "trim", "update"]

_NAME = "libpowerprop.kernel.so"  # on every system; its dot keeps Python from taking it for a module
_SOURCES = ("kernel.c", "sparse.c", "conv.c", "infer.c", "lanes.h")
_PLAIN_KEYS = _dispatch_keys(torch.empty(0, device="cpu")).raw_repr()
_ROW = struct.Struct("6q6d")
_BYTES, _AT, _LONG, _INT = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_CALLS: tuple[tuple[str, list[Any], Any], ...] = (
    ("update", [_BYTES, _LONG, _INT], None),
    ("kth", [_AT, _LONG, _LONG], ctypes.c_float),
    ("sparse_forward", [_BYTES, _BYTES, _AT, _AT, _AT, _AT, _LONG, _LONG, _INT, _INT], None),
    ("sparse_backward", [*3 * [_BYTES], *6 * [_AT], *3 * [_LONG], _INT], None),
    ("sparse_conv", [*2 * [_BYTES], *4 * [_AT], *4 * [_LONG], _INT], None),
    ("sparse_conv_backward", [*3 * [_BYTES], *5 * [_AT], *6 * [_LONG], _INT], None),
    ("sparse_above", [_AT, _LONG, ctypes.c_float, _AT], _LONG),
    ("infer", [_BYTES, _LONG, _AT, _AT, _LONG, _BYTES, _BYTES, _LONG, _LONG, _INT], None),
    ("trim", [], None),
    ("conv_forward", [_AT, _AT, _AT, _AT, *[_LONG] * 2, _AT, _LONG, _AT, *[_LONG] * 4, _INT, _INT], None),
    ("sparse_transpose", [_BYTES, _BYTES, _LONG, _LONG, _LONG, _AT, _AT, _AT], _INT),
)


@lru_cache(maxsize=1)
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None; and in words what is used and why."""
    if os.environ.get("POWERPROP_KERNEL", "1") == "0":
        return None, "torch: POWERPROP_KERNEL=0 turns the compiled kernel off"
    found = [path for folder in __path__ if (path := Path(folder, _NAME)).is_file()]
    if not found:
        return None, f"torch: the package was installed without its compiled kernel ({_NAME})"
    try:
        _check_whole(found[0])
        library = ctypes.CDLL(str(found[0]))
        for name, arguments, result in _CALLS:
            call = getattr(library, f"powerprop_{name}")
            call.argtypes, call.restype = arguments, result
        _check_sources(library, found[0])
    except (OSError, AttributeError) as error:
        return None, f"torch: the compiled kernel cannot be used: {error}"
    return library, f"kernel: {found[0]} for float32 weights on a CPU, torch elsewhere"


def _check_whole(path: Path) -> None:
    """An error for a file that was cut off, which would end the process: ELF files have a table at their end."""
    content = path.read_bytes()
    if content[:5] == b"\x7fELF\x02" and len(content) >= 64:
        start, size, count = struct.unpack_from("<Q", content, 40) + struct.unpack_from("<HH", content, 58)
        if len(content) < start + size * count:
            raise OSError(f"{path} is cut off")


def _check_sources(library: ctypes.CDLL, path: Path) -> None:
    """An error for a library of other sources than those beside this file: it would take our arguments for others."""
    sources = b"".join(sha256(Path(__file__).with_name(s).read_bytes()).hexdigest().encode() for s in _SOURCES)
    if ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "powerprop_sources"))) != sources:
        raise OSError(f"{path} is of other sources than these: install the package again, or run `make kernel`")


def backend() -> str:
    """What moves the weights, and why, in one line.

    Examples:
        >>> line = pp.backend()    # "kernel: ... for float32 weights on a CPU, torch elsewhere"
    """
    return _loaded()[1]


def library() -> ctypes.CDLL | None:
    """The compiled functions, or None where there are none or operations mean something else than to be done."""
    return None if _interpreted() else _loaded()[0]


def loaded() -> ctypes.CDLL:
    """The compiled functions, where `library` has just found them."""
    found = _loaded()[0]
    assert found is not None
    return found


def trim() -> None:
    """Give back to the system what the C library holds of memory that was let go."""
    if (found := _loaded()[0]) is not None:
        found.powerprop_trim()


def kth_smallest(values: Tensor, k: int) -> float | None:
    """The number at position k of the sorted ones, NaN last, in three passes; None where the kernel cannot."""
    if not 0 <= k < values.numel():
        raise ValueError(f"k must be in [0, {values.numel()}), got {k}")
    library = _loaded()[0]
    if library is None or _interpreted() or not (is_plain(values) and values.is_contiguous()):
        return None
    return float(library.powerprop_kth(values.data_ptr(), values.numel(), k))


def update(moves: Sequence[Move]) -> Sequence[Move]:
    """Make these moves, all but those that the kernel does not suit, which are returned."""
    library = _loaded()[0]
    if library is None or _interpreted():
        return moves
    table, rest, changed = b"", [], []
    for move in moves:
        row = _row(move)
        if row is None:
            move.check()  # before anything is moved
            rest.append(move)
            continue
        table += row
        changed.append(move.target)
        if move.theta is not None:
            changed.append(move.theta)
    if table:
        library.powerprop_update(table, len(table) // _ROW.size, torch.get_num_threads())
        increment_version(changed)
    return rest


def _interpreted() -> bool:
    """True where operations mean something else than to be done: under fake tensors, tracing, counting."""
    return bool(torch._C._len_torch_dispatch_stack())


# --- what the kernel suits ------------------------------------------------------------------------------------------


def _row(move: Move) -> bytes | None:
    """A move as the kernel reads it, or None if it cannot be trusted with the memory."""
    target, before, alpha, active, trainable, theta, shrink, decay, rate, limit = move
    if not (is_plain(target) and is_plain(before) and _lie_alike(target, before)):
        return None
    if isinstance(shrink, Tensor):
        if shrink.numel() != 1 or not is_plain(shrink, shrink.dtype):
            return None  # only another device knows it
        shrink = float(shrink)
    factor = math.copysign(abs(shrink) ** alpha, shrink)
    found = 0.0 if rate is None and alpha != 1 else float(rate or 1)
    out, start, new, size = target.data_ptr(), before.data_ptr(), 0, target.numel()
    graph = target.requires_grad or before.requires_grad
    if _overlap(out, start, size):
        return None
    if theta is not None:
        if not (is_plain(theta) and _lie_alike(target, theta)):
            return None
        new, graph = theta.data_ptr(), graph or theta.requires_grad
        if _overlap(out, new, size) or (new != start and _overlap(start, new, size)):
            return None
    if graph and torch.is_grad_enabled():
        return None
    for mask in (active, trainable):
        if mask is not None and not (is_plain(mask, torch.bool) and _lie_alike(target, mask)):
            return None
    used, moved = (0 if mask is None else mask.data_ptr() for mask in (active, trainable))
    return _ROW.pack(out, start, new, used, moved, size, alpha, factor, *decay, found, float(limit))


def is_plain(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """True for a CPU's tensor that is nothing but its numbers, all of them in its memory.

    Of all that torch knows to lie behind a tensor (subclasses, fake, functional, mapped, negated, lazy, sparse
    ones, of other devices) the dispatch keys tell, and the type of those that are Python's alone.
    """
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        return False
    if tensor.dtype is not dtype or _dispatch_keys(tensor).raw_repr() != _PLAIN_KEYS:
        return False
    return tensor.storage_offset() * dtype.itemsize + tensor.nbytes <= tensor.untyped_storage().nbytes()


def _lie_alike(first: Tensor, other: Tensor) -> bool:
    """True if both fill their memory without gaps, in the same order of the same dimensions."""
    if first.shape != other.shape:
        return False
    if first.is_contiguous():
        return other.is_contiguous()
    return first.stride() == other.stride() and _is_dense(first)


def _is_dense(tensor: Tensor) -> bool:
    """True if the numbers fill their memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _overlap(first: int, second: int, size: int) -> bool:
    """True if two runs of so many float32 share memory."""
    return abs(first - second) < 4 * size
