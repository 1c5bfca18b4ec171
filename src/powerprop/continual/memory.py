"""Examples of earlier tasks, kept to be learned from again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Memory", "reservoir"]

Form = str | list[str]
"""How a batch is put together: "tensor", "tuple", "list", or the names of its tensors."""


class Memory:
    """An episodic memory: examples of the tasks so far, each with its task, as tensors with a row for each example.

    Batches are what the data yields: a tensor, a tuple or list of tensors, or a mapping of names to tensors. What is
    kept is drawn while the data goes by once, so that it need not fit into memory.

    capacity: the most examples of all tasks together; None keeps everything.
    equal: every task has the same number of examples, capacity // tasks; otherwise every example that went by is as
        likely to be here as any other, and large tasks have more.
    beside: so many tensors that are kept with every example without being part of its batch.

    Examples:
        >>> memory = continual.Memory(100)
    """

    def __init__(self, capacity: int | None, equal: bool = False, beside: int = 0) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"memory must be at least one example, got {capacity}")
        self.capacity, self.equal, self.besides = capacity, equal, beside
        self.form: Form | None = None
        self.columns: list[Tensor] = []
        self.tasks = torch.zeros(0, dtype=torch.long)
        self.seen = 0
        self.trained = False
        """Steps fill it, so that a task which diverges must be taken back."""

    def __len__(self) -> int:
        return len(self.tasks)

    # --- filling ------------------------------------------------------------------------------------------------

    def add(self, batches: Iterable[Any], task: int, generator: torch.Generator) -> None:
        """Keep some of a task's data, all of it changed or nothing."""
        apart: Iterable[tuple[Form, list[Tensor]]] = map(_taken_apart, batches)
        if self.capacity is None:
            apart = _joined(apart)
        if not self.equal or self.capacity is None:
            self._take(self._filled(apart, task, generator, (self.columns, self.tasks, self.seen), self.capacity))
            return
        quota = self.capacity // (task + 1)
        if not quota:
            raise ValueError(f"memory={self.capacity} has no room for one example of each of {task + 1} tasks")
        form, own, tasks, seen = self._filled(apart, task, generator, ([], self.tasks[:0], 0), quota)
        mixed = torch.randperm(len(tasks), generator=generator)
        kept = torch.cat([self.rows_of(t)[:quota] for t in self.known()] + [self.tasks[:0]])  # in random order already
        self._put_behind(kept, form, [column[mixed] for column in own], tasks, seen)

    def add_now(self, batch: Any, task: int, generator: torch.Generator, beside: Sequence[Tensor] = ()) -> None:
        """Some examples of a stream that goes by, into a reservoir of all that went by before."""
        form, rows = _taken_apart(batch)
        known, fresh = (self.columns, self.tasks, self.seen), self.form is None
        self._take(self._filled([(form, [*rows, *beside])], task, generator, known, self.capacity, fresh))

    def put_behind(self, kept: Tensor, batch: Any, task: int) -> None:
        """Of what is here these rows, in this order, and behind them all of a batch."""
        form, rows = _taken_apart(batch)
        self._check_form(form, task)
        self._put_behind(kept, form, rows, torch.full((len(rows[0]),), task), len(rows[0]))

    def _put_behind(self, kept: Tensor, form: Form, rows: list[Tensor], tasks: Tensor, seen: int) -> None:
        older = [column[kept.to(column.device)] for column in self.columns] or [row[:0] for row in rows]
        _check_alike(older, rows)
        columns = [torch.cat([old, new.to(old)]) for old, new in zip(older, rows, strict=True)]
        self._take((form, columns, torch.cat([self.tasks[kept], tasks]), self.seen + seen))

    def _filled(
        self, apart: Iterable[tuple[Form, list[Tensor]]], task: int, generator: torch.Generator,
        known: tuple[list[Tensor], Tensor, int], capacity: int | None, fresh: bool = True,
    ) -> tuple[Form, list[Tensor], Tensor, int]:  # fmt: skip
        """A reservoir after this data has gone by.

        known: what it is before.
        fresh: in memory of its own, so that it stays as it was where some of the data is refused.
        """
        form, (columns, tasks, seen) = self.form, known
        for kind, rows in apart:
            self._check_form(kind, task, form)
            form, columns = kind, columns or [row[:0] for row in rows]
            _check_alike(columns, rows)
            slots, which = reservoir(seen, len(rows[0]), capacity, generator)
            numbers = torch.full((len(rows[0]),), task)
            columns = [_put(old, new, slots, which, fresh) for old, new in zip(columns, rows, strict=True)]
            tasks = _put(tasks, numbers, slots, which, fresh)
            seen, fresh = seen + len(numbers), False
        if form is None or seen == known[2]:
            raise ValueError(f"task {task}: there is no data to keep examples of")
        return form, columns, tasks, seen

    def _check_form(self, form: Form, task: int, known: Form | None = None) -> None:
        """All batches are of the form of the first."""
        if (known := known or self.form) not in (None, form):
            raise ValueError(f"task {task}: the memory holds batches of the form {known}, got {form}")

    def _take(self, filled: tuple[Form, list[Tensor], Tensor, int]) -> None:
        self.form, self.columns, self.tasks, self.seen = filled

    # --- what is in it ------------------------------------------------------------------------------------------

    def known(self) -> list[int]:
        """The tasks that it has examples of."""
        return sorted(set(self.tasks.tolist()))

    def rows_of(self, task: int) -> Tensor:
        """Where the examples of a task are."""
        return (self.tasks == task).nonzero()[:, 0]

    def draw(self, count: int, generator: torch.Generator, among: Tensor | None = None) -> Tensor:
        """Some rows at random, no example twice; all of them where there are no more."""
        rows = torch.arange(len(self)) if among is None else among
        return rows if count >= len(rows) else rows[torch.randperm(len(rows), generator=generator)[:count]]

    def batch(self, rows: Tensor) -> Any:
        """These examples as a batch of the form in which they came."""
        parts = [column[rows.to(column.device)] for column in self.columns[: len(self.columns) - self.besides]]
        if isinstance(self.form, list):
            return dict(zip(self.form, parts, strict=True))
        return parts[0] if self.form == "tensor" else parts if self.form == "list" else tuple(parts)

    def beside(self, rows: Tensor) -> list[Tensor]:
        """What is kept with these examples."""
        return [column[rows.to(column.device)] for column in self.columns[len(self.columns) - self.besides :]]

    # --- saving -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        columns = {str(number): column for number, column in enumerate(self.columns)}
        return columns | {"tasks": self.tasks}, {"form": self.form, "seen": self.seen}

    def load_state(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        tasks, columns = tensors["tasks"], [tensors[str(number)] for number in range(len(tensors) - 1)]
        if self.capacity is not None and len(tasks) > self.capacity:
            raise ValueError(f"the saved memory has {len(tasks)} examples, this one has room for {self.capacity}")
        if any(len(column) != len(tasks) for column in columns):
            lengths = [len(column) for column in columns]
            raise ValueError(f"the saved memory has {len(tasks)} tasks of examples, and {lengths} of their parts")
        self._take((data["form"], columns, tasks, data["seen"]))


def reservoir(seen: int, count: int, capacity: int | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Algorithm R (Vitter, 1985): which of `count` new examples go into which slots, after `seen` that went by.

    Example i (from 0) goes into slot i while there are free ones, later into slot j, drawn from 0..i, if there is such
    a slot. After n examples each is in the reservoir with probability capacity / n.
    """
    number = seen + torch.arange(count)
    if capacity is None:
        return number, torch.arange(count)
    drawn = (torch.rand(count, generator=generator, dtype=torch.float64) * (number + 1)).long()
    slot = torch.where(number < capacity, number, drawn)
    last = {int(slot[i]): i for i in (slot < capacity).nonzero()[:, 0].tolist()}  # a later one takes the slot
    return torch.tensor(list(last), dtype=torch.long), torch.tensor(list(last.values()), dtype=torch.long)


def _put(old: Tensor, new: Tensor, slots: Tensor, which: Tensor, fresh: bool) -> Tensor:
    """The old rows with new ones in some slots, further rows if need be; fresh: in memory of its own."""
    more = max(int(slots.max()) + 1 if len(slots) else 0, len(old)) - len(old)
    if more or fresh:
        old = torch.cat([old, old.new_empty((more, *old.shape[1:]))])
    old[slots.to(old.device)] = new[which.to(new.device)].to(old.device)
    return old


def _taken_apart(batch: Any) -> tuple[Form, list[Tensor]]:
    """The form of a batch, and its tensors."""
    if isinstance(batch, Mapping):
        form: Form = [str(key) for key in batch]
        parts = list(batch.values())
    else:
        form = "tensor" if isinstance(batch, Tensor) else "list" if isinstance(batch, list) else "tuple"
        parts = [batch] if isinstance(batch, Tensor) else list(batch) if isinstance(batch, (tuple, list)) else []
    tensors = [part.detach() for part in parts if isinstance(part, Tensor) and part.ndim]
    if not tensors or len(tensors) < len(parts) or len({len(part) for part in tensors}) > 1:
        found = [f"{type(part).__name__} {tuple(getattr(part, 'shape', ()))}" for part in parts] or type(batch).__name__
        raise TypeError(f"a memory keeps batches of tensors with a row for each example, got {found}")
    return form, tensors


def _joined(batches: Iterable[tuple[Form, list[Tensor]]]) -> list[tuple[Form, list[Tensor]]]:
    """Batches as one, where all of them are kept: copied once, not once for each of them."""
    apart = list(batches)
    for _, rows in apart:
        _check_alike(apart[0][1], rows)
    if len({str(form) for form, _ in apart}) != 1:
        return apart
    return [(apart[0][0], [torch.cat(column) for column in zip(*(rows for _, rows in apart), strict=True)])]


def _check_alike(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    shapes = [[(tuple(part.shape[1:]), part.dtype) for part in parts] for parts in (old, new)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the memory has examples of {shapes[0]}, got {shapes[1]}: all must be alike")
