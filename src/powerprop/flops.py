"""FLOPs of a masked model: inference and training, as the papers on RigL and Top-KAST count them.

One forward pass counts the dense FLOPs of every weight (two per multiply-add; norms, activations and the products of
attention that involve no weight are not counted). A mask scales its layer's count by its density. A training step is
three such passes: forward, gradient of the activations, gradient of the weights (Evci et al. 2020, appendix G).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.rnn import PackedSequence

from powerprop.allocate import Layers, layer_counts
from powerprop.eval_mode import evaluating
from powerprop.optim import Powerprop
from powerprop.select import Where, is_table, select
from powerprop.sparsify.base import Method

__all__ = ["Density", "Flops", "count_flops", "layer_densities"]

Density = Mapping[str, float | Tensor]
"""By weight name: the fraction kept, or a mask; weights that are not named are dense."""

_COUNTED = (nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True)
class Flops:
    """The dense forward FLOPs of one example, by weight name, and what masks and methods make of them.

    Examples:
        >>> flops = pp.count_flops(model, x[:1])
        >>> flops.dense
        3072.0
    """

    layers: Mapping[str, float]

    @property
    def dense(self) -> float:
        """f_D: a forward pass of one example with all weights."""
        return sum(self.layers.values())

    def forward(self, density: Density | None = None) -> float:
        """f_S = Σ density_l · f_l: a forward pass of one example with the weights that are kept."""
        density = density or {}
        if unknown := set(density) - set(self.layers):
            raise ValueError(f"densities for {sorted(unknown)}, but the weights here are {sorted(self.layers)}")
        return sum(flops * _fraction(density.get(name, 1.0), name) for name, flops in self.layers.items())

    def inference(self, density: Density | None = None) -> float:
        """f_S / f_D: what the masked model costs, relative to the dense one."""
        return self.forward(density) / self.dense

    def training(self, method: Method, density: Density | None = None, backward: Density | None = None) -> float:
        """A training step of the method, relative to a dense one (3 f_D).

        method: such as `RigL(0.9, steps=32_000)`; for gradual pruning, whose density changes, see `gradual`.
        density: of the weights that the forward pass uses.
        backward: Top-KAST's density of the weights that get a gradient; all of them by default.
        """
        if backward is not None and not method.explores:
            raise ValueError(f"{method.label} trains the weights that it uses: expected no backward density")
        active = self.forward(density)
        trainable = self.forward(backward) if method.explores else active
        return method.step_flops(active, trainable, self.dense) / (3 * self.dense)

    def step(self, optimizer: Powerprop) -> float:
        """A training step with the optimiser's masks as they are now, relative to a dense one.

        2 f_active + f_trainable, to which RigL and SNFS add the gradients of all weights that they grow by.
        """
        active, trainable = self.forward(optimizer.active), self.forward(optimizer.trainable)
        count = optimizer.sparsify.step_flops if isinstance(optimizer.sparsify, Method) else Method(0.0).step_flops
        return count(active, trainable, self.dense) / (3 * self.dense)

    def gradual(self, density: Density, start: float = 0.2, stop: float = 0.8, interval: float = 1 / 16) -> float:
        """Training with gradual pruning, relative to dense: the mean of f_S / f_D over the whole of it.

        Every layer is pruned to its final density along p(t) = 1 - (1 - (t - start)/(stop - start))³.

        density: at the end.
        start, stop, interval: of the pruning, as fractions of the training.
        """
        if not 0 <= start < stop <= 1 or not interval > 0:
            raise ValueError(f"expected 0 <= start < stop <= 1 and interval > 0, got {start}, {stop} and {interval}")
        return 1 - _mean_progress(start, stop, interval) * (1 - self.inference(density))


def _mean_progress(start: float, stop: float, interval: float) -> float:
    """The mean over the training of the p that was reached at the last pruning."""
    count = math.ceil((stop - start) / interval - 1e-9)
    moments = [start + i * interval for i in range(count)] + [stop, 1.0]
    reached = [1 - (1 - min(1.0, (t - start) / (stop - start))) ** 3 for t in moments[:-1]]
    return sum(p * (after - t) for p, t, after in zip(reached, moments[:-1], moments[1:], strict=True))


def count_flops(model: nn.Module, inputs: Tensor | Sequence[int], where: Where | None = None) -> Flops:
    """Count by one forward pass in eval mode; the model is left as it was.

    inputs: a batch, or the shape of one example, e.g. (3, 224, 224), which runs without computing anything.
    where: the weights that count, by default all (see `select`); norms, biases and embeddings count 0.
    A weight that the pass does not reach counts 0; one that it uses twice counts twice. In modules that are not torch's
    own, a matrix counts once for every row of the input, if input and output have its two sizes; others are an error.

    Examples:
        >>> pp.count_flops(model, x[:1]).layers["0.weight"]
        2560.0
    """
    counts = dict.fromkeys(select(model, where), 0.0)
    compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()  # compiled code knows no new hooks
    with eager, _counting(model, counts), evaluating(model), torch.no_grad():
        examples = _run(model, inputs)
    if not sum(counts.values()):
        raise ValueError(f"the forward pass of {type(model).__name__} used none of its weights: {list(counts)}")
    return Flops({name: count / examples for name, count in counts.items()})


def layer_densities(
    model: nn.Module, sparsity: float, distribution: str = "uniform", layers: Layers | None = None,
    where: Where | None = None,
) -> dict[str, float]:  # fmt: skip
    """The fraction of each weight kept at this sparsity, for "uniform" or "erk"; arguments as for `prune`.

    Examples:
        >>> pp.layer_densities(model, 0.5)
        {'0.weight': 0.5, '2.weight': 0.5}
    """
    weights = select(model, where)
    counts = layer_counts({n: w.shape for n, w in weights.items()}, sparsity, distribution, layers)
    return {name: counts[name] / max(1, weight.numel()) for name, weight in weights.items()}


def _fraction(density: float | Tensor, name: str) -> float:
    value = float(density.float().mean()) if isinstance(density, Tensor) else float(density)
    if not 0 <= value <= 1:
        raise ValueError(f"density must be in [0, 1], got {value:g} for {name!r}")
    return value


def _run(model: nn.Module, inputs: Tensor | Sequence[int]) -> int:
    """The forward pass, on the meta device if only a shape is given; returns the number of examples."""
    if isinstance(inputs, Tensor):
        model(inputs)
        return len(inputs)
    named = (*model.named_parameters(), *model.named_buffers())
    meta = {name: tensor.detach().to("meta") for name, tensor in named}
    functional_call(model, meta, (torch.empty(1, *inputs, device="meta"),))
    return 1


@contextmanager
def _counting(model: nn.Module, counts: dict[str, float]) -> Iterator[None]:
    """Hooks that add the FLOPs of every layer's weights to `counts` as it is called."""
    known = {id(param): name for name, param in model.named_parameters() if name in counts}

    def count(
        used: list[tuple[str, str, torch.Size]], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
        output: Any,
    ) -> None:  # fmt: skip
        for attribute, name, shape in used:
            if isinstance(module, _COUNTED):
                positions = _positions(module, attribute, args, kwargs, output)
            else:
                positions = _rows(module, shape, name, args, kwargs, output)
            counts[name] += 2 * shape.numel() * positions

    with ExitStack() as stack:
        for module in model.modules():
            own: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
            if isinstance(module, nn.MultiheadAttention):  # does its output layer's work itself
                own["out_proj.weight"] = module.out_proj.weight
            used = [(attribute, known[id(p)], p.shape) for attribute, p in own.items() if id(p) in known]
            stack.enter_context(module.register_forward_hook(partial(count, used), with_kwargs=True))
        yield


