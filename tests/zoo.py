"""Modules of every kind that people put weights into: small stand-ins for layers of other libraries."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def random(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))))


class Conv1D(nn.Module):
    """Hugging Face's layer of GPT-2: a linear layer whose weight is (in, out)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = random(inputs, outputs), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class ScaledRMSNorm(nn.Module):
    """A norm over three dimensions, by a class of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = random(2, 3, 4)


class NormLinear(nn.Module):
    """Normalises its rows and multiplies: a layer, whatever its name begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = random(3, 4)


class Experts(nn.Module):
    """Batched experts, as mixtures of experts hold them; their biases have two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = random(2, 4, 6), random(2, 3, 4)
        self.gate_up_proj_bias = random(2, 6)
        self.w1, self.W_q = random(2, 3, 4), random(3, 4)


class VisionEmbeddings(nn.Module):
    """The start of a vision transformer: one convolution among tables."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.position_embeddings = random(1, 1, 8), random(1, 5, 8)
        self.projection = nn.Conv2d(3, 8, 2, 2)


class Block(nn.Module):
    """Tables, tokens and scales that belong to no embedding class."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed, self.mask_token = random(1, 5, 8), random(1, 8)
        self.relative_position_bias_table, self.rel_pos_w = random(9, 2), random(9, 2)
        self.latents, self.prompt = random(4, 8), random(4, 8)
        self.weight_scale, self.layer_weight = nn.Parameter(torch.ones(8)), random(8, 1, 1)
        self.kernel, self.text_projection, self.post_weight = random(8, 8), random(8, 4), random(8, 8)


class LoraLinear(nn.Linear):
    """A linear layer with low-rank factors beside its weight."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.lora_A, self.lora_B = random(2, 4), nn.Parameter(torch.zeros(4, 2))


class StateSpace(nn.Module):
    """A state matrix, which is not multiplied with inputs, beside a projection, which is."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.D, self.in_proj = random(8, 4), random(8), nn.Linear(4, 8)


class HomeMadeTable(nn.Module):
    """A table that is looked up, under a name that could be a matrix's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_weight, self.proj = random(8, 4), nn.Linear(4, 8)


class Lists(nn.Module):
    """Parameters in a list and in a dict take the name of their container."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([random(3, 4), random(3, 4)])
        self.tokens = nn.ParameterDict({"a": random(3, 4)})


class TiedLanguageModel(nn.Module):
    """The output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.mlp, self.head = nn.Embedding(7, 4), Conv1D(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.wte(x)))  # type: ignore[no-any-return]
