"""Pruning that looks at a layer's inputs: Wanda and SparseGPT, block by block on a few batches of data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from powerprop.eval_mode import evaluating
from powerprop.mask_entries import count
from powerprop.masks import Masks
from powerprop.recalibrate import Batch, run_batch
from powerprop.sparsify.pattern import check_rankable, fill, pattern_of

__all__ = ["CRITERIA", "prune_by_inputs", "sparsegpt", "wanda"]

COLUMNS = 128
"""SparseGPT chooses among so many columns at a time."""
DAMPING = 0.01
"""Of the mean of the diagonal of H, added to it."""

Statistic = Callable[[Tensor], Tensor]


@torch.no_grad()
def wanda(weight: Tensor, squares: Tensor, keep: int, pattern: str | None = None) -> tuple[Tensor, Tensor]:
    """The mask of the highest |W_ij|·‖X_j‖₂, compared within each output i, and W (Sun et al. 2023).

    squares: Σ x_j² over all inputs x. Every output keeps as many weights; where `keep` is no multiple of the outputs,
    the rest goes to the outputs whose next weight scores highest.
    """
    score = weight.abs() * squares.sqrt()
    if pattern is not None:
        return fill(torch.zeros_like(score, dtype=torch.bool), score, pattern), weight
    each, rest = divmod(keep, len(score))
    ranked = score.argsort(dim=1, descending=True, stable=True)
    mask = torch.zeros_like(score, dtype=torch.bool).scatter_(1, ranked[:, :each], True)
    if rest:
        following = ranked[:, each : each + 1]
        rows = _first(score.gather(1, following).squeeze(1), rest)
        mask[rows, following[rows, 0]] = True
    return mask, weight


@torch.no_grad()
def sparsegpt(weight: Tensor, gram: Tensor, keep: int, pattern: str | None = None) -> tuple[Tensor, Tensor]:
    """Optimal brain surgery, column by column: the mask, and W after it (Frantar & Alistarh 2023).

        H = XXᵀ + λI,   score W_ij² / [H⁻¹]_jj,   W_i,>j ← W_i,>j - W_ij [H⁻¹]_j,>j / [H⁻¹]_jj  for each pruned W_ij

    H⁻¹ is that of the columns from j on, read off the Cholesky factor of the whole; λ is 1% of the mean diagonal of H.

    gram: Σ x xᵀ over all inputs x. An input that is always zero has no score, and its weights go first.
    """
    weight, width = weight.clone(), weight.shape[1]
    factor, silent = _inverse_factor(gram)
    scale = factor.diagonal().masked_fill(silent, torch.inf)
    m = pattern_of(pattern)[1] if pattern is not None else 1
    step = max(m, COLUMNS // m * m)
    mask = torch.zeros_like(weight, dtype=torch.bool)
    for start in range(0, width, step):
        end = min(start + step, width)
        if pattern is None:
            score = (weight[:, start:end] / scale[start:end]).square().flatten()
            first = torch.zeros_like(score, dtype=torch.bool)
            first[_first(score, keep * end // width - keep * start // width)] = True
            mask[:, start:end] = first.view(len(weight), -1)
        errors = weight.new_zeros(len(weight), end - start)
        for j in range(start, end):
            if pattern is not None and j % m == 0:  # a group is chosen when those before it have had their say
                score = (weight[:, j : j + m] / scale[j : j + m]).square()
                mask[:, j : j + m] = fill(torch.zeros_like(score, dtype=torch.bool), score, pattern)
            errors[:, j - start] = weight[:, j].masked_fill(mask[:, j], 0) / factor[j, j]
            weight[:, j:end] -= errors[:, j - start, None] * factor[j, j:end]
            weight[:, j].masked_fill_(~mask[:, j], 0)
        weight[:, end:] -= errors @ factor[start:end, end:]
    return mask, weight


def _inverse_factor(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The upper Cholesky factor of H⁻¹, and which inputs are always zero."""
    hessian, silent = gram.clone(), gram.diagonal() == 0
    diagonal = hessian.diagonal()
    diagonal[silent] = 1
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True), silent


def _first(score: Tensor, k: int) -> Tensor:
    """The places of the k highest; among equals the first."""
    check_rankable(score)
    return score.argsort(descending=True, stable=True)[:k]


CRITERIA: Mapping[str, tuple[Statistic, Callable[..., tuple[Tensor, Tensor]]]] = {
    "wanda": (lambda x: x.square().sum(0), wanda),
    "sparsegpt": (lambda x: x.T @ x, sparsegpt),
}
"""By name: what is summed over a layer's inputs (rows of x), and what is made of it."""


# --- which layers, and in which order -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """A weight with the modules that multiply by it, and how many of its entries stay."""

    name: str
    weight: nn.Parameter
    modules: Sequence[nn.Module]
    keep: int

    @property
    def matrix(self) -> Tensor:
        """The weight as (outputs, inputs); a view."""
        values = self.weight.detach()
        return values if isinstance(self.modules[0], nn.Linear) else values.T


