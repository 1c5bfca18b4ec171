"""Which task does an input belong to? The sub-network that is sure of its answer tells.

`exhaustive` asks every sub-network, one pass each, and takes the one of lowest entropy H. `shortlist`, the default,
asks only the few tasks whose stored mean input is near: the number of passes does not grow with that of the tasks. The
paper's method stores no such means; where a figure of `shortlist` stands, that of `exhaustive` belongs beside it.

`oneshot` and `binary` follow Wortsman et al. (2020; paper, section 4.2): the masks of all tasks are mixed in the space
of the weights, w = θ ⊙ Σ_t π_t M^t with π = 1/T, and the entropy is differentiated by the coefficients,

    ∂H/∂π_t = Σ_i ∂H/∂w_i θ_i M^t_i.

One forward and one backward pass through the mixture give ∂H/∂w; one more pass over the weights gives the sum for all T
tasks at once (see `taskmasks`). The task whose coefficient lowers the entropy fastest is the guess.

`oneshot-superfluous` and `binary-superfluous` put another objective in the place of H, for networks with more outputs
than classes: log Σ_k exp(output k) over the superfluous outputs k, which cross-entropy pushes down on a task's own data
alone (Wortsman et al. 2020, section 3.4).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from powerprop.continual.objective import Objective
from powerprop.continual.packing.subnets import Subnetworks
from powerprop.eval_mode import evaluating

__all__ = ["INFERENCES", "entropy_gradient", "infer"]

MARGIN = 0.1
"""How much farther than the nearest task one may be to stay on the short list."""
PART = 1000
"""Inputs that are evaluated at a time."""


def entropy_gradient(
    nets: Subnetworks, x: Tensor, coefficients: Tensor, objective: Objective, superfluous: bool = False
) -> Tensor:
    """∂H/∂π for all tasks at a mixture: one forward and one backward pass, then one pass over the weights.

    The model is in evaluation mode; a layer that it does not use says nothing about the task.

    superfluous: take the log-sum-exp of the superfluous outputs in the place of H.
    """
    judge = objective.superfluous if superfluous else objective.unsure
    _check_heads(nets)
    mixed = {n: w.requires_grad_() for n, w in nets.mixture(coefficients).items()}
    device = next(nets.model.parameters()).device
    with torch.enable_grad(), evaluating(nets.model), nets.viewing(mixed, 0) as model:
        value = judge(model, x.to(device), None).mean()
        gradients = torch.autograd.grad(value, list(mixed.values()), materialize_grads=True)
    return nets.coefficient_gradient(dict(zip(mixed, gradients, strict=True)))


def _check_heads(nets: Subnetworks) -> None:
    """Only heads of the same shapes can be added up."""
    shapes = [[tuple(p.shape) for p in head.values()] for head in nets.heads()]
    for task, found in enumerate(shapes):
        if found != shapes[0]:
            text = f"'oneshot' and 'binary' mix the heads of all tasks, expected the same shapes, got {shapes[0]}"
            raise ValueError(f"{text} for task 0 and {found} for task {task}; use 'shortlist' or 'exhaustive'")


@torch.no_grad()
def entropies(nets: Subnetworks, x: Tensor, objective: Objective, wanted: Tensor | None = None) -> Tensor:
    """(tasks, inputs): how unsure each sub-network is of each input; one masked pass per task over all its inputs.

    wanted: (tasks, inputs) booleans; the others are infinite and cost nothing.
    """
    found = torch.full((nets.masks.tasks, len(x)), torch.inf, dtype=torch.float32)
    device = next(nets.model.parameters()).device
    for task in nets.task_numbers():
        rows = None if wanted is None else wanted[task].nonzero()[:, 0]
        if rows is not None and not len(rows):
            continue
        asked = x if rows is None else x[rows.to(x.device)]
        with evaluating(nets.model), nets.viewing(nets.weights(task), task) as model:
            parts = [objective.unsure(model, part.to(device), task) for part in torch.split(asked, PART)]
        found[task, slice(None) if rows is None else rows] = torch.cat(parts).float().cpu()
    return found


def oneshot(groups: Groups, superfluous: bool = False) -> Tensor:
    """The task with the lowest ∂H/∂π at the even mixture of all."""
    every = _even(torch.ones(groups.nets.masks.tasks, dtype=torch.bool))
    return torch.stack([_lowest(groups.gradient(x, every, superfluous), 1) for x in groups.parts()])


def binary(groups: Groups, superfluous: bool = False) -> Tensor:
    """Half of the tasks at a time: those with the higher ∂H/∂π are out, the rest is mixed anew, until one is left."""
    return torch.stack([_halved(groups, x, superfluous) for x in groups.parts()])


def _halved(groups: Groups, x: Tensor, superfluous: bool) -> Tensor:
    left = torch.ones(groups.nets.masks.tasks, dtype=torch.bool)
    while (count := int(left.sum())) > 1:
        gradient = groups.gradient(x, _even(left), superfluous).masked_fill(~left, torch.inf)
        left = _lowest(gradient, (count + 1) // 2)
    return left


def shortlist(groups: Groups) -> Tensor:
    """The few tasks whose stored means are like these inputs, to be tried one by one: a few passes for any T.

    A task that is farther than the nearest by more than a tenth is out; for n inputs together the margin grows as the
    cube root of n, because the entropy of one input is a poor judge and that of many a good one. Tasks that tie are
    never parted: those at the same distance, and those whose means differ from the ones on the list by no more than
    chance, as those of standardised inputs do. Where all tie, all are tried, as `exhaustive` does.
    """
    signatures = groups.nets.signatures
    distance = signatures.distances(groups.x, groups.sizes)
    if not distance.any():  # nothing is known that tells the tasks apart
        return exhaustive(groups)
    sizes = torch.tensor(groups.sizes, dtype=torch.float64)[:, None]
    last = distance.sort(1).values[:, min(groups.candidates, distance.shape[1]) - 1, None]
    chosen = (distance <= last) & (distance <= distance.amin(1, keepdim=True) * (1 + MARGIN * sizes ** (1 / 3)))
    for task in chosen.any(0).nonzero()[:, 0].tolist():
        chosen = chosen | (chosen[:, task, None] & signatures.tied(task))
    return chosen


def exhaustive(groups: Groups) -> Tensor:
    """All tasks, to be tried one by one."""
    return torch.ones(len(groups.sizes), groups.nets.masks.tasks, dtype=torch.bool)


def _even(which: Tensor) -> Tensor:
    return which.double() / which.sum()


def _lowest(gradient: Tensor, count: int) -> Tensor:
    chosen = torch.zeros(len(gradient), dtype=torch.bool)
    chosen[gradient.argsort()[:count]] = True
    return chosen


class Groups(NamedTuple):
    """Inputs whose tasks are asked for, the sizes of the groups in which they are judged, and who judges."""

    nets: Subnetworks
    x: Tensor
    sizes: list[int]
    objective: Objective
    candidates: int = 4

    def parts(self) -> tuple[Tensor, ...]:
        """The inputs group by group."""
        return torch.split(self.x, self.sizes)

    def gradient(self, x: Tensor, coefficients: Tensor, superfluous: bool) -> Tensor:
        """∂H/∂π of some inputs."""
        return entropy_gradient(self.nets, x, coefficients, self.objective, superfluous)


INFERENCES: dict[str, Callable[[Groups], Tensor]] = {
    "shortlist": shortlist,
    "oneshot": oneshot,
    "binary": binary,
    "exhaustive": exhaustive,
    "oneshot-superfluous": partial(oneshot, superfluous=True),
    "binary-superfluous": partial(binary, superfluous=True),
}
"""Each gives (groups, tasks): those worth a pass of their own, among which the lowest entropy decides."""


def infer(
    nets: Subnetworks, x: Tensor, objective: Objective, method: str = "shortlist", group: int | None = 1,
    candidates: int = 4,
) -> Tensor:  # fmt: skip
    """The task of every input.

    objective: says how unsure a sub-network is of an input.
    method: one of INFERENCES.
    group: so many consecutive inputs are known to be of one task; by default each is judged by itself. None says that
        all of them are of one task.
    candidates: the most tasks that `shortlist` tries, unless more of them tie.
    """
    check_inference(method, group, candidates)
    nets.masks.check(0)
    if not len(x):
        return torch.zeros(0, dtype=torch.long)
    sizes = group_sizes(len(x), group)
    chosen = INFERENCES[method](Groups(nets, x, sizes, objective, candidates))
    return _decide(nets, x, objective, chosen, torch.tensor(sizes)).repeat_interleave(torch.tensor(sizes))


def group_sizes(count: int, group: int | None) -> list[int]:
    """The sizes of the groups of consecutive inputs; the last may be smaller."""
    size = min(group or count, count)
    return [size] * (count // size) + ([count % size] if count % size else []) if count else []


def check_inference(method: str, group: int | None, candidates: int) -> None:
    """The arguments of `infer`, or an error that repeats the wrong one."""
    if method not in INFERENCES:
        raise ValueError(f"method must be one of {', '.join(INFERENCES)}, got {method!r}")
    if group is not None and group < 1:
        raise ValueError(f"group must be at least 1, got {group}")
    if candidates < 1:
        raise ValueError(f"candidates must be at least 1, got {candidates}")


def _decide(nets: Subnetworks, x: Tensor, objective: Objective, chosen: Tensor, sizes: Tensor) -> Tensor:
    """The task of each group: the only one chosen, or the one of lowest entropy among several."""
    only = chosen.sum(1) == 1
    first = chosen.int().argmax(1)
    if only.all():
        return first
    wanted = (chosen & ~only[:, None]).repeat_interleave(sizes, 0).T
    unsure = entropies(nets, x, objective, wanted)
    mean = torch.stack([part.mean(1) for part in torch.split(unsure, sizes.tolist(), 1)])
    return torch.where(only, first, mean.argmin(1))
