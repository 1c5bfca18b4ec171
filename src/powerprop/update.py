"""Powerprop's rule for the weights: where a move that any optimiser proposed takes them.

    φ ← φ + move · α|φ|^(α-1),   w = φ|φ|^(α-1)      (the paper, section 2, "virtual targets")

φ is determined by w and need not be kept: divided by φ, the same rule reads

    r = α · move · sign(w)|w|^(1-2/α),   w ← w(1 + r)|1 + r|^(α-1),   and 0 stays 0.

Near (|r| ≤ 1/2) the change is added to w, so that a move of zero leaves w as it is and no bias builds up. Far, where r
may overflow or the sign change, φ itself is taken for the moment: its powers overflow only where the result does.
A result below the smallest normal number is 0: such numbers are slow, and lost anyway.

So a weight moves about s² = α²|w|^(2-2/α) times as far as the base optimiser proposed, which is why a power wants a
learning rate of its own. Matched, the proposals p of a tensor are divided by one number ρ (`match` says which), and the
learning rate of the plain optimiser serves every power.

Three forms, held to each other by the tests: `textbook` (float64, through φ), torch (below), and `kernel/kernel.c`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from powerprop import kernel
from powerprop.reparam import psi, psi_inverse, slope

__all__ = ["FARTHEST", "STEEPEST", "Move", "match", "power_update_", "textbook"]

STEEPEST = 4.0
FARTHEST = 0.05
"""Matched rates: the largest slope in that of a weight of mean size, and the largest step in the tensor's norm."""

_NEAR = 0.5
_CHUNK = 1 << 15  # numbers that stay in a CPU's cache from one operation to the next


class Move(NamedTuple):
    """What the base optimiser did to one weight, and what Powerprop makes of it.

    target: where the base optimiser left the weight that the model shows (0 where it is not active); receives the new
        effective weight, +0 where it is not active.
    before: θ before the step, in full: what `active` hides has its value here.
    active, trainable: the weights that the model uses, and those that move; None means all. Others keep their bits.
    theta: receives the new θ, hidden values included; may be `before`.
    shrink: what is left of φ after a decay of its own, 1 - lr·decay.
    decay: the fractions of θ that are taken off the move, where active and elsewhere (Top-KAST's exploration).
    rate: ρ, by which the move is divided; 1 is the update as printed, None asks for the ρ of `match`.
    limit: the largest slope s² that counts; a move of a weight with a larger one is divided by s²/limit, too.
    """

    target: Tensor
    before: Tensor
    alpha: float
    active: Tensor | None = None
    trainable: Tensor | None = None
    theta: Tensor | None = None
    shrink: float | Tensor = 1.0
    decay: tuple[float, float] = (0.0, 0.0)
    rate: float | Tensor | None = 1.0
    limit: float | Tensor = math.inf

    def check(self) -> None:
        """An error if the tensors do not fit each other: torch would broadcast or convert some of them."""
        target = self.target
        for name, dtype in (
            ("before", target.dtype),
            ("active", torch.bool),
            ("trainable", torch.bool),
            ("theta", target.dtype),
        ):
            tensor = getattr(self, name)
            if tensor is None or (tensor.shape, tensor.dtype, tensor.device) == (target.shape, dtype, target.device):
                continue
            wanted, got = (
                f"{d} of shape {tuple(t.shape)} on {t.device}" for d, t in ((dtype, target), (tensor.dtype, tensor))
            )
            raise ValueError(f"{name} must be {wanted}, as the target is, got {got}")


def power_update_(moves: Sequence[Move]) -> None:
    """Make these moves, in place: compiled where `powerprop.kernel` can, else by torch, on any device.

    Where α = 1 the target itself is the new weight, bit for bit, unless it is hidden or decays.
    """
    batches: dict[object, list[Move]] = defaultdict(list)
    rest = moves if torch.compiler.is_compiling() else kernel.update(moves)
    for move in rest:
        move.check()
    for move in match(rest):
        if _by_bits(move.target, move.before):
            for piece in _pieces(move):
                _settle(piece, None if move.alpha == 1 else _moved_on_cpu(piece.before, _divided(piece), piece.alpha))
        else:
            batches[move.alpha, move.target.dtype, move.target.device].append(move)
    for batch in batches.values():
        moved: list[Any] = [None] * len(batch)
        if batch[0].alpha != 1:
            moved = _moved([m.before for m in batch], [_divided(m) for m in batch], batch[0].alpha)
        for move, new in zip(batch, moved, strict=True):
            _settle(move, new)


