"""A small decoder-only transformer, as in GPT-2: pre-norm, GELU, learned positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "continued", "gpt"]

STD = 0.02


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """Embeddings of tokens and positions, blocks, and a head: (batch, length) numbers to logits of the next one.

    tied: the head is the embedding of the tokens.
    """

    def __init__(self, kinds: int, width: int, depth: int, heads: int, context: int, tied: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of the {heads} heads, got {width}")
        self.context = context
        self.tokens, self.positions = nn.Embedding(kinds, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, kinds, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if length > self.context:
            raise ValueError(f"at most {self.context} positions, got {length}")
        x = self.tokens(ids) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def gpt(
    kinds: int,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    context: int = 64,
    *,
    tied: bool = False,
    generator: torch.Generator | None = None,
) -> GPT:
    """A GPT with GPT-2's initial weights: N(0, 0.02²), divided by √(2·depth) where a block adds to the stream.

    The blocks have 12·depth·width² weights: 0.8 million of width 128 and 3.1 million of width 256, four deep.

    Args:
        kinds: of tokens.
        context: the largest number of positions.
        tied: one matrix is the embedding of the tokens and the head.
        generator: source of the initial weights; None is torch's global one.
    """
    with torch.device("meta"):
        model = GPT(kinds, width, depth, heads, context, tied)
    model = model.to_empty(device="cpu")
    if tied:
        model.head.weight = model.tokens.weight
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim > 1:
                adds = name.endswith(("proj.weight", "down.weight"))
                param.normal_(0.0, STD / math.sqrt(2 * depth) if adds else STD, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    return model


@torch.no_grad()
def continued(model: GPT, start: Tensor, count: int, generator: torch.Generator, temperature: float = 1.0) -> Tensor:
    """`count` further numbers after `start`, each drawn from what the model expects."""
    ids = start
    for _ in range(count):
        logits = model(ids[None, -model.context :])[0, -1] / temperature
        ids = torch.cat([ids, torch.multinomial(logits.softmax(0), 1, generator=generator)])
    return ids[len(start) :]