def _is_linear(module: nn.Module) -> bool:
    """Linear layers, and Hugging Face's, which hold the transpose."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _layers(model: nn.Module, kept: Masks, criterion: str, pattern: str | None) -> dict[str, _Layer]:
    """Those that lose weights; one that is not linear, or that the pattern does not fit, is an error."""
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            users.setdefault(id(param), []).append(module)
    named, found = dict(model.named_parameters()), {}
    for name, mask in kept.items():
        if (keep := count(mask)) == mask.numel():
            continue
        modules = users[id(named[name])]
        if other := next((each for each in modules if not _is_linear(each)), None):
            raise ValueError(
                f"criterion={criterion!r} is for linear layers, and {name!r} is of a {type(other).__name__}; "
                f"leave it dense by layers={{{name!r}: 0.0}}, or choose weights by where="
            )
        found[name] = _Layer(name, named[name], modules, keep)
        if pattern is not None and (inputs := found[name].matrix.shape[1]) % pattern_of(pattern)[1]:
            raise ValueError(f"pattern={pattern!r} does not fit the {inputs} inputs of {name!r}")
    return found


def _stages(model: nn.Module, order: Iterable[str]) -> list[list[str]]:
    """Layers that are pruned together: those of one element of the outermost list or sequence of modules, in order."""
    modules, found = dict(model.named_modules()), dict[str, list[str]]()
    for name in order:
        parts = name.split(".")
        lists = [i for i in range(len(parts) - 1) if isinstance(modules[".".join(parts[:i])], _CONTAINERS)]
        found.setdefault(".".join(parts[: lists[0] + 1]) if lists else name, []).append(name)
    return list(found.values())


_CONTAINERS = (nn.ModuleList, nn.Sequential)


# --- what flows through them --------------------------------------------------------------------------------------


class _Enough(Exception):  # noqa: N818 (no error: the rest of a forward pass is not needed)
    pass


@torch.no_grad()
def prune_by_inputs(
    model: nn.Module, kept: Masks, criterion: str, data: Iterable[Batch], pattern: str | None = None
) -> Masks:
    """Prune every layer to as many weights as `kept` has there, by what its inputs are in the model as pruned so far.

    The batches pass once through the whole model, before anything changes, and then once for each block up to its end;
    nothing is kept of a pass but the sums of one block's layers, and hooks are gone after it whatever happens.
    """
    batches = list(data)
    layers = _layers(model, kept, criterion, pattern)
    if not batches:
        raise ValueError(f"criterion={criterion!r} needs at least one batch of data, got none")
    measure, choose = CRITERIA[criterion]
    masks = dict(kept)
    with evaluating(model):
        calls = _first_pass(model, layers, batches)
        for stage in _stages(model, sum(calls, Counter())):
            sums = _sums(model, [layers[name] for name in stage], batches, calls, measure)
            for name in stage:
                matrix = layers[name].matrix
                mask, values = choose(matrix.to(sums[name].dtype), sums[name], layers[name].keep, pattern)
                matrix.copy_(values.masked_fill(~mask, 0))
                masks[name] = mask if isinstance(layers[name].modules[0], nn.Linear) else mask.T.contiguous()
    return Masks(masks)


def _first_pass(model: nn.Module, layers: Mapping[str, _Layer], batches: Sequence[Batch]) -> list[Counter[str]]:
    """How often each batch calls each layer, in order; what cannot be measured is found out here."""
    calls: list[Counter[str]] = []

    def see(name: str, x: Tensor) -> None:
        calls[-1][name] += 1
        if not bool(torch.isfinite(x).all()):
            raise FloatingPointError(f"{name!r} has inputs that are NaN or infinite in batch {len(calls) - 1}")

    with _listening(layers.values(), see):
        for batch in batches:
            calls.append(Counter())
            run_batch(model, batch)
    if unseen := [name for name in layers if not any(name in each for each in calls)]:
        raise ValueError(
            f"the batches never call the layer of {', '.join(map(repr, unseen))} (or its inputs cannot be seen there); "
            f"leave it dense by layers={{{unseen[0]!r}: 0.0}}"
        )
    return calls


def _sums(
    model: nn.Module, layers: Sequence[_Layer], batches: Sequence[Batch], calls: Sequence[Counter[str]],
    measure: Statistic,
) -> dict[str, Tensor]:  # fmt: skip
    """The statistic of these layers' inputs, summed over all batches; a pass ends where the last of them was called."""
    sums: dict[str, Tensor] = {}
    left = 0

    def add(name: str, x: Tensor) -> None:
        nonlocal left
        here = measure(x if x.dtype == torch.float64 else x.float())
        sums[name] = sums[name].add_(here) if name in sums else here
        left -= 1
        if left == 0:
            raise _Enough

    with _listening(layers, add):
        for batch, called in zip(batches, calls, strict=True):
            left = sum(called[layer.name] for layer in layers)
            if left:
                with suppress(_Enough):
                    run_batch(model, batch)
    return sums


@contextmanager
def _listening(layers: Iterable[_Layer], hear: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `hear(name, inputs as rows)` whenever a layer is about to run, inside the block only."""

    def hook(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else next(iter(kwargs.values()))
            hear(name, x.detach().reshape(-1, x.shape[-1]))

        return before

    with ExitStack() as stack:
        for layer in layers:
            for module in layer.modules:
                stack.enter_context(module.register_forward_pre_hook(hook(layer.name), with_kwargs=True))
        yield