def textbook(move: Move) -> Tensor:
    """The new θ in float64, through φ as the paper has it: slow, and what the other forms are tested against."""
    before, alpha, shrink = move.before.double(), move.alpha, torch.as_tensor(move.shrink, dtype=torch.float64)
    phi = psi_inverse(before, alpha)
    (full,) = match([move._replace(target=move.target.double(), before=before)])
    phi = (phi + _divided(full) * slope(phi, alpha)) * shrink
    new = psi(phi, alpha)
    return new if move.trainable is None else torch.where(move.trainable, new, before)


# --- matched rates --------------------------------------------------------------------------------------------------

Sums = Callable[[Tensor], Tensor]


def match(moves: Sequence[Move], over_ranks: Sums | None = None) -> list[Move]:
    """The moves, with ρ for those that ask for it: one number for all weights of a tensor that are used and trained.

        s̃² = min(s², 4 s²(mean|w|)),    ρ = max(Σ s̃²p² / Σ p², ‖s̃²p‖ / 0.05‖w‖),    w moves by s̃²p/ρ

    Σ s̃²p²/Σp² keeps the energy of the proposals p: where these are gradients, the loss falls as fast as under the plain
    optimiser. What may become unstable is a large weight that learns much faster than the others, hence the limit on
    s², and a step that is large beside the weights, hence the other term (You et al. 2017, "Large batch training of
    convolutional networks", bound steps so). Nothing is remembered from step to step.

    over_ranks: adds up sums over the ranks that hold the parts of these tensors, a row for each move.
    """
    moves, batches = list(moves), defaultdict(list)
    for place, move in enumerate(moves):
        if move.rate is None and move.alpha != 1:
            batches[move.alpha, move.target.dtype, move.target.device].append(place)
    for places in batches.values():
        batch = [moves[place] for place in places]
        for place, move, rate, limit in zip(places, batch, *_rates(batch, over_ranks or (lambda x: x)), strict=True):
            moves[place] = move._replace(rate=rate, limit=limit)
    return moves


def _rates(moves: list[Move], over_ranks: Sums) -> tuple[Tensor, Tensor]:
    """ρ and the limit of s² of each of these, which have one power, dtype and device."""
    count, total, square = over_ranks(_added_up(_sizes, moves)).unbind(1)
    limit = STEEPEST * _squared_slope(total / count, moves[0].alpha)
    limited = [move._replace(limit=most) for move, most in zip(moves, limit, strict=True)]
    energy, kept, step = over_ranks(_added_up(_energies, limited)).unbind(1)
    rate = torch.maximum(kept / energy, (step / square).sqrt() / FARTHEST)
    usual = rate.isfinite() & (rate > 0)
    return torch.where(usual, rate, 1.0), torch.where(usual, limit, math.inf)


def _added_up(sums: Callable[[Move], Tensor], moves: Sequence[Move]) -> Tensor:
    """A row of sums for each move; on a CPU over pieces that stay in its cache."""
    cut = all(_by_bits(move.target, move.before) for move in moves)
    return torch.stack([sum(map(sums, _pieces(m)), m.before.new_zeros(3)) if cut else sums(m) for m in moves])


def _sizes(move: Move) -> Tensor:
    """1, |w| and w², added up."""
    weight, seen = _seen(move, move.before)
    count = weight.new_full((), weight.numel()) if seen is None else seen.sum(dtype=weight.dtype)
    return torch.stack([count, weight.abs().sum(), _dot(weight, weight)])


def _energies(move: Move) -> Tensor:
    """p², s̃²p² and (s̃²p)², added up."""
    (weight, _), (push, _) = _seen(move, move.before), _seen(move, _push(move))
    bent = _squared_slope(weight, move.alpha).clamp_(max=move.limit).mul_(push)
    return torch.stack([_dot(push, push), _dot(push, bent), _dot(bent, bent)])


def _seen(move: Move, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """What counts of a tensor, 0 elsewhere, and where that is: what is both used and trained; None is everywhere."""
    masks = [mask for mask in (move.active, move.trainable) if mask is not None]
    if not masks:
        return tensor, None
    seen = masks[0] if len(masks) == 1 else masks[0] & masks[1]
    return _where(seen, tensor), seen


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.flatten(), b.flatten())


