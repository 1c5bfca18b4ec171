"""A part of a network as one call of compiled code: steps over buffers that are planned once, weights in one tensor.

Activations are [channels, height, width, N] for a group of N inputs, or of N rows of features; a call's batch goes
through group by group. Zeros lie around images, so that a convolution of stride 1 is one weight times a run of lanes;
a stride is taken apart into phases first. `kernel/infer.c` has the loops and says what a step holds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from powerprop import kernel
from powerprop.export.graph import shape_of
from powerprop.export.operations import FUNCTIONS, Operation, is_image, lanes_of

__all__ = ["Program"]

LANES = 16
ENTER, LEAVE, PRODUCT, DOT, POOL, POINTWISE, ADD, NORM, AFFINE, BORDER, PHASE = range(11)
WHOLE = 28 << 10
"""Bytes of a tile's inputs that stay in the first cache while all outputs read them."""
FEW = 12
"""With fewer weights than this of an output in a block, loading and storing its sums takes longer than they save."""
_STEP = struct.Struct("30q")


@dataclass(eq=False)
class Buffer:
    """Channels of `height` rows of `width` pixels of N lanes, zeros around them: `pad` pixels on every side."""

    channels: int
    height: int
    width: int
    pad: int
    N: int
    start: int = 0
    made: int = -1
    read: int = -1

    @property
    def flat(self) -> bool:
        return self.height == self.width == 1 and not self.pad

    @property
    def row(self) -> int:
        return (self.width + 2 * self.pad) * self.N

    @property
    def channel(self) -> int:
        if self.flat:
            return self.N
        lines = -(-(self.height + 2 * self.pad) * self.row // LANES) + 1
        return LANES * (lines | 1)  # an odd number of lines: channels do not share places of a cache

    @property
    def size(self) -> int:
        return -(-self.channels * self.channel // LANES) * LANES + 4 * LANES

    @property
    def first(self) -> int:
        """Where the first number that is no border is."""
        return self.start + self.pad * (self.row + self.N)


View = tuple[int, int, int]
"""First number, distances of channels and of rows."""


@dataclass
class Step:
    """What `kernel/infer.c` calls a step.

    at: a view of y that begins so far behind its start. reach: the least and the greatest place of a product's inputs.
    """

    op: int
    x: Buffer | None
    y: Buffer | None
    add: Buffer | None = None
    kind: int = 0
    lanes: int = 0
    weights: tuple[int, int, int, int] = (-1, -1, -1, -1)
    blocks: int = 1
    extra: tuple[int, ...] = ()
    channels: int = 0
    size: tuple[int, int] | None = None
    at: View | None = None
    reach: tuple[int, int] = (0, 0)

    def packed(self, arena: int) -> bytes:
        """The bytes of the step; an error if a product would reach beyond the arena."""
        shape = self.y or self.x
        assert shape is not None
        height, width = self.size or (shape.height, shape.width)
        if self.x is not None and self.op == PRODUCT:
            low, high = (self.x.first + reach for reach in self.reach)
            if low < 0 or high + (height - 1) * self.x.row + self.lanes > arena:
                raise ValueError(f"a product of {shape.channels} outputs reaches beyond its buffers")
        y = _view(self.y)
        if self.at is not None and self.y is not None:
            y = (self.y.start + self.at[0], *self.at[1:])
        extra = (*self.extra, *[0] * (8 - len(self.extra)))
        return _STEP.pack(
            self.op, self.kind, *_view(self.x), *y, *_view(self.add), self.channels or shape.channels, height, width,
            0, height, self.lanes, *self.weights, self.blocks, *extra,
        )  # fmt: skip


def _view(b: Buffer | None) -> View:
    return (-1, 0, 0) if b is None else (b.first, b.channel, b.row)


@dataclass
class Plan:
    """Steps for groups of N, what they need, and their weights."""

    N: int
    steps: bytes
    count: int
    arena: int
    weights: Tensor


class Planner:
    """Turns operations into the steps of one N."""

    def __init__(self, N: int) -> None:
        self.N = N
        self.steps: list[Step] = []
        self.buffers: list[Buffer] = []
        self.values: dict[fx.Node, Buffer] = {}
        self.blob: list[bytes] = []
        self.used = 0
        self.pads: dict[tuple[int, int], int] = {}
        self.bordered: set[fx.Node] = set()

    def plan(self, run: dict[fx.Node, Operation], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Plan:
        """The whole program: enter, every operation with what can be fused into it, leave."""
        self._find_pads(run)
        skip: set[fx.Node] = set()
        for place, node in enumerate(inputs):
            self._put(node, Step(ENTER, None, self._buffer(node), extra=(place,)))
        for node, operation in run.items():
            if node not in skip:
                self._add(node, operation, run, skip)
        for place, node in enumerate(outputs):
            self.steps.append(Step(LEAVE, self.values[node], None, extra=(place,)))
        arena = self._place()
        blob = torch.frombuffer(bytearray(b"".join(self.blob) + bytes(64)), dtype=torch.uint8)
        return Plan(self.N, b"".join(s.packed(arena) for s in self.steps), len(self.steps), arena, blob)

    # --- buffers ---

    def _find_pads(self, run: dict[fx.Node, Operation]) -> None:
        """The zeros that images of each size need around them, alike for all, so that their rows lie alike."""
        for node, op in run.items():
            if op.kind == "product" and is_image(node):
                taps, source, stride = _taps(op), op.inputs[0], op.values["stride"]
                need = int(np.abs(taps).max(initial=0))
                if self._direct(op, _size(source), _size(node)):
                    self.pads[_size(source)] = max(need, self.pads.get(_size(source), 0))
                    if need:
                        self.bordered.add(source)
                else:
                    need = int(np.abs(taps // stride).max(initial=0))
                self.pads[_size(node)] = max(need, self.pads.get(_size(node), 0))

    def _direct(self, op: Operation, source: tuple[int, ...], size: tuple[int, ...]) -> bool:
        """True if the taps are shifts of the input as it lies: no stride, and runs over whole images lie alike."""
        return op.values["stride"] == (1, 1) and (self.N != 1 or source == size)

    def _buffer(self, node: fx.Node) -> Buffer:
        lanes = lanes_of(node)
        assert lanes is not None
        return self._new(*lanes, self.pads.get(lanes[1:], 0) if is_image(node) else 0)

    def _new(self, channels: int, height: int, width: int, pad: int) -> Buffer:
        self.buffers.append(Buffer(channels, height, width, pad, self.N))
        return self.buffers[-1]

    def _put(self, node: fx.Node, step: Step) -> None:
        """The step that makes a node's value, and the zeros around it where a convolution looks there."""
        assert step.y is not None
        self.steps.append(step)
        self.values[node] = step.y
        if node in self.bordered and step.y.pad:
            self.steps.append(Step(BORDER, None, step.y, extra=(step.y.pad, step.y.pad * self.N)))

    def _place(self) -> int:
        """Buffers that are in use at different times share memory; returns the size of the arena."""
        for time, step in enumerate(self.steps):
            for b in (step.x, step.y, step.add):
                if b is not None:
                    b.made, b.read = (time if b.made < 0 else b.made), time
        placed: list[Buffer] = []
        for b in sorted(self.buffers, key=lambda b: -b.size):
            others = sorted((o for o in placed if o.made <= b.read and b.made <= o.read), key=lambda o: o.start)
            b.start = LANES
            for other in others:
                if b.start + b.size <= other.start:
                    break
                b.start = max(b.start, other.start + other.size)
            placed.append(b)
        return max((b.start + b.size for b in placed), default=0) + 4 * LANES

    # --- weights ---

    def _store(self, *arrays: NDArray[Any] | None) -> tuple[int, ...]:
        places = []
        for array in arrays:
            places.append(-1 if array is None else self.used)
            if array is not None:
                content = array.tobytes()
                content += bytes(-len(content) % 64)
                self.blob.append(content)
                self.used += len(content)
        return tuple(places)

    # --- operations ---

    def _add(self, node: fx.Node, op: Operation, run: dict[fx.Node, Operation], skip: set[fx.Node]) -> None:
        x = self.values[op.inputs[0]]
        if op.kind == "nothing":
            self.values[node] = x
        elif op.kind == "flatten":
            self._flatten(node, x)
        elif op.kind == "product":
            self._product(node, op, run, skip)
        elif op.kind == "pool":
            v = op.values
            extra = (*v["kernel"], *v["stride"], *v["padding"], int(v["counted"]), x.height << 32 | x.width)
            self._put(node, Step(POOL, x, self._buffer(node), kind=int(v["name"] == "mean"), extra=extra))
        elif op.kind == "add":
            end, relu = self._relu_after(node, run, skip)
            self._put(end, Step(ADD, x, self._buffer(node), self.values[op.inputs[1]], kind=relu))
        elif op.kind == "function":
            self._put(node, Step(POINTWISE, x, self._buffer(node), kind=FUNCTIONS[op.values["name"]]))
        else:
            assert op.weight is not None
            assert op.bias is not None
            places = self._store(_floats(op.weight), _floats(op.bias))
            eps = (struct.unpack("<i", struct.pack("<f", op.values["eps"]))[0],) if op.kind == "norm" else ()
            kind = NORM if op.kind == "norm" else AFFINE
            self._put(node, Step(kind, x, self._buffer(node), weights=(-1, -1, places[0], places[1]), extra=eps))

    def _flatten(self, node: fx.Node, x: Buffer) -> None:
        """Images as features, without what lies between their rows."""
        if not x.flat:
            y, size = self._buffer(node), (x.height, x.width)
            at = (0, x.height * x.width * self.N, x.width * self.N)
            self.steps.append(Step(POINTWISE, x, y, channels=x.channels, size=size, at=at))
            x = y
        self.values[node] = x

    def _relu_after(self, node: fx.Node, run: dict[fx.Node, Operation], skip: set[fx.Node]) -> tuple[fx.Node, int]:
        """The ReLU that alone reads a node, and 1; or the node and 0."""
        user = _only_user(node)
        if user in run and run[user].kind == "function" and run[user].values["name"] == "relu":
            skip.add(user)
            return user, 1
        return node, 0

    def _product(self, node: fx.Node, op: Operation, run: dict[fx.Node, Operation], skip: set[fx.Node]) -> None:
        """A product, with the addition and the ReLU that follow it."""
        add, end, user = None, node, _only_user(node)
        if user in run and run[user].kind == "add":
            others = [n for n in run[user].inputs if n is not node]
            if len(others) == 1 and others[0] in self.values:
                add, end = self.values[others[0]], user
                skip.add(user)
        end, relu = self._relu_after(end, run, skip)
        x, y, entries = self.values[op.inputs[0]], self._buffer(node), Entries.of(op)
        if y.flat and x.flat and self.N == 1:
            weights = self._rows(entries, op, entries.inputs.astype(np.uint16), entries.channels)
            self._put(end, Step(DOT, x, y, add, relu, weights=weights))
            return
        x, at = self._shifts(op, entries, x, y)
        lanes, height = y.width * self.N, y.height
        if self.N == 1:
            lanes, height = -(-((height - 1) * y.row + lanes) // LANES) * LANES, 1
        block = entries.block(x, lanes)
        weights, blocks = self._rows(entries, op, at.astype(np.int32), block), -(-entries.channels // block)
        reach = (int(at.min(initial=0)), int(at.max(initial=0)))
        size = (height, y.width)
        self._put(end, Step(PRODUCT, x, y, add, relu, lanes, weights, blocks, size=size, reach=reach))

    def _shifts(self, op: Operation, entries: Entries, x: Buffer, y: Buffer) -> tuple[Buffer, NDArray[np.int64]]:
        """What the products read, and how far from where a tile begins each weight finds its input."""
        if self._direct(op, (x.height, x.width), (y.height, y.width)):
            return x, entries.inputs * x.channel + entries.taps @ np.array([x.row, self.N])
        stride = np.array(op.values["stride"])
        shift, rest = np.floor_divide(entries.taps, stride), np.mod(entries.taps, stride)
        found, phase = np.unique(rest, axis=0, return_inverse=True)
        count, pad = max(1, len(found)), y.pad
        z = self._new(x.channels * count, y.height, y.width, pad)
        for i, first in enumerate(found - pad * stride):
            extra = (*stride.tolist(), *first.tolist(), x.height, x.width, count)
            size, at = (y.height + 2 * pad, y.width + 2 * pad), (i * z.channel, z.channel, z.row)
            self.steps.append(Step(PHASE, x, z, extra=extra, channels=x.channels, size=size, at=at))
        places = (entries.inputs * count + phase.reshape(-1)) * z.channel
        return z, places + shift @ np.array([z.row, self.N])

    def _rows(self, entries: Entries, op: Operation, at: NDArray[Any], block: int) -> tuple[int, int, int, int]:
        """The weights in the order of the loops: blocks of inputs, outputs, inputs."""
        rows, blocks = entries.rows, -(-entries.channels // block)
        key = entries.inputs // block * rows + entries.outputs
        order = np.argsort(key, kind="stable")
        ptr = np.concatenate([[0], np.cumsum(np.bincount(key, minlength=rows * blocks))]).astype(np.int32)
        a, b, c, d = self._store(ptr, at[order], entries.values[order], None if op.bias is None else _floats(op.bias))
        return a, b, c, d


@dataclass(frozen=True)
class Entries:
    """The weights that are not zero, output by output: of which inputs, and how far from the pixel of the output."""

    rows: int
    channels: int
    kernel: tuple[int, int]
    outputs: NDArray[np.int64]
    inputs: NDArray[np.int64]
    taps: NDArray[np.int64]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, op: Operation) -> Entries:
        """Those of a product; the inputs of a group count from its first."""
        assert op.weight is not None
        weight, groups = op.weight.detach(), op.values["groups"]
        rows, inside = weight.shape[:2]
        o, c, h, w = (index.numpy() for index in weight.nonzero(as_tuple=True))
        taps = np.stack([h, w], 1) * np.array(op.values["dilation"]) - np.array(op.values["padding"])
        inputs = c + o // max(1, rows // groups) * inside
        kernel = (weight.shape[2], weight.shape[3])
        return cls(rows, max(1, inside * groups), kernel, o, inputs, taps, _floats(weight[weight != 0]))

    def block(self, x: Buffer, lanes: int) -> int:
        """How many inputs a block has: as many as stay in the first cache, more where few weights are left."""
        high, wide, tile = *self.kernel, min(lanes, 8 * LANES)
        read = 4 * (tile + (high - 1) * x.row + wide if x.N == 1 else high * (tile + (wide - 1) * x.N))
        size = max(WHOLE // read, math.ceil(FEW * self.rows * self.channels / max(1, len(self.values))), 1)
        return size if size < 0.7 * self.channels else self.channels


def _taps(op: Operation) -> NDArray[np.int64]:
    """How far the taps of a product are from the pixel of their output."""
    assert op.weight is not None
    places = np.indices(op.weight.shape[2:]).reshape(2, -1).T
    taps: NDArray[np.int64] = places * np.array(op.values["dilation"]) - np.array(op.values["padding"])
    return taps


def _size(node: fx.Node) -> tuple[int, int]:
    lanes = lanes_of(node)
    assert lanes is not None
    return lanes[1:]


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    """Contiguous numbers of their own."""
    found: NDArray[np.float32] = tensor.detach().float().contiguous().numpy()
    return found


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


# --- the program ------------------------------------------------------------------------------------------------------


class Program(nn.Module):
    """A part of a graph as compiled steps; `twin`, the same part by torch, answers for what the code does not suit.

    run: the operations of the part, in order. inputs, outputs: values that cross its border.
    """

    def __init__(
        self, twin: fx.GraphModule, run: dict[fx.Node, Operation], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> None:
        super().__init__()
        self.twin = twin
        self.images = any(is_image(n) for n in (*inputs, *run))
        self._tails = [tuple(shape_of(n)[1 if self.images else -1 :]) for n in (*inputs, *outputs)]
        self._count = len(inputs)
        self._graph = (run, inputs, outputs)
        self._plans: dict[int, Plan] = {}
        self._arenas: dict[tuple[int, int], list[Tensor]] = {}
        self.plan_for(math.prod(shape_of(inputs[0])[: -len(self._tails[0])]))

    def plan_for(self, batch: int) -> Plan:
        """The plan of the group that suits a batch; made when it is first asked for."""
        N = _group(batch, self.images)
        if N not in self._plans:
            self._plans[N] = Planner(N).plan(*self._graph)
        return self._plans[N]

    def forward(self, *xs: Tensor) -> Tensor | list[Tensor]:
        """The values that leave the part, from those that enter it."""
        lead = xs[0].shape[: -len(self._tails[0])] if xs[0].dim() >= len(self._tails[0]) else None
        if lead is None or not self._suits(xs, lead):
            found: Tensor | list[Tensor] = self.twin(*xs)
            return found
        batch = math.prod(lead)
        plan, threads = self.plan_for(batch), torch.get_num_threads()
        ys = [xs[0].new_empty((*lead, *tail)) for tail in self._tails[self._count :]]
        free = self._arenas.setdefault((plan.N, threads), [])
        arena = free.pop() if free else torch.zeros(plan.arena * threads)
        ins, outs = (struct.pack(f"{len(ts)}Q", *(t.data_ptr() for t in ts)) for ts in (xs, ys))
        kernel.loaded().powerprop_infer(
            plan.steps,
            plan.count,
            plan.weights.data_ptr(),
            arena.data_ptr(),
            plan.arena,
            ins,
            outs,
            batch,
            plan.N,
            threads,
        )
        free.append(arena)
        return ys if len(ys) > 1 else ys[0]

    def _suits(self, xs: Sequence[Tensor], lead: torch.Size) -> bool:
        """True for plain float32 without gaps or gradients, of the shapes that were planned."""
        if kernel.library() is None or len(xs) != self._count or (self.images and len(lead) != 1):
            return False
        for x, tail in zip(xs, self._tails, strict=False):
            if not (kernel.is_plain(x) and x.shape == (*lead, *tail) and x.is_contiguous()):
                return False
            if x.requires_grad and torch.is_grad_enabled():
                return False
        return bool(lead.numel())


def _group(batch: int, images: bool) -> int:
    """How many inputs go through a program together: lanes for vectors, and weights read rarely."""
    if images:
        return 1 if batch < 6 else LANES
    return 1 if batch == 1 else min(128, LANES * -(-batch // LANES))