def _rows(
    module: nn.Module, shape: torch.Size, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> float:
    """How often a module that is not known multiplies a matrix: once for each row that goes in and comes out."""
    if len(shape) < 2 or is_table(module):
        return 0.0
    given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    if given is not None and isinstance(out, Tensor) and given.shape[:-1] == out.shape[:-1]:
        inner, outer = given.shape[-1], out.shape[-1]
        if tuple(shape) in ((inner, outer), (outer, inner)):
            return out.numel() / outer
    kinds = ", ".join(kind.__name__.strip("_") for kind in _COUNTED)
    raise ValueError(f"cannot tell how often {type(module).__name__} multiplies {name!r}; countable are {kinds}")


def _positions(module: nn.Module, attribute: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """How often each weight is multiplied, over the whole batch."""
    if isinstance(module, nn.MultiheadAttention):
        return _tokens(attribute, args, kwargs)
    if isinstance(module, _ConvTransposeNd):
        source: Tensor = args[0] if args else kwargs["input"]
        return source.numel() / module.in_channels
    if isinstance(module, _ConvNd):
        return float(out.numel() / module.out_channels)
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        sequence: Tensor | PackedSequence = args[0] if args else kwargs["input"]
        steps = sequence.data if isinstance(sequence, PackedSequence) else sequence
        return steps.numel() / module.input_size
    return float(out.numel() / module.out_features)


def _tokens(attribute: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Attention projects queries, keys and values; its output has as many tokens as the queries."""
    given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    query, key, value = (given[name].numel() / given[name].shape[-1] for name in ("query", "key", "value"))
    shares = {"in_proj_weight": (query + key + value) / 3, "k_proj_weight": key, "v_proj_weight": value}
    return float(shares.get(attribute, query))