def _squared_slope(weight: Tensor, alpha: float) -> Tensor:
    """s² = α²|w|^(2-2/α)."""
    return weight.abs().clamp_(min=torch.finfo(weight.dtype).tiny).pow_(2 - 2 / alpha).mul_(alpha**2)


def _divided(move: Move) -> Tensor:
    """The proposals divided by ρ, and where s² is beyond its limit as if it were the limit."""
    push, before = _push(move), move.before
    if not isinstance(move.rate, Tensor) and move.rate in (1, None):
        return push
    if not (_by_bits(before) and _within_limit(move)):
        push.mul_((move.limit / _squared_slope(before, move.alpha)).clamp_(max=1).nan_to_num_(1.0))
    return push.div_(move.rate)


def _within_limit(move: Move) -> bool:
    """True if no s² is beyond its limit, which takes one look at the weights."""
    low, high = map(float, torch.aminmax(move.before)) if move.before.numel() else (0.0, 0.0)
    largest: float = move.alpha**2 * max(-low, high) ** (2 - 2 / move.alpha)
    return largest <= 0.99999 * float(move.limit)  # never of NaN


# --- what surrounds the rule ----------------------------------------------------------------------------------------


def _push(move: Move) -> Tensor:
    """How far the base optimiser moved each weight from what the model showed, in memory of its own; with θ's decay."""
    before, active = move.before, move.active
    push = move.target - (before if active is None else _where(active, before))
    if any(move.decay):
        used, hidden = move.decay
        push = push - (before * used if active is None else _where(active, before * used, before * hidden))
    return push


def _settle(move: Move, new: Tensor | None) -> None:
    """Shrink what is trained, keep what is not, write θ and the effective weights; `new` is None where α = 1."""
    target, before, alpha, active, trainable, theta, shrink, decay = move[:8]
    if new is None:
        new = target if theta is None else target.clone()
        if any(decay):
            new = before + _push(move)
        elif active is not None:
            new = _where(active, target, before + target)
    if isinstance(shrink, Tensor) or shrink != 1:
        new = new * _shrink_of_weight(shrink, alpha, new.dtype)
    if alpha != 1:
        new = _flushed(new)
    if trainable is not None:
        new = _where(trainable, new, before)
    shown = new if active is None else _where(active, new)
    if theta is not None:
        theta.copy_(new)
    if shown is not target:
        target.copy_(shown)


def _shrink_of_weight(shrink: float | Tensor, alpha: float, dtype: torch.dtype) -> float | Tensor:
    """What is left of w where `shrink` is left of φ."""
    if isinstance(shrink, Tensor):
        return torch.copysign(shrink.abs().pow(alpha), shrink).to(dtype)
    return math.copysign(abs(shrink) ** alpha, shrink)


def _flushed(new: Tensor) -> Tensor:
    """+0 for what is no normal number."""
    info = torch.finfo(new.dtype)
    return torch.hardshrink(new, info.tiny * (1 - info.eps))


def _where(mask: Tensor, new: Tensor, other: Tensor | None = None) -> Tensor:
    """`new` where the mask is, elsewhere `other` or +0, in fresh memory.

    By bits on a CPU, where torch.where takes seven times as long; a product would let NaN pass.
    """
    if not _by_bits(new, mask):
        return torch.where(mask, new, torch.zeros_like(new) if other is None else other)
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[new.element_size()]
    bits = mask.to(whole).neg_()
    if other is None:
        return bits.bitwise_and_(new.view(whole)).view(new.dtype)
    rest = other.view(whole)
    return bits.bitwise_and_(new.view(whole) ^ rest).bitwise_xor_(rest).view(new.dtype)


def _by_bits(*tensors: Tensor) -> bool:
    """True for plain numbers on a CPU that nobody traces, maps or differentiates."""
    if torch.compiler.is_compiling() or not all(kernel.is_plain(t, t.dtype) for t in tensors):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


# --- on any device: all weights at once, and nothing that asks the device for an answer -----------------------------

Tensors = list[Tensor] | tuple[Tensor, ...]


