"""Language models: what the experiments with small GPTs share, the text, the training, nats per character."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from powerprop.eval_mode import evaluating
from powerprop_paper import data, models
from powerprop_paper.experiments import fit_in
from powerprop_paper.run import Progress
from powerprop_paper.settings import Count, Range, Seeds, Settings
from powerprop_paper.train import Precision, local_device

BLOCKS = ("*.qkv.weight", "*.proj.weight", "*.up.weight", "*.down.weight")
"""The weights that are pruned and kept sparse; the head stays dense, as those leave it who prune language models."""
AT_ONCE = 256
"""Windows that are measured together."""


WEIGHT_DECAY, CLIP = 0.01, 1.0
"""Of AdamW, and the largest norm of the gradient."""
WARMUP = 0.05
"""The fraction of the steps in which the learning rate rises; it falls along a cosine to zero."""


@dataclass(frozen=True, kw_only=True)
class GPTSettings(Settings):
    """The network, how long it is trained, and what is held back."""

    validation: Annotated[float, Range(0, 0.5, above=True)] = 0.05
    """the fraction of a text, before the test text, on which choices are made"""
    test: Annotated[float, Range(0, 0.5, above=True)] = 0.1
    """the last fraction of a text, which is reported"""
    depth: Count = 4
    """blocks"""
    heads: Count = 4
    """of attention in each"""
    context: Count = 64
    """symbols that the network sees"""
    steps: Count = 6_000
    """training steps"""
    batch: Count = 12
    """windows of text per step"""
    seeds: Seeds = 3
    """runs of each network"""


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(GPTSettings):
    """The same for experiments with one text."""

    text: str = "tinyshakespeare"
    """what is read: `tinyshakespeare`, or a text file of one's own"""
    unit: Literal["characters", "bytes"] = "characters"
    """of the text"""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """of the passes, in training and where nats are measured"""
    checkpoint_every: Count = 500
    """steps between checkpoints"""


def splits(cfg: LanguageSettings) -> tuple[data.Text, tuple[Tensor, Tensor, Tensor]]:
    """The text, and its parts for training, choices and reports; each must be longer than the context."""
    text = data.load_text(cfg.text, cfg.unit)
    parts = text.parts(cfg.validation, cfg.test)
    if min(map(len, parts)) <= cfg.context:
        lengths = ", ".join(str(len(part)) for part in parts)
        raise ValueError(f"each part of the text must be longer than the context of {cfg.context}, got {lengths}")
    return text, parts


def build(cfg: LanguageSettings, width: int, seed: int) -> models.GPT:
    """The network with the initial weights of this seed."""
    kinds = data.load_text(cfg.text, cfg.unit).kinds
    generator = torch.Generator().manual_seed(seed)
    model = models.gpt(kinds, width, cfg.depth, cfg.heads, cfg.context, generator=generator)
    return model.to(local_device())


def adamw(model: nn.Module, lr: float, weight_decay: float = WEIGHT_DECAY) -> Optimizer:
    """AdamW in torch's fused form."""
    return AdamW(model.parameters(), lr, betas=(0.9, 0.99), weight_decay=weight_decay, fused=True)


def train(
    cfg: LanguageSettings, folder: Path, progress: Progress, model: models.GPT, optimizer: Optimizer, seed: int
) -> None:
    """The same seed gives every network the same windows of text."""
    _, (ids, held_back, _) = splits(cfg)
    precision = Precision(cfg.precision, local_device().type)
    batches = data.Windows(ids, cfg.context, cfg.batch, torch.Generator().manual_seed(seed))
    fit_in(
        folder, progress, model, optimizer, batches, cfg.steps, checkpoint_every=cfg.checkpoint_every,
        loss=next_symbol, clip=CLIP, precision=precision, schedule=lambda step: rate(step / cfg.steps),
        evaluate=lambda model: {"nats": nats(cfg, model, held_back)}, eval_every=max(1, cfg.steps // 4),
    )  # fmt: skip


def rate(done: float, warmup: float = WARMUP) -> float:
    """The learning rate when a fraction of the training is done: a linear rise to 1, then a cosine to 0."""
    return done / warmup if done < warmup else (1 + math.cos(math.pi * (done - warmup) / (1 - warmup))) / 2


def next_symbol(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross-entropy of every position."""
    return cross_entropy(logits.flatten(0, 1), ids.flatten())


def windows(ids: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of all whole windows that follow one another."""
    count = (len(ids) - 1) // context
    return ids[: count * context].view(count, context), ids[1 : count * context + 1].view(count, context)


@torch.no_grad()
def nats(cfg: LanguageSettings, model: nn.Module, ids: Tensor) -> float:
    """Mean cross-entropy per symbol, over windows that follow one another."""
    device, total = next(model.parameters()).device, 0.0
    x, y = windows(ids, cfg.context)
    with evaluating(model), Precision(cfg.precision, device.type).autocast(device):
        for inputs, labels in zip(torch.split(x, AT_ONCE), torch.split(y, AT_ONCE), strict=True):
            logits = model(inputs.to(device)).flatten(0, 1).float()
            total += cross_entropy(logits, labels.to(device).flatten(), reduction="sum").item()
    return total / y.numel()


def size(cfg: GPTSettings, width: int) -> str:
    """The weights of the blocks."""
    return f"{12 * cfg.depth * width**2 / 1e6:.1f}M"


def about(cfg: LanguageSettings, widths: tuple[int, ...]) -> str:
    """What was trained on what, for a reader."""
    sizes = " and ".join(size(cfg, width) for width in widths)
    passes = "" if cfg.precision == "float32" else f", passes in {cfg.precision}"
    return (
        f"A GPT of {cfg.depth} blocks with {sizes} weights, {cfg.context} {cfg.unit} of context, AdamW, {cfg.steps:,} "
        f"steps of {cfg.batch} windows of `{Path(cfg.text).name}`, {cfg.runs}{passes}. The head and "
        f"the embeddings are not pruned. Choices are made on {cfg.validation:.0%} of the text; shown are nats per "
        f"symbol on its last {cfg.test:.0%}, over windows that follow one another."
    )