def _moved(before: list[Tensor], push: Tensors, alpha: float) -> list[Tensor]:
    """The rule for many tensors of one kind."""
    size = torch._foreach_clamp_min(torch._foreach_abs(before), torch.finfo(before[0].dtype).tiny)
    push = torch._foreach_mul(torch._foreach_sign(before), push)  # positive where the weight grows
    r = torch._foreach_mul(push, alpha)
    if alpha != 2:
        r = torch._foreach_mul(r, torch._foreach_pow(size, 1 - 2 / alpha))
    close = torch._foreach_clamp_min(torch._foreach_clamp_max(r, _NEAR), -_NEAR)
    change = torch._foreach_expm1(torch._foreach_mul(torch._foreach_log1p(close), alpha))
    near = torch._foreach_addcmul(before, before, change)
    far = _far(size, push, alpha)
    return [_chosen(*each) for each in zip(before, r, near, far, strict=True)]


def _far(size: Tensors, push: Tensors, alpha: float) -> Tensors:
    """sign(φ)|φ|^α for φ = size^(1/α) + α · push · size^(1-1/α): the new weight, but for the sign of the old."""
    root = torch._foreach_pow(size, 1 / alpha)
    slopes = torch._foreach_mul(torch._foreach_div(size, root), alpha)
    phi = torch._foreach_addcmul(root, push, slopes)
    return torch._foreach_mul(torch._foreach_sign(phi), torch._foreach_pow(torch._foreach_abs(phi), alpha))


def _chosen(before: Tensor, r: Tensor, near: Tensor, far: Tensor) -> Tensor:
    new = torch.where(r.abs() <= _NEAR, near, before.sign() * far)
    return torch.where(before == 0, torch.zeros_like(new), new)


# --- on a CPU: in the cache, and far lanes only where there are any ---------------------------------------------------


def _pieces(move: Move) -> Iterator[Move]:
    """Chunks of the tensors, if all lie alike in memory of their own; otherwise the whole, which no order can harm."""
    target, single = move.target, ("shrink", "rate", "limit")
    tensors = {k: t for k, t in move._asdict().items() if isinstance(t, Tensor) and k not in single}
    strides = target.stride()
    order = sorted(range(target.dim()), key=lambda dim: -strides[dim])
    alike = all(t.shape == target.shape and t.permute(order).is_contiguous() for t in tensors.values())
    if target.numel() <= _CHUNK or not alike or _shares_memory(move):
        yield move
        return
    rows = [torch.split(t.permute(order).view(-1), _CHUNK) for t in tensors.values()]
    for parts in zip(*rows, strict=True):
        yield move._replace(**dict(zip(tensors, parts, strict=True)))


def _shares_memory(move: Move) -> bool:
    """True if what is written lies in the storage of something else, θ over `before` excepted."""
    read = [t for t in (move.before, move.active, move.trainable) if t is not None]
    theta = [] if move.theta is None or move.theta is move.before else [move.theta]
    written = [t.untyped_storage().data_ptr() for t in (move.target, *theta)]
    return len(set(written)) < len(written) or any(t.untyped_storage().data_ptr() in written for t in read)


def _moved_on_cpu(before: Tensor, push: Tensor, alpha: float) -> Tensor:
    """The rule for one tensor."""
    size = before.abs()
    if alpha == 2:  # r = 2 · sign(w) · move, and the sign goes out of w · r(r + 2)
        r = push * 2
        new = torch.addcmul(before, push, size.addcmul_(before, push), value=4)
    else:
        r = size.clamp_(min=torch.finfo(before.dtype).tiny).log2_().mul_(1 - 2 / alpha).exp2_()
        r.mul_(push).mul_(before.sign().mul_(alpha))
        new = torch.addcmul(before, before, r.log1p().mul_(alpha).expm1_())
    low, high = map(float, torch.aminmax(r)) if r.numel() else (0.0, 0.0)
    if not (low >= -_NEAR and high <= _NEAR):  # NaN is far
        far = torch.from_numpy(np.flatnonzero((~(r.abs() <= _NEAR)).numpy()))  # a few places: much faster than masks
        start, move = before.take(far), push.take(far)
        sign, size = start.sign(), start.abs().clamp_(min=torch.finfo(before.dtype).tiny)
        moved = sign * _far([size], [sign * move], alpha)[0]
        new.put_(far, torch.where(start == 0, torch.zeros_like(start), moved))
    return new
